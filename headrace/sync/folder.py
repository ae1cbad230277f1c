"""`sync.folder`: where shared memory and files of weights lie."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from headrace.errors import SyncError

COPIES = 2
"""Of the weights, at most: the newest stays readable while the next is written."""


def shared_folder(wanted: str = "") -> Path:
    """The system's shared memory, or its folder for temporary files where it has none."""
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
    """Refuse weights of so many bytes that could not be published later, before they are loaded."""
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
