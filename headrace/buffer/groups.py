"""The buffer of scored groups, and the order in which they leave it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headrace.observe import Signal

if TYPE_CHECKING:
    from headrace.records import Episode


@dataclass(frozen=True)
class Group:
    """The scored episodes of one task."""

    number: int
    """In the order of submission, from 0."""
    episodes: tuple[Episode, ...]

    @property
    def ids(self) -> list[str]:
        """The ids of its episodes, which the ledger counts."""
        return [episode.id for episode in self.episodes]

    @property
    def is_tied(self) -> bool:
        """Whether all its rollouts have the same reward: compared with each other, they teach nothing."""
        return len(self.episodes) > 1 and len({episode.reward for episode in self.episodes}) == 1

    @cached_property
    def _origin(self) -> tuple[frozenset[str], int | None]:
        """The lineages that sampled it, and its oldest version, or None if nothing was sampled."""
        rollouts = [rollout for episode in self.episodes for rollout in episode.rollouts]
        versions = np.concatenate([rollout.versions for rollout in rollouts]) if rollouts else np.zeros(0, dtype=np.int32)
        sampled = versions[versions >= 0]
        return frozenset(rollout.lineage for rollout in rollouts), int(sampled.min()) if len(sampled) else None

    def is_within(self, lineage: str, *, oldest: int | None) -> bool:
        """Whether all tokens are of this lineage and none is older than `oldest`. Called every version: `_origin` is cached."""
        lineages, first = self._origin
        return lineages <= {lineage} and (oldest is None or first is None or first >= oldest)


class GroupBuffer:
    """`put` never waits; `ready` is set while a whole batch can be taken."""

    def __init__(self, *, batch: int, capacity: int | None, in_order: bool) -> None:
        self._batch = batch
        self._capacity = capacity
        self._in_order = in_order
        self._next = 0
        self._groups: dict[int, Group] = {}
        self._skipped: set[int] = set()
        self.ready = Signal()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_full(self) -> bool:
        """While it is, no groups are submitted."""
        return self._capacity is not None and len(self._groups) >= self._capacity

    @property
    def num_episodes(self) -> int:
        return sum(len(group.episodes) for group in self._groups.values())

    def put(self, group: Group) -> None:
        assert group.number not in self._groups and group.number >= self._next * self._in_order
        self._groups[group.number] = group
        self._update()

    def skip(self, number: int) -> None:
        """That group will never be trained: it failed, or was filtered or rejected."""
        self._groups.pop(number, None)
        if self._in_order:
            self._skipped.add(number)
        self._update()

    def take(self) -> list[Group]:
        """Remove and return a batch; only while `ready` is set."""
        numbers = self._available()[: self._batch]
        assert len(numbers) == self._batch
        taken = [self._groups.pop(number) for number in numbers]
        if self._in_order:
            self._next = numbers[-1] + 1
            self._skipped = {number for number in self._skipped if number >= self._next}
        self._update()
        return taken

    def put_back(self, groups: list[Group]) -> None:
        """Undo a `take`: the groups leave next, in the order they had."""
        self._groups = {group.number: group for group in groups} | self._groups
        if self._in_order:
            first, taken = groups[0].number, {group.number for group in groups}
            self._skipped |= {number for number in range(first, self._next) if number not in taken}
            self._next = first
        self._update()

    def groups(self) -> list[Group]:
        """The waiting groups, in the order they were put."""
        return list(self._groups.values())

    def state(self) -> dict[str, object]:
        """For a checkpoint, which stores the groups themselves too."""
        return {"next": self._next, "skipped": sorted(self._skipped)}

    def restore(self, *, next_number: int, skipped: list[int], groups: list[Group]) -> None:
        self._next, self._skipped = next_number, set(skipped)
        self._groups = {group.number: group for group in groups}
        self._update()

    def _available(self) -> list[int]:
        """Numbers of the groups that may leave now, in order."""
        if not self._in_order:
            return list(self._groups)
        numbers, number = [], self._next
        while number in self._groups or number in self._skipped:
            if number in self._groups:
                numbers.append(number)
            number += 1
        return numbers

    def _update(self) -> None:
        while self._next in self._skipped:
            self._skipped.remove(self._next)
            self._next += 1
        if len(self._available()) >= self._batch:
            self.ready.set()
        else:
            self.ready.clear()
