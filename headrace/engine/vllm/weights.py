"""New weights on their way into a vLLM server that takes them from a folder.

They arrive as at any engine, beside those that run, and are hashed against the manifest before the server hears of them. Then
they are written in the form models are saved in, whatever their layout in memory, where the server reads them.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from headrace.model.weights import SpareWeights, WeightError, check_order, named_tensors
from headrace.types import Payload

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.sync import WeightSync
    from headrace.types import WeightUpdate


class Staging:
    """The last update that arrived whole, and a folder to hand it on in. Its calls block: they are made in a thread."""

    def __init__(self, model: PreTrainedModel, *, sync: WeightSync, folder: Path) -> None:
        """`model` is the policy in the host's memory; `folder` is this engine's own, best in memory too."""
        self._model, self._sync, self._folder = model, sync, folder
        self._spare = SpareWeights(model)
        folder.mkdir(mode=0o700, exist_ok=True)

    def receive(self, update: WeightUpdate, *, lineage: str, version: int) -> None:
        """Beside what is held; raises where it is not what was sent."""
        if update.payload is Payload.ADAPTER:
            raise WeightError(f"version {update.version} is an adapter, and this engine runs none")
        check_order(update, lineage=lineage, version=version)
        self._spare.receive(update, lambda incoming: self._sync.receive(update, incoming))

    def give_up(self) -> None:
        self._spare.give_up()

    def write(self) -> str:
        """What was received, as a folder of weights; what was held before is what the next is received over."""
        self._spare.exchange()
        save_file(saved_form(self._model), self._folder / "model.safetensors")
        return str(self._folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@torch.no_grad()
def saved_form(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's tensors under the names and in the shapes of a saved folder: experts one by one, tied ones once."""
    held = dict(named_tensors(model))
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, held).items()}
