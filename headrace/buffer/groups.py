"""The buffer of scored groups, and the order in which they leave it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.observe import Signal
from headrace.records import Scored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.buffer.journal import Entry, Journal
    from headrace.buffer.segments import Place
    from headrace.records import Array, Episode, Rollout


_OBJECT_BYTES = 2048
"""Of a rollout's Python objects and its part of the episode and the task, besides its arrays."""
_STORED_BYTES = 1024
"""What stays in memory of a group that waits on disk."""


_NO_VERSIONS = np.zeros(0, np.int32)


class JournalError(RuntimeError):
    """A group that is only in the journal cannot be read back."""


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
        trained = newest if first == newest else int(versions[rollout.loss_mask].min(initial=newest))
        return cls(first, newest, trained)

    def joined(self, other: Versions | None) -> Versions:
        """Of both together."""
        if other is None:
            return self
        return Versions(min(self.first, other.first), max(self.newest, other.newest), min(self.trained, other.trained))


class Facts(NamedTuple):
    """What is asked of a group while it waits, which is known without its episodes."""

    unshaped_rewards: list[float]
    versions: dict[str, Versions]
    """By lineage, those that sampled its tokens."""
    num_episodes: int
    num_sampled: int
    num_stamped: int = 0
    """Tokens that have a version; unlike `num_sampled`, those that a fork shares with its parent count twice."""
    version_sum: int = 0
    """Of their versions."""

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> Facts:
        rewards = [reward for episode in episodes if (reward := episode.unshaped_reward) is not None]
        rollouts = [rollout for episode in episodes for rollout in episode.rollouts]
        stamps = [rollout.versions[call.start : call.stop] for rollout in rollouts for call in rollout.calls]
        stamped = np.concatenate([_NO_VERSIONS, *stamps])
        versions, total = _versions(rollouts, stamped), int(stamped.sum(dtype=np.int64))
        return cls(rewards, versions, len(episodes), num_sampled(episodes), len(stamped), total)


def _versions(rollouts: Sequence[Rollout], stamped: Array) -> dict[str, Versions]:
    if len(stamped) and len({rollout.lineage for rollout in rollouts}) == 1:
        newest = int(stamped.max())
        if newest == stamped.min():  # one version sampled all, as most often
            return {rollouts[0].lineage: Versions(newest, newest, newest)}
    found: dict[str, Versions] = {}
    for rollout in rollouts:
        own = Versions.of(rollout)
        if own is not None:
            found[rollout.lineage] = own.joined(found.get(rollout.lineage))
    return found


@dataclass(frozen=True)
class Group:
    """What enters and leaves the buffer as one: the scored episodes of one task or, with `buffer.unit = "episode"`, one."""

    number: int
    """In the order of submission, from 0. With `buffer.unit = "episode"`, every episode has its own."""
    episodes: tuple[Episode, ...]
    source: str = ""
    """The source of its task, and the task's place there, as `tasks.Task` has them."""
    index: int = -1
    told: Facts | None = None
    """Of episodes that are not in memory."""
    stored: Stored | None = None
    """Where its episodes wait on disk, if they are not in memory."""

    @cached_property
    def facts(self) -> Facts:
        """Cached, because they are asked for every version."""
        return self.told or Facts.of(self.episodes)

    @property
    def unshaped_rewards(self) -> list[float]:
        return self.facts.unshaped_rewards

    @property
    def versions(self) -> dict[str, Versions]:
        return self.facts.versions

    @property
    def num_episodes(self) -> int:
        return self.facts.num_episodes

    @property
    def num_sampled(self) -> int:
        return self.facts.num_sampled

    @property
    def is_tied(self) -> bool:
        """Whether all its rollouts have the same reward: compared with each other, they teach nothing."""
        return len(self.episodes) > 1 and len({episode.reward for episode in self.episodes}) == 1

    @cached_property
    def span(self) -> Versions | None:
        """The versions that sampled its tokens, of all lineages; None if there are no tokens."""
        span = None
        for versions in self.versions.values():
            span = versions.joined(span)
        return span

    @property
    def oldest_version(self) -> int:
        """The oldest that sampled any of its tokens; 0 if none is sampled."""
        return 0 if self.span is None else self.span.first

    @cached_property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        if self.stored is not None:
            return _STORED_BYTES
        return sum(_OBJECT_BYTES + rollout.num_bytes for episode in self.episodes for rollout in episode.rollouts)

    def without_episodes(self, stored: Stored) -> Group:
        return replace(self, episodes=(), told=self.facts, stored=stored)

    def loaded(self) -> Group:
        """With its episodes; raises `JournalError` if they cannot be read."""
        return self if self.stored is None else Group(self.number, self.stored.read(), self.source, self.index)

    def leave_disk(self) -> None:
        """The journal need not keep its episodes, if it does."""
        if self.stored is not None:
            self.stored.journal.unpin(self.stored.place)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; the episodes of one on disk are read when asked for."""
        entry = {"number": self.number, "episodes": self.episodes, "source": self.source, "index": self.index}
        if self.stored is not None:
            entry |= {"episodes": self.stored.read, "facts": [self.num_episodes, self.num_sampled]}
        return entry


class Stored(NamedTuple):
    """The entry of a group in the journal."""

    journal: Journal
    place: Place

    def read(self) -> tuple[Episode, ...]:
        """The scored ones."""
        return tuple(episode for episode in self.journal.read(self.place) if isinstance(episode.outcome, Scored))


def num_sampled(episodes: Iterable[Episode]) -> int:
    """Without the tokens that a fork shares with its parent, which counts them."""
    total = 0
    for rollout in (rollout for episode in episodes for rollout in episode.rollouts):
        total += rollout.num_sampled  # of the calls, which cover exactly the sampled tokens
        if rollout.parent is not None:
            total -= sum(max(0, min(call.stop, rollout.parent[1]) - call.start) for call in rollout.calls)
    return total


class GroupBuffer:
    """`put` never waits; `ready` is set while `wanted` groups can be taken. Apart from `groups` and `available`, no call looks
    at every waiting group."""

    def __init__(
        self,
        *,
        batch: int,
        capacity: int | Callable[[], int | None] | None,
        max_bytes: int,
        waits_for: Callable[[], int | None] | None = None,
        window: Callable[[], int] = lambda: 1,
        num_reserved: Callable[[], int] = lambda: 0,
        overwrites: bool = False,
        journal: Journal | None = None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`capacity`: groups at which it is full, counting those in flight that `num_reserved` tells. With `waits_for`, groups
        leave in the order of their numbers, and only those less than `window` after the group in flight that it names, which
        must have left the table of groups in flight when it is put or dropped. `overwrites`: see `overwritten`. With a
        `journal`, groups beyond `max_bytes` wait on disk; `on_room` is called when one has gone there."""
        self.batch, self.capacity, self._max_bytes = batch, capacity, max_bytes
        self.wanted = batch
        """Groups that are taken next: a batch, or a part of one."""
        self._waits_for, self._window = waits_for, window
        self._num_reserved, self._overwrites = num_reserved, overwrites
        self._groups: OrderedDict[int, Group] = OrderedDict()
        """By number, in the order they were put."""
        self._numbers: list[int] = []
        """Sorted; empty if they leave in the order they were put."""
        self._unchecked: set[int] = set()
        self._by_age: defaultdict[int, set[int]] = defaultdict(set)
        """Oldest version -> numbers of the groups."""
        self.num_bytes = self.num_episodes = 0
        """Bytes in memory."""
        self.ready = Signal()
        self._places: dict[int, Place] = {}
        """Of groups in memory that are in the journal too, unless a checkpoint has made that forget them."""
        self.journal, self._on_room = journal, on_room
        if journal is not None:
            journal.on_written = self._on_written

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def is_full(self) -> bool:
        """While it is, no groups are submitted. A batch fits whatever its bytes, or the trainer would wait for it forever."""
        if self._overwrites:
            return False
        has_no_bytes = self.num_bytes >= self._max_bytes or (self.journal is not None and self.journal.is_full)
        bound = self._bound
        is_at_bound = bound is not None and len(self._groups) + self._num_reserved() >= bound
        return is_at_bound or (has_no_bytes and len(self._groups) >= self.batch)

    @property
    def _bound(self) -> int | None:
        return self.capacity() if callable(self.capacity) else self.capacity

    def put(self, group: Group, *, entry: Entry | None = None, place: Place | None = None) -> None:
        """`entry`: what to write to the journal, unless it is there already, at `place`."""
        assert group.number not in self._groups
        self._add(group)
        self.update()
        if place is not None:
            self._on_written(group.number, place)
        elif self.journal is not None and entry is not None:
            self.journal.write(entry)

    def _on_written(self, number: int, place: Place | None) -> None:
        """A group is in the journal, if it has a place there."""
        if place is not None and number in self._groups:
            self._places[number] = place
            self._spill()

    def _spill(self) -> None:
        """While memory is full, leave groups to the disk: those written last, which leave last in most orders."""
        while self.journal is not None and self.num_bytes >= self._max_bytes and self._places:
            number, place = self._places.popitem()
            if self.journal.pin(place):
                self.num_bytes -= self._groups[number].num_bytes - _STORED_BYTES
                self._groups[number] = self._groups[number].without_episodes(Stored(self.journal, place))
                self._on_room()

    def drop(self, number: int) -> None:
        """That group, waiting or in flight until now, will never be trained: it failed, or was filtered or rejected."""
        if number in self._groups:
            self._remove(number).leave_disk()
        self.update()

    def take(self) -> list[Group]:
        """Remove and return the groups that are wanted; only while `ready` is set."""
        assert self.num_available >= self.wanted
        taken = [self._remove(number) for number in self._next(self.wanted)]
        self.update()
        return taken

    def want(self, count: int) -> None:
        """So many groups are taken next."""
        self.wanted = count
        self.update()

    def load(self, taken: list[Group]) -> list[Group | JournalError]:
        """The groups with their episodes, in any thread; an error in place of each that cannot be read from the disk. What is
        not put back leaves the disk after that."""
        found: list[Group | JournalError] = []
        for group in taken:
            try:
                found.append(group.loaded())
            except JournalError as error:
                found.append(error)
        return found

    def put_back(self, groups: list[Group]) -> None:
        """Undo a `take`: the groups leave next, in the order they had."""
        for group in reversed(groups):
            self._add(group)
            self._groups.move_to_end(group.number, last=False)
        self.update()

    def overwritten(self) -> list[Group]:
        """Of a ring above its bound: the groups that would leave next, which are to be dropped. The newest batch stays."""
        found, num_left, bytes_left = list[Group](), len(self._groups), self.num_bytes
        bound = self._bound if self._overwrites else None
        if bound is None or (num_left <= bound and bytes_left <= self._max_bytes):
            return found
        for number in self._next(num_left - self.batch):
            if num_left <= bound and bytes_left <= self._max_bytes:
                break
            found.append(self._groups[number])
            num_left, bytes_left = num_left - 1, bytes_left - found[-1].num_bytes
        return found

    def groups(self) -> list[Group]:
        """The waiting groups, in the order they were put."""
        return list(self._groups.values())

    def available(self) -> list[Group]:
        """The groups that may leave now, in the order in which they will."""
        return [self._groups[number] for number in self._next(self.num_available)]

    def suspects(self, *, older_than: int | None) -> list[Group]:
        """The groups that may be too old: those put since this was last called, and those with a token of a version before
        `older_than`."""
        numbers, self._unchecked = dict.fromkeys(sorted(self._unchecked)), set()
        for version in [version for version in self._by_age if older_than is not None and version < older_than]:
            numbers |= dict.fromkeys(self._by_age[version])
        return [self._groups[number] for number in numbers]

    def _add(self, group: Group) -> None:
        self._groups[group.number] = group
        self._unchecked.add(group.number)
        self._by_age[group.oldest_version].add(group.number)
        if self._waits_for is not None:
            insort(self._numbers, group.number)
        self.num_bytes += group.num_bytes
        self.num_episodes += group.num_episodes

    def _remove(self, number: int) -> Group:
        group = self._groups.pop(number)
        self._places.pop(number, None)
        if self._waits_for is not None:
            del self._numbers[bisect_left(self._numbers, number)]
        self._unchecked.discard(number)
        same_age = self._by_age[group.oldest_version]
        same_age.remove(number)
        if not same_age:
            del self._by_age[group.oldest_version]
        self.num_bytes -= group.num_bytes
        self.num_episodes -= group.num_episodes
        return group

    @property
    def num_available(self) -> int:
        """Groups that may leave now."""
        first = self._waits_for() if self._waits_for is not None else None
        return len(self._groups) if first is None else bisect_left(self._numbers, first + self._window())

    def _next(self, count: int) -> list[int]:
        """Numbers of the groups that leave next."""
        return list(islice(self._groups, count)) if self._waits_for is None else self._numbers[:count]

    def update(self) -> None:
        """What may leave now has changed: here, or in the table of groups in flight or the gate."""
        if self.num_available >= self.wanted:
            self.ready.set()
        else:
            self.ready.clear()
