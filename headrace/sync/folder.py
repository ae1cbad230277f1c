"""`sync.folder`, which holds shared memory segments and weight files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from headrace.errors import SyncError

COPIES = 2  # at most this many copies of the weights exist: the newest stays readable while the next is written


def shared_folder(wanted: str = "") -> Path:
    """Return the wanted folder, else the system's shared memory, else its folder for temporary files."""
    if wanted:
        return Path(wanted)
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SyncError(f"sync.folder = {str(folder)!r}: there is no such folder; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SyncError(f"sync.folder = {str(folder)!r}: it cannot be written to; name another")


def check_space(folder: Path, num_bytes: int) -> None:
    """Reject weights too large to be published, before they are loaded."""
    check_folder(folder)
    if COPIES * num_bytes > shutil.disk_usage(folder).free:
        raise SyncError(too_little_space(folder, num_bytes))


def too_little_space(folder: Path, num_bytes: int) -> str:
    free, needed = shutil.disk_usage(folder).free, COPIES * num_bytes
    return (
        f"{folder} has {free / 1e6:,.0f} MB free and the weights need {needed / 1e6:,.0f} MB there ({COPIES} versions of "
        f"{num_bytes / 1e6:,.0f} MB). Make room (shared memory: mount -o remount,size={-(-needed // 2**30) + 1}G {folder}; "
        f"in a container --shm-size), or name another folder in sync.folder"
    )
