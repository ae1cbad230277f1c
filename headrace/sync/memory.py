"""The transport inside one process: the engine copies from the buffer that the trainer has packed its weights into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.buffers import BufferedTransport, TorchBuffer
from headrace.sync.folder import COPIES
from headrace.sync.transport import TransportMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target, TransportConfig


class MemoryTransport(BufferedTransport[TorchBuffer]):
    """Both ends are the same object."""

    name = "memory"
    crosses_processes = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(lambda num_bytes: TorchBuffer(num_bytes, device))

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> MemoryTransport:
        return cls(device)

    @classmethod
    def memory(cls, weights: int, *, on_gpu: bool) -> TransportMemory:
        return TransportMemory(trainer=COPIES * weights)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        return {"key": key}

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        found = self.bytes_of(str(place.get("key")))
        if found is None:
            raise SyncError("it is not on offer any more, or never was")
        target.write(0, found)
