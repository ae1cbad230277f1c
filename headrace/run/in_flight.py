"""The groups in flight: one record per episode, from submission until its group moves to the buffer.

Scoring, cancelling, checkpoints and recovery all use this table; tokens of running generate calls come from
`engine.in_flight()`. A checkpoint keeps ended episodes and the partial rollouts of the others. On resume, an unfinished
episode's environment starts over; only its first generate call continues a partial rollout, if the prompt tokens are the same.
If the environment says that it can resume, it gets what all its calls returned again, and goes on from there.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.buffer import Group, Versions, num_sampled, task_fingerprint
from headrace.partial import is_resumable, surviving_part
from headrace.records import Scored, unpack_episodes, unpack_rollouts

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator, Sequence

    from headrace.engine import Engine, InFlight
    from headrace.records import Episode, Rollout
    from headrace.staleness import Rejection
    from headrace.sync import Lineage
    from headrace.tasks import Task


@dataclass(eq=False)
class EpisodeInFlight:
    group: GroupInFlight
    index: int
    attempt: int = 1
    running: asyncio.Task[None] | None = None
    """The task running the environment; None while the episode is queued."""
    ended: Episode | None = None
    """What the environment returned; `score` adds the outcome. None while it runs, or if it failed and is not yet collected."""
    partials: dict[str, Rollout] = field(default_factory=dict)
    """Interrupted rollouts by id, until a generate call finishes them."""

    @property
    def id(self) -> str:
        return f"{self.group.name}/{self.index}"


@dataclass(eq=False)
class GroupInFlight:
    policy: str
    """The policy that samples the group and trains on it."""
    name: str
    number: int
    """Its place in the policy's order of submission."""
    task: Task
    held_version: int = 0
    """What every engine held when it was submitted: none of its tokens is older."""
    episodes: list[EpisodeInFlight] = field(default_factory=list)
    """With `buffer.unit = "episode"`, without those that are in the buffer already."""
    rewards: list[float] = field(default_factory=list)
    """Unshaped, of the episodes that were scored and have left it."""
    submitted_at: float = field(default_factory=lambda: time.perf_counter())
    is_cancelled: bool = False
    """Removed from the table, though some of its episodes may still be finishing."""

    @property
    def task_fingerprint(self) -> int:
        return task_fingerprint(self.task.row, self.task.source, self.task.index)

    @property
    def ended(self) -> list[Episode]:
        return [record.ended for record in self.episodes if record.ended is not None]

    @property
    def is_complete(self) -> bool:
        return all(record.ended is not None and record.ended.outcome is not None for record in self.episodes)


class InFlightTable:
    """The groups in flight of one policy by name, oldest first."""

    def __init__(self, engine: Engine, *, keeps_turns: bool = False, units: int = 1) -> None:
        """`keeps_turns`: the environment can resume, so that all rollouts of an unfinished episode are kept. `units`: numbers
        that a group has in the buffer."""
        self._engine, self._keeps_turns, self._units = engine, keeps_turns, units
        self.groups: dict[str, GroupInFlight] = {}
        self.num_unfinished = 0
        """Episodes whose environment still runs or is to be run."""
        self._is_closed = False

    def __len__(self) -> int:
        return len(self.groups)

    def episodes(self) -> Iterator[EpisodeInFlight]:
        return (record for group in self.groups.values() for record in group.episodes)

    @property
    def num_partials(self) -> int:
        """Interrupted rollouts that no engine is working on."""
        return sum(len(record.partials) for record in self.episodes())

    @property
    def oldest(self) -> int | None:
        """The number, as the buffer counts, of what was submitted first."""
        group = next(iter(self.groups.values()), None)
        return None if group is None else self.number(group.episodes[0])

    def number(self, record: EpisodeInFlight) -> int:
        """The number under which an episode enters the buffer: its group's, or its own."""
        return record.group.number * self._units + (record.index if self._units > 1 else 0)

    @property
    def num_units(self) -> int:
        """What is in flight, as the buffer counts."""
        return len(self.groups) if self._units == 1 else sum(len(group.episodes) for group in self.groups.values())

    def add(self, group: GroupInFlight, *, indexes: Iterable[int]) -> None:
        group.episodes = [EpisodeInFlight(group, index) for index in indexes]
        self.groups[group.name] = group
        self.num_unfinished += len(group.episodes)

    def end(self, record: EpisodeInFlight, episode: Episode | None) -> None:
        """What the environment has returned; None: it is run again."""
        if not record.group.is_cancelled:
            self.num_unfinished += (episode is None) - (record.ended is None)
        record.ended = episode

    def leave(self, record: EpisodeInFlight) -> list[EpisodeInFlight]:
        """What leaves the table now that this episode's outcome is known: itself, or its group if that is complete."""
        group = record.group
        if self._units > 1:
            group.episodes.remove(record)
        elif not group.is_complete:
            return []
        if self._units == 1 or not group.episodes:
            del self.groups[group.name]
        if self._units > 1:
            return [record]
        left, group.episodes = group.episodes, []  # else group and records would wait for garbage collection, with all tokens
        return left

    def cancel(self, name: str) -> GroupInFlight:
        """Remove a group and cancel its tasks, which cancels their generate calls."""
        group = self.groups.pop(name)
        self.num_unfinished -= sum(record.ended is None for record in group.episodes)
        group.is_cancelled = True
        for record in group.episodes:
            if record.running is not None:
                record.running.cancel()
        return group

    async def over_age(self, rejection: Rejection, *, next_version: int, held: int | None) -> dict[str, int]:
        """Groups already too old for every later batch -> tokens sampled for them; tokens that an engine process has not
        reported yet do not count. `held`: the version that samples the next token of a running generate call; None if each
        keeps the version it began with."""
        sampled: dict[str, tuple[str, Versions | None, int]] = {}  # rollout -> (group, of what may be trained, tokens)
        for record in self.episodes():
            ended = record.ended
            is_trained = ended is None or ended.outcome is None or isinstance(ended.outcome, Scored)
            for rollout in record.partials.values() if ended is None else ended.rollouts:
                if rollout.num_sampled:
                    sampled[rollout.id] = (record.group.name, Versions.of(rollout) if is_trained else None, rollout.num_sampled)
        for call in await self._engine.in_flight():
            rollout, oldest = call.rollout, call.oldest
            if oldest is not None and rollout.group in self.groups:
                earlier = rollout.num_sampled if rollout.calls else 0
                versions = Versions(oldest, max(oldest, held or 0), oldest)
                sampled[rollout.id] = (rollout.group, versions, earlier + call.num_sampled)
        tokens, spans = Counter[str](), dict[str, Versions]()
        for name, versions_or_none, count in sampled.values():
            tokens[name] += count
            if versions_or_none is not None:
                spans[name] = versions_or_none.joined(spans.get(name))
        is_doomed = {name: rejection.is_over_age(span, at=next_version) for name, span in spans.items()}
        return {name: tokens[name] for name in self.groups if is_doomed.get(name)}

    # Legs and checkpoints

    async def close(self) -> None:
        """Save the tokens of running generate calls before the leg's tasks are cancelled. Only the first call has an effect."""
        if self._is_closed:
            return
        running = await self._running()
        self._is_closed = True
        for record in self.episodes():  # new dicts: cancelled clients remove their rollouts from the old ones
            record.partials = _partials(record.partials, running.get(record.id, ()))

    def reopen(self) -> list[EpisodeInFlight]:
        """A leg starts: the episodes to run again or to score, those with partial rollouts first."""
        self._is_closed = False
        return sorted(self.episodes(), key=lambda record: not record.partials)

    async def entries(self) -> list[dict[str, Any]]:
        """The groups for a checkpoint: ended episodes, and the partial rollouts of the others, made when asked for: copying all
        tokens in flight takes long."""
        running, entries = await self._running(), []
        for group in self.groups.values():
            unfinished = [(dict(each.partials), running.get(each.id, ())) for each in group.episodes if each.ended is None]
            rollouts = functools.partial(_resumable, unfinished, keeps_turns=self._keeps_turns)
            entries.append({"number": group.number, "episodes": group.ended, "rollouts": rollouts})
        return entries

    async def _running(self) -> dict[str, list[InFlight]]:
        """The generate calls that have sampled something, by episode id."""
        by_episode: dict[str, list[InFlight]] = defaultdict(list)
        for call in [] if self._is_closed else await self._engine.in_flight():
            if call.oldest is not None:
                by_episode[call.rollout.episode].append(call)
        return by_episode

    def restore(self, entries: list[dict[str, Any]], *, version: int, lineage: Lineage, rejection: Rejection) -> int:
        """Fill a checkpoint's groups, re-added under their old numbers, and return the tokens lost. A rollout is cut before its
        first token from weights that this lineage does not descend from; what is too old for later batches is sampled again. Of
        what is in flight no longer, because the journal has it, nothing is filled."""
        records, lost = {record.id: record for record in self.episodes()}, 0
        for entry in entries:
            for episode in unpack_episodes(entry["episodes"]):
                alone = Group(number=entry["number"], episodes=(episode,))
                if rejection.reason(alone, version=version, lineage=lineage):
                    lost += num_sampled([episode])
                elif episode.id in records:
                    self.end(records[episode.id], episode)
            for saved in unpack_rollouts(entry["rollouts"]):
                kept = surviving_part(saved, lineage)
                versions = Versions.of(kept) if kept else None
                if versions and rejection.is_over_age(versions, at=version):
                    kept = None
                lost += saved.num_sampled - (kept.num_sampled if kept else 0)
                if kept and kept.episode in records:
                    records[kept.episode].partials[kept.id] = kept
        return lost


def _partials(interrupted: dict[str, Rollout], running: Sequence[InFlight]) -> dict[str, Rollout]:
    """An episode's unfinished rollouts by id."""
    return interrupted | {call.rollout.id: call.partial() for call in running}


def _resumable(episodes: Sequence[tuple[dict[str, Rollout], Sequence[InFlight]]], *, keeps_turns: bool) -> list[Rollout]:
    every = [rollout for each in episodes for rollout in _partials(*each).values()]
    return [rollout for rollout in every if is_resumable(rollout) or (keeps_turns and rollout.num_sampled)]
