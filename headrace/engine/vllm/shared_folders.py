"""Folders that several processes of a host write once and read together: the weights for the servers of all engines.

A process locks (flock) the folders it uses; the system releases the locks when it ends, however it ends. A folder that can be
locked exclusively is used by nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from typing import IO, TYPE_CHECKING

from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_USED, _WRITING, _WRITTEN = ".used.lock", ".writing.lock", ".written"


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
            with contextlib.suppress(FileNotFoundError):  # another process removes it just now
                for each in (self._folder, path):
                    each.mkdir(mode=0o700, exist_ok=True)
                lock = _lock(path / _USED, fcntl.LOCK_SH)
                if os.fstat(lock.fileno()).st_nlink:
                    self._used[name] = lock
                else:
                    lock.close()
        with _lock(path / _WRITING, fcntl.LOCK_EX):  # a process that hangs while it writes is killed after `heartbeat`
            if not (path / _WRITTEN).exists():
                write(path)
                (path / _WRITTEN).touch()
        return path

    def drop_all_but(self, name: str = "") -> None:
        """Leave the other folders, and remove those that no process uses any more."""
        for other in [each for each in self._used if each != name]:
            self._used.pop(other).close()
        for path in self._folder.glob("*"):
            if path.name not in self._used:
                with contextlib.suppress(OSError), (path / _USED).open("a") as lock:  # used, or removed by another process
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    gone = path.rename(path.with_name(f".{secrets.token_hex(4)}"))  # whoever takes it now makes another
                    shutil.rmtree(gone, ignore_errors=True)
        if not self._used:
            with contextlib.suppress(OSError):  # others are in use
                self._folder.rmdir()


def _lock(path: Path, kind: int) -> IO[str]:
    file = path.open("a")
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        file.close()
        told = "cannot be locked, as engines do that share the weights for their servers; name another"
        raise SyncError(f"sync.folder = {str(path.parents[2])!r}: {told} ({error.strerror})") from error
    return file
