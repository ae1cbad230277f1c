"""What a killed run had scored since its last checkpoint, found in the journal and used instead of generating it again.

Numbers and tasks repeat after a restart, because the checkpoint holds the state of the task stream: group number n is the same
group as before, if its task is the same. Each is taken when its number is submitted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.buffer import Facts, Group, JournalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer import Block, Head, Journal, Place
    from headrace.records import Episode
    from headrace.run.in_flight import EpisodeInFlight, GroupInFlight

log = logging.getLogger(__name__)
_AHEAD, _MOST_BYTES = 64, 64 << 20
"""Numbers that are read with those asked for, at most, and bytes of them all after which no more are."""


class RecoveredGroups:
    """Empty without a journal."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._found: dict[int, tuple[Head, Place]] = {}
        self._read: dict[int, list[Episode]] = {}
        """Episodes of groups that are about to be taken; none if they cannot be read."""
        self.num_found = self.num_wanted = self.num_used = 0
        """Groups that were in the journal, that can be trained, and that were taken instead of being generated."""

    async def find(self) -> None:
        """Read the journal."""
        if self._journal is not None:
            self._found = await asyncio.to_thread(self._journal.recover)
        self.num_found = len(self._found)

    def place(self, group: Group) -> Place | None:
        """Where the journal has this very group, and not one of that number from another life of the trainer."""
        head, place = self._found.get(group.number, (None, None))
        return place if head is not None and head.versions == group.versions else None

    def keep(self, is_wanted: Callable[[Group], bool]) -> None:
        """Forget all but these; they are asked for their number and versions only."""
        self._found = {
            number: each
            for number, each in self._found.items()
            if is_wanted(Group(number, (), told=Facts([], each[0].versions, 0, 0)))
        }
        self.num_wanted = len(self._found)
        for _, place in self._found.values():
            self._pin(place)

    async def read_ahead(self, first: int, last: int) -> bool:
        """Read what there is of the numbers from `first` to before `last`, in a thread, with some that follow and are taken
        next; returns whether there was anything to read."""
        if not any(number in self._found and number not in self._read for number in range(first, last)):
            return False
        ahead: list[int] = []
        blocks: set[Block] = set()
        for number in range(first, last + _AHEAD):
            if number >= last and sum(block.size for block in blocks) > _MOST_BYTES:
                break
            if number in self._found and number not in self._read:
                blocks.add(self._found[number][1].block)
                ahead.append(number)
        places = [self._found[number][1] for number in ahead]
        read = await asyncio.to_thread(lambda: [self._episodes(place) for place in places])
        self._read.update(zip(ahead, read, strict=True))
        return True

    def take(self, group: GroupInFlight, *, number: Callable[[EpisodeInFlight], int]) -> list[tuple[Place, list[Episode]]]:
        """What there is of a group that is in flight from now on, and was read ahead."""
        taken = []
        for own in sorted({number(record) for record in group.episodes} & self._found.keys()) if self._found else ():
            head, place = self._found.pop(own)
            episodes = self._read.pop(own, [])
            episodes = episodes if head.task == group.task_fingerprint else []
            due = {record.id for record in group.episodes if number(record) == own}
            if {episode.id for episode in episodes} == due:
                self.num_used += 1
                taken.append((place, episodes))
            else:
                self.release(place)
        return taken

    def release(self, place: Place) -> None:
        """What was taken is in the buffer: in memory, or pinned by itself."""
        assert self._journal is not None
        self._journal.unpin(place)

    def describe(self) -> str:
        """For the line that says from where a run is resumed."""
        if not self.num_found:
            return ""
        return f", and {self.num_wanted} of {self.num_found} groups in the journal that need not be generated again"

    def _episodes(self, place: Place) -> list[Episode]:
        assert self._journal is not None
        try:
            return self._journal.read(place)
        except JournalError as error:
            log.warning("generated again: %s", error)
            return []

    def _pin(self, place: Place) -> None:
        assert self._journal is not None
        self._journal.pin(place)
