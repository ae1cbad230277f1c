"""Time and memory of work on a device, and memory of a GPU that processes share."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = float(1 << 30)
MIB = float(1 << 20)
_EVERY = 0.1


def seconds_of(action: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of an action, until the device has finished it."""
    wait(device)
    started = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - started


def timed(action: Callable[[], object], device: str = "cpu") -> Callable[[int], float]:
    """A contestant for `take_turns` that returns the action's seconds."""
    return lambda _: seconds_of(action, device)


def peak_bytes(action: Callable[[], object], device: str) -> int:
    """Peak memory of `action` beyond what was held before: on a GPU tensors, by torch's count; on a CPU the whole process,
    which is coarse below a few MiB."""
    release()
    wait(device)
    if device == "cpu":
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        action()
        return max(0, _resident("VmHWM") - before)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    wait(device)
    return int(torch.cuda.max_memory_allocated() - before)


def held_bytes(device: str) -> int:
    """Bytes held by tensors on a GPU, or by the process on a CPU."""
    return _resident("VmRSS") if device == "cpu" else int(torch.cuda.memory_allocated())


def release() -> None:
    """Free unused memory so that the next measurement does not count it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize()


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class GpuMemory:
    """Samples the GPU's memory, of all processes together, ten times a second in a `with`; torch keeps what it allocates, so no
    peak is missed. Relative to the start; None without a GPU."""

    peak: float | None = None
    """GiB."""

    def __enter__(self) -> GpuMemory:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(_used_bytes(),), name="GPU memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self, before: int | None) -> None:
        while before is not None and not self._end.wait(_EVERY):
            self.peak = max(self.peak or 0.0, ((_used_bytes() or 0) - before) / GIB)


def _used_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
