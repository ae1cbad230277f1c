"""Folders that several processes of a host write once and read together: the weights for the servers of all engines.

Each locks those it uses, and the last to leave one removes it (`leftovers.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import IO, TYPE_CHECKING

from headrace.errors import SyncError
from headrace.leftovers import remove_unused, use_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_WRITING, _WRITTEN = ".writing.lock", ".written"


class SharedFolders:
    """One process's use of the folders inside `folder`. Methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, IO[str]] = {}  # by name, the lock

    def take(self, name: str, write: Callable[[Path], None]) -> Path:
        """The folder of that name, filled by `write` unless another process has filled it or does so now. It stays until every
        process that took it has dropped it or ended."""
        path = self._folder / name
        while name not in self._used:
            try:
                for each in (self._folder, path):
                    each.mkdir(mode=0o700, exist_ok=True)
                self._used[name] = use_folder(path)
            except (FileNotFoundError, FileExistsError) as error:  # another process removes it just now
                if not self._folder.parent.is_dir():
                    raise SyncError(f"sync.folder = {str(self._folder.parent)!r}: it is gone") from error
        with _lock(path / _WRITING):  # a process that hangs while it writes is killed after `heartbeat`
            if not (path / _WRITTEN).exists():
                write(path)
                (path / _WRITTEN).touch()
        return path

    def drop_all_but(self, name: str = "") -> None:
        """Leave the other folders, and remove those that no process uses any more."""
        for other in [each for each in self._used if each != name]:
            self._used.pop(other).close()
        with contextlib.suppress(FileNotFoundError):  # another process has just removed them all
            for name in os.listdir(self._folder):
                if name not in self._used:
                    remove_unused(self._folder / name)
        if not self._used:
            with contextlib.suppress(OSError):  # others are in use
                self._folder.rmdir()


def _lock(path: Path) -> IO[str]:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        file.close()
        told = "cannot be locked, as engines do that share the weights for their servers; name another"
        raise SyncError(f"sync.folder = {str(path.parents[2])!r}: {told} ({error.strerror})") from error
    return file
