"""From hidden states to logprobs, a chunk of tokens at a time: [tokens, vocabulary] is never held whole.

The engine samples from, and the trainer differentiates, what `Head.logprobs` gives; one function on both sides is what
makes their numbers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self._linear, "bias", None)
        return None if bias is None else bias.to(self.weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32, before temperature."""
        rows = hidden.shape[0]
        if self._exact:
            hidden = F.pad(hidden, (0, 0, 0, -rows % EXACT_ROWS))
        logits: Tensor = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float()
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
        rows = hidden.shape[0]
        size = max(EXACT_ROWS, _CHUNK_ELEMENTS // self.vocabulary // EXACT_ROWS * EXACT_ROWS)
        if rows <= size:
            return self._chunk(hidden, targets, temperatures, allowed, 0, rows)
        pairs = [
            checkpoint(self._chunk, hidden, targets, temperatures, allowed, start, min(rows, start + size), use_reentrant=False)
            for start in range(0, rows, size)
        ]
        return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, allowed: AllowedTokens | None, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden[start:stop]) / temperatures[start:stop].unsqueeze(1)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.dense(start, stop, self.vocabulary), float("-inf"))
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(dim=-1)
        return logprobs.gather(1, targets[start:stop].unsqueeze(1)).squeeze(1), entropy
