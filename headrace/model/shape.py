"""The sizes of a decoder, from its configuration alone: memory is predicted from them before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.records import unknown_expert

_WITH_QUERY_NORMS = {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3"}  # not in their configurations
_WIDE_EXPERTS = {"mixtral", "gpt_oss", "phimoe"}  # families whose `intermediate_size` is an expert's


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Widths are per token and layer; with both dense and expert layers, `widths` gives the mean over the layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    key_dim: int  # of one head's query and key
    value_dim: int  # of one head's value; differs from `key_dim` in DeepSeek's models
    intermediate: int  # of a dense layer's MLP
    vocabulary: int
    is_tied: bool  # the head's weight is the embedding's
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0  # experts that every token goes through
    expert_layers: int = 0  # layers whose MLP is experts
    has_query_norms: bool = False
    low_ranks: tuple[int, int, int] = (0, 0, 0)  # latent attention: queries, keys and values, rotated part of keys

    @classmethod
    def of(cls, config: Any) -> ModelShape:  # noqa: ANN401  (transformers' configs share no typed surface)
        text = config.get_text_config()

        def number(*names: str, otherwise: int = 0) -> int:
            return next((int(found) for name in names if (found := getattr(text, name, None))), otherwise)

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        rotated, experts = number("qk_rope_head_dim"), number("num_experts", "num_local_experts", "n_routed_experts")
        low_rank = number("kv_lora_rank")
        head_dim = number("head_dim", otherwise=hidden // max(heads, 1))
        layers, intermediate = number("num_hidden_layers"), number("intermediate_size", otherwise=4 * hidden)
        is_wide = text.model_type in _WIDE_EXPERTS
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads if low_rank else number("num_key_value_heads", otherwise=heads),
            key_dim=number("qk_nope_head_dim") + rotated if low_rank else head_dim,
            value_dim=number("v_head_dim") if low_rank else head_dim,
            intermediate=intermediate,
            vocabulary=number("vocab_size"),
            is_tied=bool(getattr(text, "tie_word_embeddings", False)),
            experts=experts,
            experts_per_token=number("num_experts_per_tok", otherwise=1) if experts else 0,
            expert_intermediate=0 if not experts else intermediate if is_wide else number("moe_intermediate_size"),
            shared_experts=number("n_shared_experts") if experts else 0,
            expert_layers=max(0, layers - number("first_k_dense_replace")) if experts else 0,
            has_query_norms=text.model_type in _WITH_QUERY_NORMS,
            low_ranks=(number("q_lora_rank"), low_rank, rotated) if low_rank else (0, 0, 0),
        )

    def widths(self) -> dict[str, float]:
        """Numbers in each kind of tensor that a pass makes per token and layer."""
        share = self.expert_layers / max(self.layers, 1)
        routed, shared = share * self.experts_per_token, share * self.shared_experts
        queries, keys = self.heads * self.key_dim, self.kv_heads * self.key_dim
        return {
            "one": 1,
            "hidden": self.hidden,
            "heads": self.heads,
            "queries": queries,
            "keys": keys,
            "values": self.kv_heads * self.value_dim,
            "attended": self.heads * self.value_dim,
            "intermediate": (1 - share) * self.intermediate + shared * self.expert_intermediate,
            "routed_hidden": routed * self.hidden,
            "routed_intermediate": routed * self.expert_intermediate,
            "normed": queries + keys if self.has_query_norms else 0,
            "normed_heads": self.heads + self.kv_heads if self.has_query_norms else 0,
        }

    @property
    def embedding(self) -> int:
        """Numbers in the embedding, and in the head."""
        return self.vocabulary * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Numbers in the matrices of the largest layer."""
        return self._attention + max(3 * self.hidden * self.intermediate, self._experts if self.expert_layers else 0)

    @property
    def matrices(self) -> int:
        """Numbers in all parameters of two dimensions or more."""
        mlps = (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate + self.expert_layers * self._experts
        return self.embedding * (1 if self.is_tied else 2) + self.layers * self._attention + mlps

    @property
    def row_flops(self) -> int:
        """Of training on one token, without attention to others: 6 for each number it is multiplied with."""
        routed = (
            self.expert_layers * (self.experts_per_token + self.shared_experts) * 3 * self.hidden * self.expert_intermediate
        )
        dense = (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate
        return 6 * (self.embedding + self.layers * self._attention + dense + routed)

    @property
    def pair_flops(self) -> int:
        """Of training on a sequence, for each of its squared length (causal attention computes half of the pairs)."""
        return 3 * self.layers * self.heads * (self.key_dim + self.value_dim)

    @property
    def vectors(self) -> int:
        """Numbers in norms; biases are not counted."""
        return (2 * self.layers + 1) * self.hidden + 2 * self.layers * (self.key_dim if self.has_query_norms else 0)

    @property
    def cached_numbers(self) -> int:
        """Numbers one token adds to the KV cache, over all layers."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def routing_bytes(self) -> int:
        """Bytes of one token's recorded routing, over all layers (`Routers.dtype`)."""
        return self.expert_layers * self.experts_per_token * (1 if self.experts < unknown_expert("uint8") else 2)

    @property
    def _attention(self) -> int:
        queries, keys, values = self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim
        output = self.heads * self.value_dim * self.hidden
        query_rank, rank, rotated = self.low_ranks
        if not rank:
            return self.hidden * (queries + keys + values) + output
        narrow = query_rank * (self.hidden + queries) if query_rank else self.hidden * queries
        return narrow + self.hidden * (rank + rotated) + rank * (queries - self.heads * rotated + values) + output

    @property
    def _experts(self) -> int:
        experts = (self.experts + self.shared_experts) * 3 * self.hidden * self.expert_intermediate
        return experts + self.experts * self.hidden
