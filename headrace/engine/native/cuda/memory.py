"""GPU memory at an address that stays: it can be given back and taken again while CUDA graphs keep pointing at it.

An address range is reserved once; physical memory is mapped to it, unmapped (`give_back`) and mapped again (`take`) through
the driver's virtual memory calls. What was there is lost in between.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.cuda_driver import Bytes, call

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
"""Of CUmemAllocationType, CUmemLocationType and CUmemAccess_flags."""


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


class Region:
    """So many bytes of a GPU's memory, as a tensor of bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # the driver wants a context
        number = device.index if device.index is not None else torch.cuda.current_device()
        self._location = _Location(_DEVICE, number)
        self._properties = _Properties(kind=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), ctypes.c_int(0))
        self.num_bytes = -(-max(num_bytes, 1) // granularity.value) * granularity.value
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        size, nothing = ctypes.c_size_t(self.num_bytes), ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), nothing, nothing)
        self.is_held = False
        self.take()
        self.tensor: Tensor = torch.as_tensor(Bytes(self._address.value, num_bytes), device=device)
        self.tensor.zero_()

    def take(self) -> None:
        """Map memory; what it holds is undefined."""
        if self.is_held:
            return
        size, nothing = ctypes.c_size_t(self.num_bytes), ctypes.c_uint64(0)
        call("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._properties), nothing)
        call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, nothing)
        access = _Access(self._location, _READ_WRITE)
        call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.is_held = True

    def give_back(self) -> None:
        """Unmap it; nobody may touch the tensor until it is taken again."""
        if not self.is_held:
            return
        torch.cuda.synchronize()
        call("cuMemUnmap", self._address, ctypes.c_size_t(self.num_bytes))
        call("cuMemRelease", self._handle)
        self.is_held = False

    def close(self) -> None:
        """Give the address up too."""
        self.give_back()
        if self._address.value:
            call("cuMemAddressFree", self._address, ctypes.c_size_t(self.num_bytes))
            self._address = ctypes.c_uint64(0)
