"""CUDA driver calls that torch does not offer."""

from __future__ import annotations

import ctypes
import functools

import torch

_OUT_OF_MEMORY = 2


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Call a driver function with ctypes arguments; raise if it fails."""
    status = getattr(_driver(), name)(*arguments)
    if status == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("the GPU has too little free memory; lower engine.kv_blocks or model.context")
    if status:
        raise RuntimeError(f"{name} answered {status}")


class Bytes:
    """A view of GPU memory for `torch.as_tensor`; does not own the memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
