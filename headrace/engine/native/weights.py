"""The native engine's weights: one arena, whose memory on a GPU can be given back while the engine sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.engine.native.releasable_memory import make_memory
from headrace.model import Arena

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.releasable_memory import ReleasableMemory


class EngineWeights:
    """The model's weights, moved into an arena."""

    def __init__(self, model: PreTrainedModel, *, room: dict[str, int] | None) -> None:
        """`room`: rows to leave free behind matrices, by name."""
        self.memories: list[ReleasableMemory] = []  # what they lie in on a GPU
        self._in_host_memory: Tensor | None = None  # while they sleep
        device = next(model.parameters()).device
        if device.type == "cuda":
            self.arena = Arena.adopt(model, allocate=self._allocate, room=room)
            torch.cuda.empty_cache()  # where the model was loaded to: free for the cache, and no part of the engine's peak
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self.arena = Arena.adopt(model, room=room)

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self.memories.append(make_memory(num_bytes, device))
        return self.memories[-1].tensor

    @property
    def mapped_bytes(self) -> int:
        """GPU memory that torch does not count."""
        return sum(memory.tensor.numel() for memory in self.memories)

    @property
    def are_asleep(self) -> bool:
        """Whether they are in host memory, so that nothing can be computed."""
        return self._in_host_memory is not None

    def sleep(self) -> None:
        """Move them to host memory, from a GPU."""
        if self.memories:
            self._in_host_memory = self.arena.memory.cpu()
            for memory in self.memories:
                memory.release()

    def wake(self) -> None:
        if self._in_host_memory is not None:
            for memory in self.memories:
                memory.restore()
            self.arena.memory.copy_(self._in_host_memory)
            self._in_host_memory = None
