"""A cache of models that the processes of a host share: each is made once, and those used longest ago are removed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from headrace.leftovers import remove_unused, use_folder

if TYPE_CHECKING:
    from collections.abc import Callable

_MOMENT_SECONDS = 60.0


def cache_folder() -> Path:
    """Where models and rescued checkpoints are kept."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def use_model(target: Path, make: Callable[[Path], None], *, keep: int) -> IO[str]:
    """Until the returned file is closed, no process removes this folder, which `make` has filled. Of the others beside it the
    `keep` used last stay, and those in use."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # it is not there, or another process removes it just now
            lock = use_folder(target)
            break
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as temporary, use_folder(Path(temporary)):
            make(Path(temporary))
            try:
                Path(temporary).rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process was faster
                    raise
    with contextlib.suppress(OSError):  # a cache that may only be read, or another process does the same
        os.utime(target)
        _remove_old(target.parent, keep)
    return lock


def _remove_old(cache: Path, keep: int) -> None:
    """Remove models, and what killed processes have half made, unless a live process has it or is about to lock it."""
    used_at = {folder: folder.stat().st_mtime for folder in cache.iterdir() if folder.is_dir()}
    newest = sorted(used_at, key=lambda folder: (folder.name[0] != ".", used_at[folder]), reverse=True)
    for folder in newest:
        if (folder.name[0] == "." or folder not in newest[:keep]) and time.time() - used_at[folder] > _MOMENT_SECONDS:
            remove_unused(folder)
