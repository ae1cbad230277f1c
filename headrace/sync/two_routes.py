"""Two routes for one update: engines on the trainer's host receive by its own transport, those on others over HTTP.

The bytes are packed and hashed once. What lies in host memory is served from where it lies; what lies on a GPU is copied to
host memory once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from headrace.sync.cuda_ipc import CudaIpcTransport
from headrace.sync.http.transport import HttpTransport
from headrace.sync.shared_memory import SharedMemoryTransport
from headrace.sync.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Part, Plain
    from headrace.sync.memory import BufferedTransport
    from headrace.sync.transport import Target, TransportConfig, TransportMemory


class TwoRoutes(Transport):
    """The sender's end. A receiver has one route, and its end is that transport's."""

    near: ClassVar[type[BufferedTransport[Any]]]
    listens = True
    between_hosts = HttpTransport.name

    def __init__(self, near: BufferedTransport[Any], far: HttpTransport) -> None:
        self._near, self._far = near, far

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> Transport:
        near = cls.near.make(config, is_sender=is_sender, device=device)
        if not is_sender:
            return near
        return cls(cast("BufferedTransport[Any]", near), HttpTransport.make(config, is_sender=True, device=device))

    @classmethod
    def memory(cls, weights: int, *, on_gpu: bool) -> TransportMemory:
        return cls.near.memory(weights, on_gpu=on_gpu)

    @classmethod
    def routes(cls, part: Part, relays: Sequence[str]) -> list[Part]:
        """A receiver without a relay is on the trainer's host."""
        near, far = (cast("dict[str, Plain]", part.place[route]) for route in ("near", "far"))
        there = HttpTransport.routes(replace(part, transport=HttpTransport.name, place=far), [url for url in relays if url])
        here, others = replace(part, transport=cls.near.name, place=near), iter(there)
        return [next(others) if url else here for url in relays]

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        return self._near.allocate(key, num_bytes)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        memory = self._near.bytes_of(key)
        if memory.device.type == "cpu":
            self._far.lend(key, memory)
        else:
            self._far.allocate(key, len(memory)).copy_(memory)
        near: Plain = {**self._near.post(key, views)}
        return {"near": near, "far": {**self._far.post(key, views)}}

    def free(self, key: str) -> None:
        self._far.free(key)
        self._near.free(key)

    def close(self) -> None:
        self._far.close()
        self._near.close()

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        raise AssertionError("a receiver has one route")


class SharedMemoryAndHttp(TwoRoutes):
    name = "shared_memory+http"
    near = SharedMemoryTransport
    uses_folder = True


class CudaIpcAndHttp(TwoRoutes):
    name = "cuda_ipc+http"
    near = CudaIpcTransport
    needs_gpu = True
