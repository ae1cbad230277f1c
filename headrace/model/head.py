"""From hidden states to logprobs, a chunk of tokens at a time: [tokens, vocabulary] is never held whole.

The engine samples from, and the trainer differentiates, what `Head.logprobs` gives; one function on both sides is what
makes their numbers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from headrace.model.attention import EXACT_ROWS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time: 64 MiB of float32."""


@dataclass(frozen=True)
class AllowedTokens:
    """A ragged sampling mask over rows: row r may only be ids[offsets[r]:offsets[r+1]]; empty is unrestricted."""

    offsets: Tensor
    ids: Tensor

    def dense(self, start: int, stop: int, vocabulary: int) -> Tensor:
        """[stop - start, vocabulary] bool."""
        counts = self.offsets[start + 1 : stop + 1] - self.offsets[start:stop]
        rows = torch.repeat_interleave(torch.arange(stop - start, device=counts.device), counts)
        allowed = (counts == 0).unsqueeze(1).expand(-1, vocabulary).clone()
        allowed[rows, self.ids[self.offsets[start] : self.offsets[stop]]] = True
        return allowed


class _WideProduct(torch.autograd.Function):
    """hidden @ weight.T of bfloat16 numbers, added up and left in float32; gradients are bfloat16, as under autocast."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401  (autograd's own)
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        if gradient.is_cuda:
            return gradient @ weight, gradient.t() @ hidden
        gradient = gradient.float()  # products of bfloat16 are slow on most CPUs, and missing on some
        return (gradient @ weight.float()).to(weight.dtype), (gradient.t() @ hidden.float()).to(hidden.dtype)


class Head:
    """The output embedding of a model, and what its configuration does to logits."""

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self._linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.divisor: float | None = getattr(config, "logits_scaling", None)
        self.factor: float | None = getattr(config, "logit_scale", None)
        self._exact = exact

    @property
    def vocabulary(self) -> int:
        return int(self._linear.weight.shape[0])

    @property
    def weight(self) -> Tensor:
        """[vocabulary, hidden]."""
        weight: Tensor = self._linear.weight
        return weight

    def narrowed(self) -> Tensor:
        """The weight in the dtype products are made in: where that is another than its own, a copy, to be made once."""
        is_narrow = torch.is_autocast_enabled(self.weight.device.type)
        return self.weight.to(torch.get_autocast_dtype(self.weight.device.type)) if is_narrow else self.weight

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[rows, vocabulary] float32, before anything is done to logits. Of bfloat16 numbers too: rounded to bfloat16, a logit
        of 20 would be off by up to a sixteenth, and engine and trainer would round it differently."""
        bias: Tensor | None = getattr(self._linear, "bias", None)
        if weight.dtype == torch.float32:
            return F.linear(hidden, weight, bias)
        logits: Tensor = _WideProduct.apply(hidden.to(weight.dtype), weight)  # type: ignore[no-untyped-call]
        return logits if bias is None else logits + bias.float()

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """[rows, vocabulary] float32, before temperature. `weight` is `narrowed`, where it is at hand."""
        rows = hidden.shape[0]
        if self._exact:
            hidden = F.pad(hidden, (0, 0, 0, -rows % EXACT_ROWS))
        logits = self.product(hidden, self.narrowed() if weight is None else weight)
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits[:rows]

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, allowed: AllowedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logprob of each target, entropy of each row, detached); gradients flow into hidden states and the head."""
        rows, weight = hidden.shape[0], self.narrowed()
        size = max(EXACT_ROWS, _CHUNK_ELEMENTS // self.vocabulary // EXACT_ROWS * EXACT_ROWS)
        if rows <= size:
            return self._chunk(weight, hidden, targets, temperatures, allowed, 0, rows)
        chunks = [(start, min(rows, start + size)) for start in range(0, rows, size)]
        pairs = [
            checkpoint(self._chunk, weight, hidden, targets, temperatures, allowed, *chunk, use_reentrant=False)
            for chunk in chunks
        ]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])

    def _chunk(
        self,
        weight: Tensor,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        allowed: AllowedTokens | None,
        start: int,
        stop: int,
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden[start:stop], weight) / temperatures[start:stop].unsqueeze(1)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.dense(start, stop, self.vocabulary), float("-inf"))
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(dim=-1)
        return logprobs.gather(1, targets[start:stop].unsqueeze(1)).squeeze(1), entropy
