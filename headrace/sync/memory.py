"""The transport inside one process: the engine copies from the buffer that the trainer has packed its weights into.

It is also the simplest of the transports that keep what they offer in buffers by key. A freed buffer is reused for the next
key: touched memory is faster than fresh memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.errors import SyncError
from headrace.sync.transport import COPIES, Transport, TransportMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target, TransportConfig


class Buffer:
    """A transport's memory. `tensor` is all of it, as 1-D uint8."""

    tensor: Tensor

    def drop(self) -> None:
        """Free the memory that torch does not free with the last reference."""


class TorchBuffer(Buffer):
    def __init__(self, num_bytes: int, device: torch.device | str = "cpu") -> None:
        import torch

        from headrace.model import allocate_bytes

        self.tensor = allocate_bytes(num_bytes, torch.device(device))


B = TypeVar("B", bound=Buffer)


class Spare(Generic[B]):
    """Makes buffers and keeps one returned buffer for reuse: the next update is written while the last may still be read."""

    def __init__(self, make: Callable[[int], B]) -> None:
        self._make = make
        self._spare: B | None = None
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> B:
        with self._lock:
            buffer, self._spare = self._spare, None
        if buffer is not None and len(buffer.tensor) >= num_bytes:
            return buffer
        if buffer is not None:
            buffer.drop()
        return self._make(num_bytes)

    def give(self, buffer: B) -> None:
        """Take a buffer back; keep the larger of it and the current spare."""
        with self._lock:
            if self._spare is not None:
                smaller, buffer = sorted((self._spare, buffer), key=lambda each: len(each.tensor))
                smaller.drop()
            self._spare = buffer

    def clear(self) -> None:
        with self._lock:
            if self._spare is not None:
                self._spare.drop()
                self._spare = None


class BufferedTransport(Transport, Generic[B]):
    """A transport that keeps what it offers in buffers of one kind."""

    def __init__(self, make: Callable[[int], B]) -> None:
        self._spare = Spare(make)
        self._held: dict[str, tuple[B, int]] = {}  # by key, with the bytes in use

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        self.free(key)
        self._held[key] = self._spare.take(num_bytes), num_bytes
        return self.bytes_of(key)

    def find(self, key: str) -> tuple[B, int]:
        try:
            return self._held[key]
        except KeyError as error:
            raise SyncError(f"{key!r} is not on offer any more, or never was") from error

    def bytes_of(self, key: str) -> Tensor:
        buffer, num_bytes = self.find(key)
        return buffer.tensor[:num_bytes]

    def free(self, key: str) -> None:
        buffer, _ = self._held.pop(key, (None, 0))
        if buffer is not None:
            self._spare.give(buffer)

    def close(self) -> None:
        held, self._held = self._held, {}
        for buffer, _ in held.values():
            buffer.drop()
        self._spare.clear()


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
        target.write(0, self.bytes_of(str(place.get("key"))))
