"""The transport on one host: two segments of shared memory in turn, and a notice that one is full.

A segment is a file in memory (`/dev/shm`), all of it reserved when it is made, so that a full one is an error with a name
and not a crash later. The trainer's process writes and owns them; engines map them and copy. The newest version stays
readable until the one after the next is written, so that an engine that comes back can still be brought up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.sync.protocol import Lineage, SyncError
from headrace.types import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from headrace.types import TensorInfo

SEGMENTS = 2
_ALIGNED = 64


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
        f"{num_bytes / 1e6:,.0f} MB). Enlarge it (mount -o remount,size={-(-needed // 2**30) + 1}G {folder}; in a container "
        f"--shm-size), or name another folder in sync.folder"
    )


@dataclass
class _Segment:
    """One that this process writes."""

    mapped: mmap.mmap
    inode: int
    version: int = -1
    """Last written into it."""

    def is_at(self, path: Path) -> bool:
        """Whether whoever opens the path finds it: what cleans up temporary files may have been there."""
        try:
            found = path.stat()
        except OSError:
            return False
        return found.st_ino == self.inode and found.st_size == len(self.mapped)


class SharedMemorySync:
    """A `WeightSync` between processes of one host. Both ends are made with the same prefix; only the sender closes it."""

    def __init__(self, lineage: Lineage, *, prefix: str, folder: Path, policy: str = "policy") -> None:
        self.lineage = lineage
        self._policy = policy
        self._folder, self._prefix = folder, prefix
        self._segments: dict[Path, _Segment] = {}

    def offer(self, version: int, manifest: Iterable[TensorInfo]) -> WeightUpdate:
        return WeightUpdate(
            policy=self._policy,
            lineage=self.lineage.id,
            version=version,
            transport="shared_memory",
            manifest=tuple(manifest),
        )

    async def send(self, update: WeightUpdate, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy into the segment of this version, in a thread; whoever steps the weights waits for it."""
        await asyncio.to_thread(self._write, update, tensors)

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        """Views of the segment, each good until the next is asked for."""
        path = self._path(update)
        try:
            file = path.open("r+b")
        except OSError as error:
            raise SyncError(f"version {update.version} is not on offer: {path} cannot be read: {error.strerror}") from error
        with file:
            if os.fstat(file.fileno()).st_size < _size(update):
                raise SyncError(f"version {update.version}: {path} is smaller than its manifest says")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for info, start in _places(update):
            yield info.name, _view(mapped, info, start)
        with contextlib.suppress(BufferError):  # a view is still held; it goes with the last one
            mapped.close()

    def release(self, update: WeightUpdate) -> None:
        """Nothing to free: the segment is written again by the version after the next."""

    def abort(self, update: WeightUpdate) -> None:
        """Take its segment away; called at the sender's end."""
        path = self._path(update)
        segment = self._segments.get(path)
        if segment is not None and segment.version == update.version:  # a later one may lie there by now
            self._remove(path)

    def close(self) -> None:
        """Give the memory back; called by the sender when the run ends."""
        for path in list(self._segments):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        segment = self._segments.pop(path, None)
        if segment is not None:
            with contextlib.suppress(BufferError):
                segment.mapped.close()
        path.unlink(missing_ok=True)

    def _path(self, update: WeightUpdate) -> Path:
        return self._folder / f"{self._prefix}-{update.version % SEGMENTS}"

    @torch.no_grad()
    def _write(self, update: WeightUpdate, tensors: Iterable[tuple[str, Tensor]]) -> None:
        segment = self._segment(self._path(update), _size(update))
        segment.version = update.version
        for (info, start), (name, tensor) in zip(_places(update), tensors, strict=True):
            if name != info.name:
                raise SyncError(f"version {update.version}: tensor {name!r} came where {info.name!r} was announced")
            _view(segment.mapped, info, start).copy_(tensor)

    def _segment(self, path: Path, size: int) -> _Segment:
        known = self._segments.get(path)
        if known is not None and len(known.mapped) >= size and known.is_at(path):
            return known
        self._remove(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))  # reserved now: a full memory is ENOSPC here, not SIGBUS later
            segment = _Segment(mmap.mmap(descriptor, max(size, 1)), os.fstat(descriptor).st_ino)
        except OSError as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(self._folder).free
            raise SyncError(f"{_too_small(self._folder, size, free)} ({error.strerror})") from error
        finally:
            os.close(descriptor)
        self._segments[path] = segment
        return segment


def remove_segments(folder: Path, prefix: str) -> None:
    """What a sender that was killed could not give back."""
    for path in folder.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def _places(update: WeightUpdate) -> Iterator[tuple[TensorInfo, int]]:
    """Each tensor with where it begins."""
    start = 0
    for info in update.manifest:
        yield info, start
        start += -(-info.num_bytes // _ALIGNED) * _ALIGNED


def _size(update: WeightUpdate) -> int:
    return sum(-(-info.num_bytes // _ALIGNED) * _ALIGNED for info in update.manifest)


def _view(mapped: mmap.mmap, info: TensorInfo, start: int) -> Tensor:
    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"tensor {info.name!r} has dtype {info.dtype!r}, which torch does not know")
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=info.num_bytes, offset=start)
    return flat.view(dtype).reshape(info.shape)
