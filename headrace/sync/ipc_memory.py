"""GPU memory that one process exports by handle and another opens."""

from __future__ import annotations

import ctypes
import weakref

import torch

from headrace.cuda_driver import Bytes, call
from headrace.errors import SyncError
from headrace.sync.memory import Buffer

_HANDLE_BYTES = 64
_REACH_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class ExportedMemory(Buffer):
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the driver needs a context
            self._address = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
            handle = _Handle()
            call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
        self.handle = ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES).hex()
        self.device = device
        self.tensor = torch.as_tensor(Bytes(self._address.value, num_bytes), device=device)
        EXPORTED[self.handle] = self

    def drop(self) -> None:
        """Receivers that have it open can still read it until they close it."""
        if self._address.value:
            torch.cuda.synchronize(self.device)
            call("cuMemFree_v2", self._address)
            self._address = ctypes.c_uint64(0)


EXPORTED: weakref.WeakValueDictionary[str, ExportedMemory] = weakref.WeakValueDictionary()
"""By handle, because a process cannot open its own."""


class OpenedMemory:
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
