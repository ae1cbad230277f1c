"""Clocks and scales for work on a device: seconds that include all of it, and the most memory it took."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = float(1 << 30)
MIB = float(1 << 20)


def seconds_of(action: Callable[[], object], device: str) -> float:
    """From an idle device to an idle device."""
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def peak_bytes(action: Callable[[], object], device: str) -> int:
    """The most memory held at a moment of `action`, beyond what was held before it.

    On a GPU by torch's own count of tensors; on a CPU by the process's resident memory, whose peak Linux forgets on
    request, and which is coarse below some MiB.
    """
    release()
    _wait(device)
    if device == "cpu":
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        action()
        return max(0, _resident("VmHWM") - before)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    _wait(device)
    return int(torch.cuda.max_memory_allocated() - before)


def held_bytes(device: str) -> int:
    """What tensors hold now; on a CPU, what the process does."""
    return _resident("VmRSS") if device == "cpu" else int(torch.cuda.memory_allocated())


def release() -> None:
    """Let go of what nobody refers to, so that the next measurement finds its memory."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call, and its figures are coarser
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
