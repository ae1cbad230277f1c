"""From hidden states to logprobs, a chunk of tokens at a time: [tokens, vocabulary] is never held whole.
Engine and trainer use the same `Head`, which is what makes their numbers agree."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.lora import adapter_of
from headrace.model.attention import EXACT_ROWS
from headrace.model.fused_head import (
    AllTokens,
    FewTokens,
    Logprobs,
    LogprobsWithLoss,
    Scaling,
    Targets,
    chunk_rows,
    grouped,
    product,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model.fused_head import AllowedTokens, LossGradient


class Head:
    """A model's output embedding and its scaling of logits."""

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self._model, self._linear = model, model.get_output_embeddings()
        config = model.config.get_text_config()
        self.scaling = Scaling(
            divisor=getattr(config, "logits_scaling", None),
            factor=getattr(config, "logit_scale", None),
            softcap=getattr(config, "final_logit_softcapping", None),
        )
        self._exact = exact
        self._padding = EXACT_ROWS if exact else 1

    @property
    def weight(self) -> Tensor:
        """[vocabulary, hidden]; the adapter's, if that has the head whole."""
        found = self._parameter("weight")
        assert found is not None
        return found

    @property
    def bias(self) -> Tensor | None:
        return self._parameter("bias")

    def _parameter(self, name: str) -> Tensor | None:
        adapter = adapter_of(self._model)
        replaced = {} if adapter is None else adapter.replacing(self._linear)
        found: Tensor | None = replaced.get(name, getattr(self._linear, name, None))
        return found

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    def narrowed(self) -> Tensor:
        """The weight in the dtype of the products; a copy if that is not its own, so call it once per pass."""
        is_narrow = torch.is_autocast_enabled(self.weight.device.type)
        return self.weight.to(torch.get_autocast_dtype(self.weight.device.type)) if is_narrow else self.weight

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[rows, vocabulary] float32 logits before scaling."""
        return product(hidden, weight, self.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] float32 before temperature. For engines: bfloat16 has no gradient."""
        rows = F.pad(hidden, (0, 0, 0, -len(hidden) % EXACT_ROWS)) if self._exact else hidden
        return self.scaling.apply(self.product(rows, self.narrowed()))[: len(hidden)]

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, *, allowed: AllowedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logprob of each target, entropy of each row); gradients flow to hidden states and head."""
        if not len(targets):
            return hidden.sum(dim=1, dtype=torch.float32), temperatures.new_zeros(0)
        is_few = allowed is not None and not self._exact and allowed.is_few(self.vocabulary)
        given = Targets(targets, temperatures, allowed, self.scaling, padding=self._padding)
        result: tuple[Tensor, Tensor] = Logprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.narrowed(), self.bias, given, FewTokens if is_few else AllTokens
        )
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
        most = chunk_rows(self.vocabulary, hidden.device)
        if max(counts, default=0) > most:
            return None
        starts = [0, *accumulate(counts)]
        spans = [slice(starts[group.start], starts[group.stop]) for group in grouped(counts, most)]
        given = Targets(targets, temperatures, None, self.scaling, padding=self._padding)
        result: Tensor = LogprobsWithLoss.apply(  # type: ignore[no-untyped-call]
            hidden, self.narrowed(), self.bias, given, spans, judge, gathered
        )
        return result
