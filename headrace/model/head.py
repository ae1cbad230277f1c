"""From hidden states to logprobs, a chunk of tokens at a time: [tokens, vocabulary] is never held whole.
Engine and trainer use the same `Head`, which is what makes their numbers agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.model.attention import EXACT_ROWS
from headrace.model.fused_head import FusedLogprobs, LogprobsWithLoss, Scaling, Wanted, chunk_rows, product, whole_spans
from headrace.model.masked_head import MaskedLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model.fused_head import LossGradient

_FEW = 16  # if at most 1/16 of the tokens are allowed, computing their columns alone is faster than the whole product


@dataclass(frozen=True)
class AllowedTokens:
    """A ragged sampling mask: row r allows ids[offsets[r]:offsets[r+1]]; an empty row allows everything."""

    offsets: Tensor
    ids: Tensor

    def is_few(self, vocabulary: int) -> bool:
        """Whether every row is restricted, and on average to few tokens."""
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
    """A model's output embedding and its scaling of logits."""

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
        """The weight in the dtype of the products; a copy if that is not its own, so call it once per pass."""
        is_narrow = torch.is_autocast_enabled(self.weight.device.type)
        return self.weight.to(torch.get_autocast_dtype(self.weight.device.type)) if is_narrow else self.weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self._linear, "bias", None)
        return bias

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[rows, vocabulary] float32 logits before scaling."""
        return product(hidden, weight, self.bias)

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """[rows, vocabulary] float32 before temperature. `weight`: from `narrowed`. For engines: bfloat16 has no gradient."""
        rows = hidden.shape[0]
        if self._exact:
            hidden = F.pad(hidden, (0, 0, 0, -rows % EXACT_ROWS))
        return self.scaling.apply(self.product(hidden, self.narrowed() if weight is None else weight))[:rows]

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, allowed: AllowedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logprob of each target, detached entropy of each row); gradients flow to hidden states and head."""
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
        judge: LossGradient,
        *,
        counts: Sequence[int],
        gathered: Tensor | None = None,
    ) -> Tensor | None:
        """`logprobs` and a loss on them with one product less: returns 0 with the loss's gradient. Calls `judge` for the loss's
        derivative chunk by chunk of whole sequences, which have `counts` rows; None if one is too long for a chunk. The
        weight's gradient is added to `gathered`, if given."""
        spans = whole_spans(counts, chunk_rows(self.vocabulary, hidden.device))
        if spans is None:
            return None
        wanted = Wanted(targets, temperatures, None, self.scaling, padding=EXACT_ROWS if self._exact else 1)
        result: Tensor = LogprobsWithLoss.apply(  # type: ignore[no-untyped-call]
            hidden, self.narrowed(), self.bias, wanted, spans, judge, gathered
        )
        return result
