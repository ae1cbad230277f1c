"""Peak memory of this process."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory(device: torch.device) -> int:
    """Peak bytes since the process started: on a GPU allocated by torch, else resident."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident()


def peak_resident() -> int:
    """From /proc if there is one: `getrusage` also covers the time between fork and exec, when the size is the parent's."""
    with contextlib.suppress(OSError, IndexError):  # some containers do not say it
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
