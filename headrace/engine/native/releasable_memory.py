"""Memory that can be released and restored while tensors and CUDA graphs keep pointing at it.

Nobody may touch the tensor while it is released; after a restore its content is undefined. On a GPU the driver reserves an
address range once, and maps, unmaps and remaps physical memory to it.
"""

from __future__ import annotations

import ctypes

import torch

from headrace.cuda_driver import Bytes, call

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # of CUmemAllocationType, CUmemLocationType and CUmemAccess_flags


class HostMemory:
    """On a CPU: the tensor stays, its storage is freed and allocated again."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)

    def release(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.tensor.zero_()


class _Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceMemory:
    """On a GPU, at an address that stays."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # creates the context the driver needs
        number = device.index if device.index is not None else torch.cuda.current_device()
        self._location = _Location(_DEVICE, number)
        self._properties = _Properties(kind=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), ctypes.c_int(0))
        self._num_bytes = -(-max(num_bytes, 1) // granularity.value) * granularity.value
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        size, nothing = ctypes.c_size_t(self._num_bytes), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), nothing, nothing)
        self._is_mapped = False
        self.restore()
        self.tensor = torch.as_tensor(Bytes(self._address.value, num_bytes), device=device)
        self.tensor.zero_()

    def restore(self) -> None:
        if self._is_mapped:
            return
        size, nothing = ctypes.c_size_t(self._num_bytes), ctypes.c_uint64(0)
        call("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._properties), nothing)
        call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, nothing)
        access = _Access(self._location, _READ_WRITE)
        call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._is_mapped = True

    def release(self) -> None:
        if not self._is_mapped:
            return
        torch.cuda.synchronize()
        call("cuMemUnmap", self._address, ctypes.c_size_t(self._num_bytes))
        call("cuMemRelease", self._handle)
        self._is_mapped = False


ReleasableMemory = HostMemory | DeviceMemory


def make_memory(num_bytes: int, device: torch.device) -> ReleasableMemory:
    return DeviceMemory(num_bytes, device) if device.type == "cuda" else HostMemory(num_bytes)
