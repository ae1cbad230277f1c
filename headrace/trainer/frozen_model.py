"""Models that are scored with but never trained: the reference of a KL, the teacher of a distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.model import Arena, Head

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class FrozenModel:
    """A model and its head. If offloaded, its weights are in host memory except between `wake` and `sleep`."""

    def __init__(self, model: PreTrainedModel, *, exact: bool = False, offload: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.arena = Arena.adopt(self.model)
        self.head = Head(self.model, exact=exact)
        self._resting: Tensor | None = None
        if offload and self.arena.device.type == "cuda":
            self._resting = self.arena.memory.to("cpu").pin_memory()
            self.sleep()

    def wake(self) -> None:
        """Copy offloaded weights back to the GPU."""
        if self._resting is not None and not self.arena.memory.untyped_storage().size():
            self.arena.memory.untyped_storage().resize_(self._num_bytes)
            self.arena.memory.copy_(self._resting, non_blocking=True)

    def sleep(self) -> None:
        """Free the GPU memory of offloaded weights."""
        if self._resting is not None:
            storage = self.arena.memory.untyped_storage()
            self._num_bytes = storage.size()
            torch.cuda.current_stream(self.arena.device).synchronize()
            storage.resize_(0)

    @property
    def device(self) -> torch.device:
        return self.arena.device
