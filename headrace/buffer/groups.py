"""The buffer of scored groups, and the order in which they leave it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from headrace.observe import Signal

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.records import Episode, Rollout


_OBJECT_BYTES = 2048
"""Of a rollout's Python objects and its part of the episode and the task, besides its arrays."""


class Versions(NamedTuple):
    """The policy versions that sampled the tokens of a rollout or a group."""

    first: int
    """Of the first token sampled, which is the oldest."""
    newest: int
    trained: int
    """The oldest of the tokens that are trained; the newest if none is."""

    @classmethod
    def of(cls, rollout: Rollout) -> Versions | None:
        """None if nothing was sampled."""
        first, versions = rollout.oldest_version, rollout.versions
        if first < 0:
            return None
        newest = int(versions.max())
        return cls(first, newest, int(versions[rollout.loss_mask].min(initial=newest)))

    def joined(self, other: Versions | None) -> Versions:
        """Of both together."""
        if other is None:
            return self
        return Versions(min(self.first, other.first), max(self.newest, other.newest), min(self.trained, other.trained))


@dataclass(frozen=True)
class Group:
    """The scored episodes of one task."""

    number: int
    """In the order of submission, from 0."""
    episodes: tuple[Episode, ...]
    source: str = ""
    """The source of its task, and the task's place there, as `tasks.Task` has them."""
    index: int = -1

    @cached_property
    def unshaped_rewards(self) -> list[float]:
        return [reward for episode in self.episodes if (reward := episode.unshaped_reward) is not None]

    @property
    def is_tied(self) -> bool:
        """Whether all its rollouts have the same reward: compared with each other, they teach nothing."""
        return len(self.episodes) > 1 and len({episode.reward for episode in self.episodes}) == 1

    @cached_property
    def versions(self) -> dict[str, Versions]:
        """By lineage, those that sampled its tokens. Cached, because it is asked for every version."""
        rollouts = [rollout for episode in self.episodes for rollout in episode.rollouts]
        found: dict[str, Versions] = {}
        for rollout in rollouts:
            versions = Versions.of(rollout)
            if versions is not None:
                found[rollout.lineage] = versions.joined(found.get(rollout.lineage))
        return found

    @cached_property
    def span(self) -> Versions | None:
        """The versions that sampled its tokens, of all lineages; None if there are no tokens."""
        span = None
        for versions in self.versions.values():
            span = versions.joined(span)
        return span

    @cached_property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        return sum(_OBJECT_BYTES + rollout.num_bytes for episode in self.episodes for rollout in episode.rollouts)


class GroupBuffer:
    """`put` never waits; `ready` is set while a whole batch can be taken."""

    def __init__(
        self, *, batch: int, capacity: int | None, max_bytes: int, waits_for: Callable[[], int | None] | None = None
    ) -> None:
        """With `waits_for`, groups leave in the order of their numbers and none before the group in flight that it names,
        which must have left the table of groups in flight when it is put or dropped."""
        self._batch, self.capacity, self._max_bytes, self._waits_for = batch, capacity, max_bytes, waits_for
        self._groups: dict[int, Group] = {}
        self.num_bytes = 0
        self.ready = Signal()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_full(self) -> bool:
        """While it is, no groups are submitted. A batch fits whatever its bytes, or the trainer would wait for it forever."""
        is_large = self.num_bytes >= self._max_bytes and len(self._groups) >= self._batch
        return is_large or (self.capacity is not None and len(self._groups) >= self.capacity)

    @property
    def num_episodes(self) -> int:
        return sum(len(group.episodes) for group in self._groups.values())

    def put(self, group: Group) -> None:
        assert group.number not in self._groups
        self._groups[group.number] = group
        self.num_bytes += group.num_bytes
        self._update()

    def drop(self, number: int) -> None:
        """That group, waiting or in flight until now, will never be trained: it failed, or was filtered or rejected."""
        group = self._groups.pop(number, None)
        self.num_bytes -= 0 if group is None else group.num_bytes
        self._update()

    def take(self) -> list[Group]:
        """Remove and return a batch; only while `ready` is set."""
        numbers = self._available()[: self._batch]
        assert len(numbers) == self._batch
        taken = [self._groups.pop(number) for number in numbers]
        self.num_bytes -= sum(group.num_bytes for group in taken)
        self._update()
        return taken

    def put_back(self, groups: list[Group]) -> None:
        """Undo a `take`: the groups leave next, in the order they had."""
        self._groups = {group.number: group for group in groups} | self._groups
        self.num_bytes += sum(group.num_bytes for group in groups)
        self._update()

    def groups(self) -> list[Group]:
        """The waiting groups, in the order they were put."""
        return list(self._groups.values())

    def available(self) -> list[Group]:
        """The groups that may leave now, in the order in which they will."""
        return [self._groups[number] for number in self._available()]

    def _available(self) -> list[int]:
        """Numbers of the groups that may leave now, in order."""
        if self._waits_for is None:
            return list(self._groups)
        first = self._waits_for()
        return sorted(number for number in self._groups if first is None or number < first)

    def _update(self) -> None:
        if len(self._available()) >= self._batch:
            self.ready.set()
        else:
            self.ready.clear()
