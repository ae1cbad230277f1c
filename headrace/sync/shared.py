"""The transport on one host: segments of shared memory, and a notice that one is full.

A segment is a file in memory (`/dev/shm`), all of it reserved when it is made, so that a full one is an error with a name
and not a crash later. The trainer's process writes and owns them; engines map them and copy, and keep the mapping, since a
segment that is freed is written again for the next parcel under another name.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.sync.buffers import Rooms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target

SEGMENTS = 2
"""Alive at a time, at most, while weights travel whole: the newest stays readable while the next is written."""
_MOST_MAPPED = 4


def shared_folder(wanted: str = "") -> Path:
    """Where segments lie: the system's shared memory, or its folder for temporary files where it has none."""
    if wanted:
        return Path(wanted)
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def check_room(folder: Path, num_bytes: int) -> None:
    """Refuse before anything is loaded what could not be published later."""
    if not folder.is_dir():
        raise SyncError(f"sync.folder = {str(folder)!r}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if SEGMENTS * num_bytes > free:
        raise SyncError(_too_small(folder, num_bytes, free))


def _too_small(folder: Path, num_bytes: int, free: int) -> str:
    needed = SEGMENTS * num_bytes
    return (
        f"{folder} has {free / 1e6:,.0f} MB free and the weights need {needed / 1e6:,.0f} MB there ({SEGMENTS} versions of "
        f"{num_bytes / 1e6:,.0f} MB). Make room (shared memory: mount -o remount,size={-(-needed // 2**30) + 1}G {folder}; "
        f"in a container --shm-size), or name another folder in sync.folder"
    )


class Segment:
    """One that this process writes. Its name changes with the parcel in it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # reserved now: a full memory is ENOSPC here, not SIGBUS later
            self._mapped = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free
            raise SyncError(f"{_too_small(path.parent, num_bytes, free)} ({error.strerror})") from error
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def rename(self, path: Path) -> None:
        """Whoever looks for the parcel that was in it finds nothing, whoever has it open sees what comes next."""
        try:
            self.path.rename(path)
        except FileNotFoundError as error:  # what cleans up temporary files may have been there
            raise SyncError(f"{self.path} was removed by someone else") from error
        self.path = path

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        del self.tensor
        with contextlib.suppress(BufferError):  # a view is still held; the memory goes with the last one
            self._mapped.close()


class SharedMemoryTransport:
    """Both ends are made with the same prefix and folder; only the sender's close removes segments."""

    name = "shared_memory"

    def __init__(self, *, prefix: str, folder: Path) -> None:
        self._folder, self._prefix = folder, prefix
        self._numbers = itertools.count()
        self._rooms = Rooms(lambda num_bytes: Segment(self._spare_path(), max(num_bytes, 1)))
        self._mapped: dict[int, Tensor] = {}
        """By inode, the last used last: a mapping that was read before is read at the speed of memory."""

    # The sender's end

    def room(self, key: str, num_bytes: int) -> Tensor:
        room = self._rooms.take(key, num_bytes)
        if not room.path.exists():  # removed by someone else: nobody could open it
            self._rooms.free(key)
            self._rooms.close_spare()
            room = self._rooms.take(key, num_bytes)
        return room.tensor[:num_bytes]

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        found = self._rooms.find(key)
        if found is None:
            raise SyncError("there is no room for it any more")
        segment, num_bytes = found
        segment.rename(self._path(key))
        return {"key": key, "bytes": num_bytes}

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """Receivers come for it."""

    def free(self, key: str) -> None:
        found = self._rooms.find(key)
        if found is not None:
            with contextlib.suppress(SyncError):
                found[0].rename(self._spare_path())
            self._rooms.free(key)

    def close(self) -> None:
        self._rooms.close()
        self._mapped.clear()

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}-{key}"

    def _spare_path(self) -> Path:
        return self._folder / f"{self._prefix}-spare{next(self._numbers)}"

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        key = str(place.get("key"))
        path = self._path(key)
        if "/" in key or not isinstance(place.get("bytes"), int):
            raise SyncError(f"{place} is no place in shared memory")
        try:
            file = path.open("r+b")
        except OSError as error:
            raise SyncError(f"it is not on offer: {path} cannot be read: {error.strerror}") from error
        with file:
            mapped = self._map(file.fileno())
        if len(mapped) < target.num_bytes or place["bytes"] != target.num_bytes:
            raise SyncError(f"{path} holds {place['bytes']} bytes and {target.num_bytes} were announced")
        target.write(0, mapped[: target.num_bytes])

    def _map(self, descriptor: int) -> Tensor:
        status = os.fstat(descriptor)
        mapped = self._mapped.pop(status.st_ino, None)
        if mapped is None or len(mapped) != status.st_size:
            size = max(status.st_size, 1)
            mapped = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8) if status.st_size else torch.empty(0)
        self._mapped[status.st_ino] = mapped
        while len(self._mapped) > _MOST_MAPPED:
            self._mapped.pop(next(iter(self._mapped)))
        return mapped
