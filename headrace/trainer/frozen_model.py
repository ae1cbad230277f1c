"""Models that are scored with but never trained: the reference of a KL, the teacher of a distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.model import Arena, Head

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class FrozenModel:
    """A model and its head, used as a context. If offloaded, its weights are on the GPU only within it."""

    def __init__(self, model: PreTrainedModel, *, exact: bool = False, offload: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.arena = Arena.adopt(self.model)
        self.head = Head(self.model, exact=exact)
        self._on_host: Tensor | None = None
        if offload and self.arena.device.type == "cuda":
            self._on_host = self.arena.memory.to("cpu").pin_memory()
            self._num_bytes = self.arena.memory.untyped_storage().size()
            self.__exit__()

    def __enter__(self) -> None:
        if self._on_host is not None:
            self.arena.memory.untyped_storage().resize_(self._num_bytes)
            self.arena.memory.copy_(self._on_host, non_blocking=True)

    def __exit__(self, *_: object) -> None:
        if self._on_host is not None:
            torch.cuda.current_stream(self.arena.device).synchronize()
            self.arena.memory.untyped_storage().resize_(0)
