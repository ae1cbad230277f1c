"""Memory that can be given back and taken again while tensors, and CUDA graphs, keep pointing at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Memory(Protocol):
    """Some bytes. While they are given back nobody may touch the tensor; once taken again, what they hold is undefined."""

    tensor: Tensor
    """[bytes] uint8, zero at first."""

    def give_back(self) -> None:
        """Let others have the memory."""

    def take(self) -> None:
        """Have it again."""


class HostMemory:
    """Of a CPU: the tensors stay, their storage is emptied and filled."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)

    def give_back(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.tensor.zero_()


def make_memory(num_bytes: int, device: torch.device) -> Memory:
    if device.type != "cuda":
        return HostMemory(num_bytes)
    from headrace.engine.native.cuda.memory import Region

    return Region(num_bytes, device)
