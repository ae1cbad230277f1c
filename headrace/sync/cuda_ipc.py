"""The transport between processes that share a GPU, or GPUs that reach each other: a handle travels, no byte does.

Weights are packed into memory that the driver can export; engines open the handle once, keep it, and copy straight from
there. A room is used again for later parcels, so that after the first update there is nothing left to open.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import TYPE_CHECKING

import torch

from headrace.cuda_driver import Bytes, call
from headrace.errors import SyncError
from headrace.sync.buffers import Rooms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target

_HANDLE_BYTES = 64
_MOST_OPENED = 4
_SPOILED = 256
"""Bytes."""
_REACH_PEERS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class ExportedRoom:
    """GPU memory that other processes may open."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the driver wants a context
            self._address = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
            handle = _Handle()
            call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        self.handle = ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES).hex()
        self.device = device
        self.tensor = torch.as_tensor(Bytes(self._address.value, num_bytes), device=device)
        _EXPORTED[self.handle] = self

    def drop(self) -> None:
        """Receivers that have it open keep what they opened until they close it."""
        if self._address.value:
            torch.cuda.synchronize(self.device)
            call("cuMemFree_v2", self._address)
            self._address = ctypes.c_uint64(0)


_EXPORTED: weakref.WeakValueDictionary[str, ExportedRoom] = weakref.WeakValueDictionary()
"""By handle: a process cannot open its own."""


class OpenedRoom:
    """Another process's memory, seen from here."""

    def __init__(self, handle: str, num_bytes: int, device: torch.device) -> None:
        raw = bytes.fromhex(handle)
        if len(raw) != _HANDLE_BYTES:
            raise SyncError(f"a handle has {_HANDLE_BYTES} bytes, this one {len(raw)}")
        exported, self._address = _Handle(), ctypes.c_uint64()
        ctypes.memmove(ctypes.byref(exported), raw, _HANDLE_BYTES)
        with torch.cuda.device(device):
            torch.zeros(1, device=device)
            call("cuIpcOpenMemHandle_v2", ctypes.byref(self._address), exported, ctypes.c_uint(_REACH_PEERS))
        self.tensor = torch.as_tensor(Bytes(self._address.value, num_bytes), device=device)

    def drop(self) -> None:
        if self._address.value:
            call("cuIpcCloseMemHandle", self._address)
            self._address = ctypes.c_uint64(0)


class CudaIpcTransport:
    """Between processes of one host. The sender's process lives as long as somebody reads."""

    name = "cuda_ipc"

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._rooms = Rooms(lambda num_bytes: ExportedRoom(max(num_bytes, 1), self._device))
        self._opened: dict[str, OpenedRoom] = {}
        """By handle, the last used last. What the sender has dropped is not freed before it is closed here too."""

    # The sender's end

    def room(self, key: str, num_bytes: int) -> Tensor:
        return self._rooms.take(key, num_bytes).tensor[:num_bytes]

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        found = self._rooms.find(key)
        if found is None:
            raise SyncError("there is no room for it any more")
        room, num_bytes = found
        torch.cuda.current_stream(self._device).synchronize()
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        return {"key": key, "handle": room.handle, "room": len(room.tensor), "bytes": num_bytes, "gpu": index}

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """Receivers come for it."""

    def free(self, key: str) -> None:
        """Whoever has the memory open can still read it; what was given up must not pass for whole."""
        parcel = self._rooms.parcel(key)
        if parcel is not None:
            parcel[:_SPOILED].bitwise_not_()
            torch.cuda.current_stream(self._device).synchronize()
        self._rooms.free(key)

    def close(self) -> None:
        for room in self._opened.values():
            with contextlib.suppress(RuntimeError):  # the sender may be gone, and its memory with it
                room.drop()
        self._opened.clear()
        self._rooms.close()

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        handle, size, num_bytes, gpu = (place.get(name) for name in ("handle", "room", "bytes", "gpu"))
        if not (isinstance(handle, str) and isinstance(size, int) and isinstance(gpu, int) and num_bytes == target.num_bytes):
            raise SyncError(f"{num_bytes} bytes are on offer and {target.num_bytes} were announced")
        target.write(0, self._open(handle, size, torch.device("cuda", gpu))[: target.num_bytes])

    def _open(self, handle: str, size: int, device: torch.device) -> Tensor:
        exported = _EXPORTED.get(handle)
        if exported is not None:
            return exported.tensor
        room = self._opened.pop(handle, None)
        if room is None:
            try:
                room = OpenedRoom(handle, size, device)
            except (RuntimeError, ValueError) as error:
                raise SyncError(f"the trainer's GPU memory cannot be opened ({error})") from error
        self._opened[handle] = room
        while len(self._opened) > _MOST_OPENED:
            with contextlib.suppress(RuntimeError):  # the sender may be gone
                self._opened.pop(next(iter(self._opened))).drop()
        return room.tensor
