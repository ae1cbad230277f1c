"""Removes what killed runs left outside their run folder: shared memory, sockets, weight files.

A run names everything it creates in a shared place PREFIX-…, and the launcher, or a host that joined it, holds a lock (flock)
on PREFIX.lock next to it. The system releases the lock when the process ends, however it ends. So if the lock can be taken, the
run is dead, and the next run removes its files. Age or process id would not prove that: other users, containers and hosts may
share the place. Processes of a host that share a folder each lock it likewise; the last to leave removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import re
import secrets
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER_LOCK = ".lock"
_MAY_NOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCK = re.compile(r"headrace-\d+-\w+\.lock")


def new_prefix() -> str:
    return f"headrace-{os.getpid()}-{secrets.token_hex(4)}"


class Claim:
    """Marks everything named PREFIX-… in a place as owned by this process."""

    def __init__(self, place: Path, prefix: str) -> None:
        self._place, self._prefix = place, prefix
        self._descriptor: int | None = None
        path = place / f"{prefix}.lock"
        try:
            while True:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if os.fstat(self._descriptor).st_nlink:
                    break
                os.close(self._descriptor)  # another run's sweep removed the file between the two calls
            os.write(self._descriptor, "\n".join(_this_host()).encode())
        except OSError as error:  # a file system without locks
            path.unlink(missing_ok=True)
            message = "%s cannot be locked (%s): if this run is killed, remove %s-* there by hand"
            logging.getLogger("headrace").warning(message, place, error, prefix)

    def release(self, *, leaves_files: bool = False) -> None:
        """Remove everything with the prefix, and the lock; or leave that to the next sweep."""
        if not leaves_files:
            remove(self._place, self._prefix)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _this_host() -> list[str]:
    """The host's name and its boot id, which containers share."""
    names = [platform.node()]
    with contextlib.suppress(OSError):  # only Linux has it
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return names


def orphans(place: Path) -> Iterator[str]:
    """Yield the prefixes of this user's dead runs on this host, each locked until the next one is yielded. Locks of other hosts
    prove nothing: some file systems do not share locks between hosts."""
    for lock in sorted(place.glob("headrace-*.lock")):
        if not _LOCK.fullmatch(lock.name):
            continue
        with contextlib.suppress(OSError):  # the run is alive, or another user's, or another run has just removed it
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                theirs, ours = os.read(descriptor, 4096).decode(errors="replace").splitlines(), _this_host()
                # Hosts that share a file system may have the same name, so boot ids are compared if both are known
                part = slice(1, None) if theirs[1:] and ours[1:] else slice(1)
                if os.fstat(descriptor).st_uid == os.geteuid() and theirs[part] == ours[part]:
                    yield lock.stem
            finally:
                os.close(descriptor)


def sweep(place: Path) -> None:
    """Remove what dead runs have left in a place."""
    for prefix in orphans(place):
        with contextlib.suppress(OSError):  # some of it cannot be removed
            remove(place, prefix)


def remove(place: Path, prefix: str) -> None:
    """Remove everything with a prefix, then its lock."""
    for path in place.glob(f"{prefix}-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (place / f"{prefix}.lock").unlink(missing_ok=True)


def use_folder(folder: Path) -> IO[str]:
    """Other processes do not remove the folder while the returned file is open. Raises FileNotFoundError if it is not there, or
    one has just removed it. A folder that may only be read needs no lock file."""
    lock = _open_lock(folder)
    with contextlib.suppress(OSError):  # a file system without locks: there nothing is removed
        fcntl.flock(lock, fcntl.LOCK_SH)
    if not _is_lock_of(folder, lock):
        lock.close()
        raise FileNotFoundError(folder)
    return lock


def _is_lock_of(folder: Path, lock: IO[str]) -> bool:
    """False if the folder was moved or removed, and perhaps made again, between opening and locking."""
    if lock.name == os.devnull:
        return folder.is_dir()
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), (folder / FOLDER_LOCK).stat())
    return False


def _open_lock(folder: Path) -> IO[str]:
    path = folder / FOLDER_LOCK
    try:
        return path.open("a")
    except OSError as error:
        if error.errno not in _MAY_NOT_WRITE or not folder.is_dir():
            raise
    return path.open() if path.exists() else open(os.devnull)


def remove_unused(folder: Path) -> None:
    """Remove a folder unless a process uses it."""
    with contextlib.suppress(OSError), (folder / FOLDER_LOCK).open("a") as lock:  # an OSError: used, or removed by another process
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_lock_of(folder, lock):
            return
        gone = folder.rename(folder.with_name(f".{secrets.token_hex(4)}"))  # whoever takes it now makes another
        shutil.rmtree(gone, ignore_errors=True)
