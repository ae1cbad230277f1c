"""New weights on their way into a vLLM server: here, until they are checked.

They arrive as at any engine, beside those held, and are hashed against the manifest before the server hears of them. It gets
them in the form models are saved in, whatever their layout in memory (`handover.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.core_model_loading import revert_weight_conversion

from headrace.model import SpareWeights, check_order, named_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.records import WeightUpdate
    from headrace.sync import WeightSync


class Staging:
    """The last update that arrived whole. Its calls block: they are made in a thread."""

    def __init__(self, model: PreTrainedModel, *, sync: WeightSync) -> None:
        """`model` is the policy where it is handed over from: in the host's memory, or on a GPU."""
        self._model, self._sync = model, sync
        self._spare = SpareWeights(model, in_place=False)

    def receive(self, update: WeightUpdate, *, lineage: str, version: int) -> None:
        """Beside what is held; raises where it is not what was sent."""
        check_order(update, lineage=lineage, version=version)
        self._spare.receive(update, lambda incoming: self._sync.receive(update, incoming))

    def give_up(self) -> None:
        self._spare.give_up()

    def take(self) -> dict[str, Tensor]:
        """What was received; what was held before is what the next is received over."""
        self._spare.exchange()
        return saved_form(self._model)


@torch.no_grad()
def saved_form(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors under the names and in the shapes of a saved folder: experts one by one, tied ones once."""
    held = dict(named_tensors(model))
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, held).items()}
