"""The transport on one host: shared memory segments.

A segment is a file in memory (`/dev/shm`), reserved in full at creation, so that too little memory is a clear error and not a
crash later. The trainer owns and writes the segments. Engines map and copy them, and keep the mapping: a freed segment is
reused for a later key under another file name.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.memory import Buffer, BufferedTransport
from headrace.sync.transport import read_place, too_little_space

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target, TransportConfig


class Segment(Buffer):
    """A segment that this process writes, renamed for each key it serves."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        import torch

        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)  # too little memory is ENOSPC now, not SIGBUS later
            self._mapped = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise SyncError(f"{too_little_space(path.parent, num_bytes)} ({error.strerror})") from error
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def rename(self, path: Path) -> None:
        """Receivers no longer find the old name, but those that have the segment open see later writes."""
        try:
            self.path.rename(path)
        except FileNotFoundError as error:  # e.g. a cleaner of temporary files
            raise SyncError(f"{self.path} was removed by someone else") from error
        self.path = path

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        del self.tensor
        with contextlib.suppress(BufferError):  # a view is still held, and frees the memory when it goes
            self._mapped.close()


@dataclass(frozen=True)
class Place:
    key: str
    bytes: int


class SharedMemoryTransport(BufferedTransport[Segment]):
    """Both ends use the same prefix and folder; the sender's `close` removes the segments."""

    name = "shared_memory"
    uses_folder = True

    def __init__(self, *, prefix: str, folder: Path) -> None:
        super().__init__(lambda num_bytes: Segment(self._spare_path(), max(num_bytes, 1)))
        self._folder, self._prefix = folder, prefix
        self._id, self._numbers = secrets.token_hex(4), itertools.count()  # several senders of a run share the folder
        self._mapped: dict[int, tuple[BinaryIO, Tensor]] = {}  # at a receiver, by inode: a mapping is faster to read again

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> SharedMemoryTransport:
        return cls(prefix=config.prefix, folder=config.directory)

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        room = super().allocate(key, num_bytes)
        if not self.find(key)[0].path.exists():  # someone removed it, so no receiver could open it
            self.free(key)
            self._spare.clear()
            room = super().allocate(key, num_bytes)
        return room

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        segment, num_bytes = self.find(key)
        segment.rename(self._path(key))
        return {"key": key, "bytes": num_bytes}

    def free(self, key: str) -> None:
        if key in self._held:
            with contextlib.suppress(SyncError):
                self.find(key)[0].rename(self._spare_path())
            super().free(key)

    def close(self) -> None:
        super().close()
        self._drop_mapped(lambda _: True)

    def prepare(self, places: Sequence[Mapping[str, Plain]]) -> None:
        self._drop_mapped(lambda file: not os.fstat(file.fileno()).st_nlink)  # its sender has dropped it

    def _drop_mapped(self, is_dropped: Callable[[BinaryIO], bool]) -> None:
        for inode, (file, _) in list(self._mapped.items()):
            if is_dropped(file):
                del self._mapped[inode]
                file.close()

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = read_place(Place, place)
        if "/" in there.key:
            raise SyncError(f"{there.key!r} is no place in shared memory")
        path = self._path(there.key)
        try:
            file = path.open("r+b")
        except OSError as error:
            raise SyncError(f"it is not on offer: {path} cannot be read: {error.strerror}") from error
        mapped = self._map(file)
        if len(mapped) < target.num_bytes or there.bytes != target.num_bytes:
            raise SyncError(f"{path} holds {there.bytes} bytes and {target.num_bytes} were announced")
        target.write(0, mapped[: target.num_bytes])

    def _map(self, file: BinaryIO) -> Tensor:
        """The segment of an open file, which stays open until the segment is dropped."""
        import torch

        status = os.fstat(file.fileno())
        if status.st_ino in self._mapped:
            file.close()
        else:
            size = status.st_size
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8) if size else torch.empty(0)
            self._mapped[status.st_ino] = file, mapped
        return self._mapped[status.st_ino][1]

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}-{key}"

    def _spare_path(self) -> Path:
        return self._folder / f"{self._prefix}-spare-{self._id}-{next(self._numbers)}"
