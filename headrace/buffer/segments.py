"""The files of a journal: numbered segments of blocks, each a head and a body, both frames with checksums.

A block holds the entries of groups that were written together, because most of the cost is per frame. Its head says what each
group is (number, task, versions), how many episodes it has and how long the body is; the body holds the episodes of all.
Segments are only appended to, and deleted whole. What follows a damaged byte in a segment is not read, since nothing says where
it begins.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import threading
import zlib
from collections import Counter
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from headrace.durable import sync
from headrace.records import WireError, decode, encode, pack_episodes, read_frames, unpack_episodes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.records import Episode

_NAME = re.compile(r"\d{8}\.journal")
_SHARES = 16
"""A segment takes at most this part of the journal's bytes, so that one of them pinned for long costs little."""


class JournalError(RuntimeError):
    """A group that is only in the journal cannot be read back."""


class Block(NamedTuple):
    """Where a body lies."""

    segment: int
    offset: int
    size: int
    checksum: int


class Place(NamedTuple):
    """Where an entry lies: its episodes are those from `start` to `stop` of a block."""

    block: Block
    start: int
    stop: int

    @property
    def segment(self) -> int:
        return self.block.segment


class Head(NamedTuple):
    """What an entry says of its group without reading it."""

    number: int
    task: int
    """Fingerprint of the task."""
    versions: dict[str, list[int]]
    """As `Group.versions` has them."""


class Scan(NamedTuple):
    """What a journal's folder holds."""

    entries: dict[int, tuple[Head, Place]]
    """By number of the group; of several, the last."""
    num_bytes_lost: int
    """Damaged, or after what is damaged."""
    ignored: list[str]
    """Names of files that are no segments."""


class Segments:
    """Appends come from one thread; reading and deleting may come from others."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes: dict[int, int] = {}
        self.num_bytes = 0
        self._pins: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._open_segment = 0
        self._current = 1
        """The segment of the next block."""
        self._last_read: tuple[Block, list[Episode]] | None = None
        """Entries are mostly read one after the other."""

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.journal"

    def clear(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._sizes.clear()
        self._pins.clear()
        self.num_bytes, self._last_read = 0, None

    # Writing

    def append(self, heads: Sequence[Head], members: Sequence[Sequence[Episode]]) -> list[Place] | None:
        """Hand a block of entries, with the episodes of each, to the operating system, and pin every one; None if it does not
        fit. Raises `OSError` if that fails."""
        body = encode(pack_episodes([episode for episodes in members for episode in episodes]))
        checksum = zlib.crc32(body)
        entries = [[*head, len(episodes)] for head, episodes in zip(heads, members, strict=True)]
        start = encode({"entries": entries, "size": len(body), "checksum": checksum})
        num_bytes = len(start) + len(body)
        if self.num_bytes + num_bytes > self._max_bytes:
            return None
        segment, file = self._opened(num_bytes)
        offset = self._sizes[segment] + len(start)
        try:
            file.write(start)
            file.write(body)
            file.flush()
        except OSError:
            self._file = None
            raise
        self.pin(segment, count=len(heads))
        self._count(segment, num_bytes)
        return _places(Block(segment, offset, len(body), checksum), list(map(len, members)))

    def _opened(self, num_bytes: int) -> tuple[int, IO[bytes]]:
        """The segment that takes the next bytes."""
        size = self._sizes.get(self._current, 0)
        if size and size + num_bytes > self._max_bytes // _SHARES:
            self.roll()
        with self._lock:
            segment = self._current
        if self._file is None or self._open_segment != segment:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file, self._open_segment = self._path(segment).open("ab"), segment
            self._count(segment, 0)
        return segment, self._file

    def _count(self, segment: int, num_bytes: int) -> None:
        with self._lock:
            self._sizes[segment] = self._sizes.get(segment, 0) + num_bytes
            self.num_bytes += num_bytes

    def roll(self) -> int:
        """Start another segment, and return its number: what is appended from now on is in it or in later ones."""
        with self._lock:
            self._current += 1
            return self._current

    def close(self) -> None:
        """Sync the open segment to the disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._path(self._open_segment).exists():
                sync(self._path(self._open_segment))

    # Reading

    def read(self, place: Place) -> list[Episode]:
        """The episodes of an entry; raises `JournalError` if its block is damaged."""
        last = self._last_read
        if last is None or last[0] != place.block:
            last = self._last_read = place.block, self._read_block(place.block)
        return last[1][place.start : place.stop]

    def _read_block(self, block: Block) -> list[Episode]:
        try:
            with self._path(block.segment).open("rb") as file:
                file.seek(block.offset)
                body = file.read(block.size)
            if zlib.crc32(body) != block.checksum:
                raise WireError("its checksum differs")
            return unpack_episodes(decode(body))
        except (OSError, WireError) as error:
            raise JournalError(f"{self._path(block.segment)} has a damaged entry at byte {block.offset}: {error}") from error

    def scan(self) -> Scan:
        """Find the entries of an earlier process; what is appended from now on goes to a new segment."""
        entries: dict[int, tuple[Head, Place]] = {}
        names = sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []
        segments = [int(name.partition(".")[0]) for name in names if _NAME.fullmatch(name) and (self._folder / name).is_file()]
        num_bytes_lost = 0
        for segment in segments:
            found, lost = self._scan_segment(segment)
            entries |= found
            num_bytes_lost += lost
            self._count(segment, self._path(segment).stat().st_size)
        self._current = max(segments, default=0) + 1
        known = {self._path(segment).name for segment in segments}
        return Scan(entries, num_bytes_lost, [name for name in names if name not in known])

    def _scan_segment(self, segment: int) -> tuple[dict[int, tuple[Head, Place]], int]:
        found: dict[int, tuple[Head, Place]] = {}
        with self._path(segment).open("rb") as file:
            size, good = os.fstat(file.fileno()).st_size, 0
            try:
                for start in read_frames(file):
                    heads, counts, length, checksum = _checked(start)
                    block = Block(segment, file.tell(), length, checksum)
                    body = file.read(length)
                    if len(body) < length or zlib.crc32(body) != checksum:
                        break
                    places = _places(block, counts)
                    found |= {head.number: (head, place) for head, place in zip(heads, places, strict=True)}
                    good = file.tell()
            except WireError:
                pass
        return found, size - good

    # Deleting

    def pin(self, segment: int, *, count: int = 1) -> bool:
        """So many of its entries are needed whatever checkpoints say; False if it is gone already."""
        with self._lock:
            if segment in self._sizes:
                self._pins[segment] += count
            return segment in self._sizes

    def unpin(self, segment: int) -> None:
        with self._lock:
            self._pins[segment] -= 1

    def forget(self, before: int) -> None:
        """Delete the earlier segments, but for those that are pinned."""
        with self._lock:
            segments = [each for each in self._sizes if each < before and self._pins[each] <= 0]
            self.num_bytes -= sum(self._sizes.pop(segment) for segment in segments)
        for segment in segments:
            self._path(segment).unlink(missing_ok=True)


def _places(block: Block, counts: Sequence[int]) -> list[Place]:
    """Of entries with so many episodes, one after the other."""
    stops = list(itertools.accumulate(counts))
    return [Place(block, stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _checked(start: Any) -> tuple[list[Head], list[int], int, int]:  # noqa: ANN401  (whatever the file holds)
    """Heads and numbers of episodes of the entries, length and checksum of the body."""
    if not isinstance(start, dict) or start.keys() != {"entries", "size", "checksum"} or not isinstance(start["entries"], list):
        raise WireError("not the head of a block")
    numbers, heads, counts = [start["size"], start["checksum"]], [], []
    for entry in start["entries"]:
        if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[2], dict):
            raise WireError("not the head of an entry")
        number, task, versions, count = entry
        numbers += [number, task, count]
        numbers += [each for of_lineage in versions.values() for each in (of_lineage if _are_three(of_lineage) else [None])]
        heads.append(Head(number, task, versions))
        counts.append(count)
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise WireError("not the head of a block")
    return heads, counts, start["size"], start["checksum"]


def _are_three(versions: object) -> bool:
    """Whether they are as many as `Versions` has."""
    return isinstance(versions, list) and len(versions) == 3
