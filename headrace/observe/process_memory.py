"""How much memory this process has used at most."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory(device: torch.device) -> int:
    """Bytes since the process started: on a GPU those that torch has allocated there, elsewhere those resident."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident()


def peak_resident() -> int:
    """From /proc where there is one: `getrusage` also counts the process before it became this program, which right after a
    start is its parent's size."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
