"""The files of a journal: numbered segments of blocks, each a frame with checksums.

A block holds the entries of groups that were written together, because most of the cost is per frame: what each group is
(number, task, versions), how many episodes it has, and the episodes of all. Segments are only appended to, and deleted whole.
What follows a damaged byte in a segment is not read, since nothing says where it begins.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import threading
from collections import Counter
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from headrace.buffer.groups import JournalError, Versions
from headrace.durable import sync
from headrace.records import WireError, encode, pack_episodes, read_frames, unpack_episodes, wire_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.records import Episode

_NAME = re.compile(r"\d{8}\.journal")
_SHARES = 16
"""A segment takes at most this part of the journal's bytes, so that one of them pinned for long costs little."""


class Block(NamedTuple):
    segment: int
    offset: int
    size: int


class Place(NamedTuple):
    """Where an entry lies: its episodes are those from `start` to `stop` of a block."""

    block: Block
    start: int
    stop: int


class Head(NamedTuple):
    """What an entry says of its group without reading it."""

    number: int
    task: int
    """Fingerprint of the task."""
    versions: dict[str, Versions]


class Segments:
    """Appends come from one thread; reading and deleting may come from others."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder, self._max_bytes = folder, max_bytes
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
        return self.folder / f"{segment:08d}.journal"

    def clear(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._sizes.clear()
        self._pins.clear()
        self.num_bytes, self._last_read = 0, None

    # Writing

    def append(self, heads: Sequence[Head], members: Sequence[Sequence[Episode]]) -> list[Place] | None:
        """Hand a block of entries, with the episodes of each, to the operating system, and pin every one; None if it does not
        fit. Raises `OSError` if that fails."""
        entries = [[*head, len(episodes)] for head, episodes in zip(heads, members, strict=True)]
        packed = pack_episodes([episode for episodes in members for episode in episodes])
        frame = encode({"entries": entries, "episodes": packed})
        if self.num_bytes + len(frame) > self._max_bytes:
            return None
        segment = self._pinned(len(frame), len(members))
        try:
            file = self._opened(segment)
            file.write(frame)
            file.flush()
        except BaseException:
            self._file = None
            self.mark()  # what is half written is the end of its segment: nothing is written behind it
            with self._lock:
                self._pins[segment] -= len(members)
            raise
        block = Block(segment, self._sizes[segment], len(frame))
        self._count(segment, len(frame))
        return _places(block, list(map(len, members)))

    def _pinned(self, num_bytes: int, count: int) -> int:
        """The segment that takes the next bytes, pinned `count` times: a checkpoint may end before they are written."""
        with self._lock:
            size = self._sizes.setdefault(self._current, 0)
            if size and size + num_bytes > self._max_bytes // _SHARES:
                self._current += 1
                self._sizes[self._current] = 0
            self._pins[self._current] += count
            return self._current

    def _opened(self, segment: int) -> IO[bytes]:
        if self._file is None or self._open_segment != segment:
            self.close()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file, self._open_segment = self._path(segment).open("ab"), segment
        return self._file

    def _count(self, segment: int, num_bytes: int) -> None:
        with self._lock:
            self._sizes[segment] = self._sizes.get(segment, 0) + num_bytes
            self.num_bytes += num_bytes

    def mark(self) -> int:
        """Start another segment, and return its number: what is appended from now on is in it or in later ones."""
        with self._lock:
            self._current += 1
            return self._current

    def close(self) -> None:
        """Sync the open segment to the disk."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(FileNotFoundError):  # a checkpoint may have deleted it
                sync(self._path(self._open_segment))

    # Reading

    def read(self, place: Place) -> list[Episode]:
        """The episodes of an entry, unscored ones too; raises `JournalError` if its block is damaged."""
        last = self._last_read
        if last is None or last[0] != place.block:
            last = self._last_read = place.block, self._read_block(place.block)
        return last[1][place.start : place.stop]

    def _read_block(self, block: Block) -> list[Episode]:
        try:
            with self._path(block.segment).open("rb") as file:
                file.seek(block.offset)
                for found in read_frames(file):
                    return unpack_episodes(found["episodes"])
            raise WireError("it is cut off")
        except (OSError, WireError) as error:
            raise JournalError(f"{self._path(block.segment)} has a damaged entry at byte {block.offset}: {error}") from error

    def scan(self) -> tuple[dict[int, tuple[Head, Place]], int, list[str]]:
        """(entries of an earlier process by number, of several the last; bytes that are damaged or follow what is; names of
        files that are no segments). What is appended from now on goes to a new segment."""
        entries: dict[int, tuple[Head, Place]] = {}
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        segments = {name: int(name[:8]) for name in names if _NAME.fullmatch(name) and (self.folder / name).is_file()}
        num_bytes_lost = 0
        for segment in segments.values():
            found, size = self._scan_segment(segment)
            entries |= found
            self._count(segment, self._path(segment).stat().st_size)
            num_bytes_lost += self._sizes[segment] - size
        self._current = max(segments.values(), default=0) + 1
        return entries, num_bytes_lost, [name for name in names if name not in segments]

    def _scan_segment(self, segment: int) -> tuple[dict[int, tuple[Head, Place]], int]:
        """Its entries, and the bytes of their blocks."""
        found: dict[int, tuple[Head, Place]] = {}
        end = 0
        with self._path(segment).open("rb") as file, contextlib.suppress(WireError):
            for block in read_frames(file):
                heads, counts = _heads(block)
                start, end = end, file.tell()
                places = _places(Block(segment, start, end - start), counts)
                found |= {head.number: (head, place) for head, place in zip(heads, places, strict=True)}
        return found, end

    # Deleting

    def pin(self, place: Place) -> bool:
        """Keep an entry whatever checkpoints say, until it is unpinned; False if it is gone already."""
        with self._lock:
            if place.block.segment in self._sizes:
                self._pins[place.block.segment] += 1
            return place.block.segment in self._sizes

    def unpin(self, place: Place) -> None:
        with self._lock:
            self._pins[place.block.segment] -= 1

    def forget(self, mark: int) -> None:
        """The checkpoint taken at `mark` is on disk: delete the segments before it, but for those that are pinned."""
        with self._lock:
            segments = [each for each in self._sizes if each < mark and self._pins[each] <= 0]
            self.num_bytes -= sum(self._sizes.pop(segment) for segment in segments)
        for segment in segments:
            self._path(segment).unlink(missing_ok=True)


def _places(block: Block, counts: Sequence[int]) -> list[Place]:
    """Of entries with so many episodes, one after the other."""
    stops = list(itertools.accumulate(counts))
    return [Place(block, stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _heads(block: Any) -> tuple[list[Head], list[int]]:  # noqa: ANN401  (whatever the file holds)
    """Of each entry, its head and its number of episodes."""
    with wire_errors("not a block of a journal"):
        if block.keys() != {"entries", "episodes"}:
            raise ValueError("its fields are others")
        heads, counts = list[Head](), list[int]()
        for number, task, versions, count in block["entries"]:
            heads.append(Head(number, task, {lineage: Versions(*each) for lineage, each in versions.items()}))
            counts.append(count)
        numbers = [number for head in heads for number in (head.number, head.task, *itertools.chain(*head.versions.values()))]
        if not all(type(each) is int and each >= 0 for each in (*numbers, *counts)):
            raise ValueError("it has entries that no journal writes")
    return heads, counts
