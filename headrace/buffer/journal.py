"""A journal of scored groups on disk (`buffer.journal_gb`): they outlive a killed launcher, and may wait there instead of in
memory.

Every group that enters the buffer is also appended to the journal, by a thread. Entries are kept until a checkpoint covers
them, and longer while a group waits there alone. A killed process loses what its thread had not yet handed to the operating
system; segments are synced to the disk when they are closed, so a machine that loses its power may lose the last ones. Nothing
but time is lost with them: what is missing is generated again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from headrace.buffer.segments import Head, Segments
from headrace.errors import in_words
from headrace.records import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from headrace.buffer.groups import Group
    from headrace.buffer.segments import Place
    from headrace.records import Episode, Plain

    _Written = tuple[int, Place | Exception | None]

_MAX_QUEUED = 256 << 20
"""Bytes that wait to be written: beyond, a disk is too slow, and what comes is not journalled."""
_BLOCK_BYTES, _BLOCK_EPISODES = 1 << 20, 64
"""A block takes no more entries from here on: to read one of them, all are read."""


class Entry(NamedTuple):
    """What is written of a group."""

    group: Group
    task: int
    """Fingerprint of its task."""
    unscored: tuple[Episode, ...] = ()
    """Episodes of the group that have no score, so that they are counted once more when the group is taken from here."""

    @property
    def episodes(self) -> list[Episode]:
        return [*self.group.episodes, *self.unscored]


class Journal(Segments):
    """Segments that the event loop writes to. `in_thread`: by a thread, so that `write` costs almost nothing."""

    def __init__(self, folder: Path, *, max_bytes: int, in_thread: bool, say: Callable[[str], None]) -> None:
        super().__init__(folder, max_bytes=max_bytes)
        self._say = say
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal") if in_thread else None
        self._queue: list[Entry] = []
        self._queued_bytes, self._is_closing = 0, False
        self.is_writing = self._is_open = self._is_broken = self._has_said_full = False
        self.is_full = False
        """The last entry did not fit."""
        self.on_written: Callable[[int, Place | None], None] = lambda _number, _place: None
        """Called in the event loop with the number of each group and its place; None if it was not written."""

    def write(self, entry: Entry) -> None:
        """Append a group, soon; `on_written` is called then."""
        if not self._is_open:  # nothing here belongs to this run
            self.clear()
            self._is_open = True
        if self._is_broken or self._queued_bytes > _MAX_QUEUED:
            self.on_written(entry.group.number, None)
            return
        self._queue.append(entry)
        self._queued_bytes += entry.group.num_bytes
        if self._thread is None:
            self._finish(self._append(self._take_queue()))
        elif not self.is_writing:
            self._start()

    def _start(self) -> None:
        """Hand all that is queued to the thread; `_finish` comes back here while more is queued."""
        assert self._thread is not None
        queue, self.is_writing = self._take_queue(), True
        loop = asyncio.get_running_loop()

        def work() -> None:
            written = self._append(queue)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._finish, written)

        self._thread.submit(work)

    def _take_queue(self) -> list[Entry]:
        queue, self._queue, self._queued_bytes = self._queue, [], 0
        return queue

    def _append(self, queue: Sequence[Entry]) -> list[_Written]:
        written: list[_Written] = []
        try:
            for block in _blocks(queue):
                heads = [Head(entry.group.number, entry.task, entry.group.versions) for entry in block]
                places = self.append(heads, [entry.episodes for entry in block])
                written += [(head.number, None if places is None else places[at]) for at, head in enumerate(heads)]
        except Exception as error:  # no run ends for its journal
            if not isinstance(error, OSError | WireError):
                logging.getLogger("headrace").exception("a bug in the journal")
            written += [(each.group.number, error) for each in queue[len(written) :]]
        return written

    def _finish(self, written: list[_Written]) -> None:
        self.is_writing = False
        for number, place in written:
            if isinstance(place, Exception):
                self._give_up(place)
                place = None
            else:
                self._note_full(place is None)
            self.on_written(number, place)
            if place is not None:
                self.unpin(place)
        if self._is_broken:  # what was half written is the end of its segment
            for entry in self._take_queue():
                self.on_written(entry.group.number, None)
        elif self._queue and self._thread is not None and not self._is_closing:
            self._start()

    def _give_up(self, error: Exception) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._say(
                f"journal    cannot be written: {in_words(error)}. The run goes on without it, and loses nothing unless it is "
                "killed"
            )

    def _note_full(self, is_full: bool) -> None:
        self.is_full = is_full
        if is_full and not self._has_said_full:
            self._has_said_full = True
            self._say(
                f"journal    full: {self.num_bytes / 1e9:.3g} GB since the last checkpoint. Nothing is submitted while a batch "
                f"waits; save more often (checkpoint.every) or raise buffer.journal_gb. Said once"
            )

    def end(self, *, is_over: bool) -> None:
        """Write what is queued; delete the files if the run `is_over`."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if not self._is_broken:
            self._append(self._queue)
        self._queue = []
        if is_over:
            self.clear()
        else:
            self.close()

    def recover(self) -> dict[int, tuple[Head, Place]]:
        """The entries that an earlier process left, by number. What cannot be read is counted and said."""
        self._is_open = True
        entries, num_bytes_lost, ignored = self.scan()
        if num_bytes_lost:
            self._say(
                f"journal    {num_bytes_lost:,} bytes in {self.folder} are damaged or follow damaged ones; the {len(entries)} "
                f"groups before are intact, and the others are generated again"
            )
        if ignored:
            self._say(f"journal    ignored in {self.folder}: {', '.join(ignored[:4])}{' …' * (len(ignored) > 4)}")
        return entries

    def forget(self, mark: int) -> None:
        super().forget(mark)
        self.is_full = False


def _blocks(queue: Sequence[Entry]) -> Iterator[list[Entry]]:
    """What is queued, in parts that are written together."""
    block, num_bytes, num_episodes = list[Entry](), 0, 0
    for entry in queue:
        block.append(entry)
        num_bytes, num_episodes = num_bytes + entry.group.num_bytes, num_episodes + entry.group.num_episodes
        if num_bytes >= _BLOCK_BYTES or num_episodes >= _BLOCK_EPISODES:
            yield block
            block, num_bytes, num_episodes = [], 0, 0
    if block:
        yield block


def task_fingerprint(row: dict[str, Plain], source: str, index: int) -> int:
    """Two tasks with the same one are the same."""
    return zlib.crc32(json.dumps([source, index, row], sort_keys=True, default=repr).encode())
