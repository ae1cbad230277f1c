"""From hidden states to logprobs, a chunk of tokens at a time: [tokens, vocabulary] is never held whole.

The engine samples from, and the trainer differentiates, what `Head.logprobs` gives; one function on both sides is what
makes their numbers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.model.attention import EXACT_ROWS
from headrace.model.fused_head import FusedLogprobs, JudgedLogprobs, Scaling, Wanted, chunk_rows, product, whole_spans
from headrace.model.masked_head import MaskedLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model.fused_head import Judge

_FEW = 16
"""Where the kept tokens are one in so many of all, computing their columns alone is quicker than a product over all."""


@dataclass(frozen=True)
class AllowedTokens:
    """A ragged sampling mask over rows: row r may only be ids[offsets[r]:offsets[r+1]]; empty is unrestricted."""

    offsets: Tensor
    ids: Tensor

    def is_few(self, vocabulary: int) -> bool:
        """Whether every row is cut, and to few tokens."""
        counts = self.offsets[1:] - self.offsets[:-1]
        return len(self.ids) * _FEW <= len(counts) * vocabulary and bool((counts > 0).all())

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
        self.scaling = Scaling(
            divisor=getattr(config, "logits_scaling", None),
            factor=getattr(config, "logit_scale", None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
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

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self._linear, "bias", None)
        return bias

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[rows, vocabulary] float32, before anything is done to logits."""
        return product(hidden, weight, self.bias)

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """[rows, vocabulary] float32, before temperature. `weight` is `narrowed`, where it is at hand. For engines: it has no
        gradient where products are bfloat16."""
        rows = hidden.shape[0]
        if self._exact:
            hidden = F.pad(hidden, (0, 0, 0, -rows % EXACT_ROWS))
        return self.scaling.apply(self.product(hidden, self.narrowed() if weight is None else weight))[:rows]

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, allowed: AllowedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logprob of each target, entropy of each row, detached); gradients flow into hidden states and the head."""
        if not len(targets):
            return hidden.sum(dim=1, dtype=torch.float32), temperatures.new_zeros(0)
        wanted = Wanted(targets, temperatures, allowed, self.scaling, padding=EXACT_ROWS if self._exact else 1)
        is_cut = allowed is not None and not self._exact and allowed.is_few(self.vocabulary)
        function = MaskedLogprobs if is_cut else FusedLogprobs
        result: tuple[Tensor, Tensor] = function.apply(hidden, self.narrowed(), self.bias, wanted)  # type: ignore[no-untyped-call]
        return result

    def backpropagate(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        judge: Judge,
        *,
        counts: Sequence[int],
        gathered: Tensor | None = None,
    ) -> Tensor | None:
        """What `logprobs` and a loss on them come to, with one product less: 0, whose gradient is the loss's. `judge` is asked
        for its derivative chunk by chunk, whole sequences at a time, of which `counts` are the rows; None where one is too long
        for a chunk. With `gathered` the weight's gradient is added there."""
        spans = whole_spans(counts, chunk_rows(self.vocabulary, hidden.device))
        if spans is None:
            return None
        wanted = Wanted(targets, temperatures, None, self.scaling, padding=EXACT_ROWS if self._exact else 1)
        result: Tensor = JudgedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.narrowed(), self.bias, wanted, spans, judge, gathered
        )
        return result
