"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
import functools

import torch

_OUT_OF_MEMORY = 2


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Arguments are ctypes values. Raises unless the call succeeds."""
    status = getattr(_driver(), name)(*arguments)
    if status == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError("the GPU has too little free memory; lower engine.kv_blocks or model.context")
    if status:
        raise RuntimeError(f"{name} answered {status}")


class Bytes:
    """GPU memory at an address, for `torch.as_tensor`. Does not own it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
