"""The transport between processes that share a GPU, or whose GPUs are peers: only a handle travels.

The trainer packs weights into memory that the driver can export; engines open its handle, keep it open, and copy straight from
there. Buffers are reused for later keys, so after the first updates engines open nothing new.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.sync.memory import BufferedTransport
from headrace.sync.transport import COPIES, TransportMemory, read_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.ipc_memory import OpenedMemory
    from headrace.sync.transport import Target, TransportConfig

_MOST_OPENED = 4  # of one GPU: each rank of a trainer has its own
_SPOILED = 256  # bytes inverted when a buffer is freed


@dataclass(frozen=True)
class Place:
    """`size` is the size of the memory that the handle opens; the first `bytes` of it are in use."""

    handle: str
    size: int
    bytes: int
    gpu: int


class CudaIpcTransport(BufferedTransport[Any]):
    """Between processes of one host. The sender's process must outlive every read."""

    name = "cuda_ipc"
    needs_gpu = True

    def __init__(self, device: torch.device | str) -> None:
        import torch

        from headrace.sync import ipc_memory

        self._device = torch.device(device)
        super().__init__(lambda num_bytes: ipc_memory.ExportedMemory(max(num_bytes, 1), self._device))
        self._opened: dict[str, tuple[int, OpenedMemory]] = {}  # by handle, most recent last; until closed, it stays allocated

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> CudaIpcTransport:
        return cls(device)

    @classmethod
    def memory(cls, weights: int, *, on_gpu: bool) -> TransportMemory:
        return TransportMemory(exported=COPIES * weights)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        import torch

        exported, num_bytes = self.find(key)
        torch.cuda.current_stream(self._device).synchronize()
        gpu = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return {"handle": exported.handle, "size": len(exported.tensor), "bytes": num_bytes, "gpu": gpu}

    def free(self, key: str) -> None:
        """Also corrupts the first bytes: receivers still have the memory open, and must not accept an aborted update."""
        import torch

        if key in self._held:
            self.bytes_of(key)[:_SPOILED].bitwise_not_()
            torch.cuda.current_stream(self._device).synchronize()
        super().free(key)

    def close(self) -> None:
        for handle in list(self._opened):
            self._close_opened(handle)
        super().close()

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = read_place(Place, place)
        if there.bytes != target.num_bytes:
            raise SyncError(f"{there.bytes} bytes are on offer and {target.num_bytes} were announced")
        target.write(0, self._open(there)[: target.num_bytes])

    def _open(self, place: Place) -> Tensor:
        import torch

        from headrace.sync import ipc_memory

        exported = ipc_memory.EXPORTED.get(place.handle)
        if exported is not None:
            return exported.tensor
        _, opened = self._opened.pop(place.handle, (0, None))
        if opened is None:
            try:
                opened = ipc_memory.OpenedMemory(place.handle, place.size, torch.device("cuda", place.gpu))
            except (RuntimeError, ValueError) as error:
                raise SyncError(f"the trainer's GPU memory cannot be opened ({error})") from error
        self._opened[place.handle] = place.gpu, opened
        for handle in [each for each, (gpu, _) in self._opened.items() if gpu == place.gpu][:-_MOST_OPENED]:
            self._close_opened(handle)
        return opened.tensor

    def _close_opened(self, handle: str) -> None:
        with contextlib.suppress(RuntimeError):  # the sender may be gone, and its memory with it
            self._opened.pop(handle)[1].drop()
