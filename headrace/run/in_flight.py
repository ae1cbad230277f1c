"""What is known of the groups in flight, and how a checkpoint keeps them: what has ended, and what is half drawn.

Written beside the buffer and taken up by the next life of the run: what has ended is not begun again, and what is half drawn
goes on from its last token. The environment of an episode that had not ended is run again from its start. Only the
first generate call of its first rollout is gone on with, and only if it asks for the very same prompt tokens
(`headrace.partial.is_resumable`); whatever else it had drawn is begun anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.partial import is_over_age, is_resumable, still_history
from headrace.staleness import too_old

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator, Mapping

    from headrace.engine import Engine
    from headrace.records import Episode, Rollout
    from headrace.run.work import PendingGroup
    from headrace.sync import Lineage


@dataclass(frozen=True)
class UnfinishedGroup:
    """One group in flight."""

    number: int
    episodes: tuple[Episode, ...]
    """That have ended; without an outcome while their score was awaited."""
    rollouts: tuple[Rollout, ...]
    """Half drawn, of episodes that have not."""

    @property
    def num_sampled(self) -> int:
        """Tokens drawn for it."""
        rollouts = [*self.rollouts, *(rollout for episode in self.episodes for rollout in episode.rollouts)]
        return sum(rollout.num_sampled for rollout in rollouts)

    def entry(self) -> dict[str, Any]:
        """As the wire takes it."""
        return {"number": self.number, "episodes": list(self.episodes), "rollouts": list(self.rollouts)}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> UnfinishedGroup:
        return cls(entry["number"], tuple(entry["episodes"]), tuple(entry["rollouts"]))

    def as_of(self, version: int, *, lineage: Lineage, max_lag: int | None) -> UnfinishedGroup:
        """What of it the life that begins from `version` may go on with. Of a rollout with tokens of dead weights the part
        before them is left; what is too old for any batch to come would be rejected, and is begun anew instead."""
        alive = [still_history(rollout, lineage) for rollout in self.rollouts]

        def is_young(rollout: Rollout) -> bool:
            return max_lag is None or not is_over_age(rollout.oldest_version, next_version=version, max_lag=max_lag)

        return UnfinishedGroup(
            self.number,
            tuple(e for e in self.episodes if not too_old([e], version=version, max_lag=max_lag, lineage=lineage)),
            tuple(rollout for rollout in alive if rollout is not None and is_young(rollout)),
        )


class Flight:
    """Which episodes are under way and how far each has come. `Run` says which groups are pending; this says of what."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unscored: dict[str, Episode] = {}
        """Episodes that have ended and are not collected yet."""
        self.partials: dict[str, Rollout] = {}
        """Half-finished rollouts whose next generate call is still to be made: interrupted, or from a checkpoint."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.is_over = False
        """The tasks have ended, or are about to."""
        self._left: dict[str, Rollout] = {}
        """What was half drawn then."""

    def begin(self, episode: str, task: asyncio.Task[None]) -> None:
        """An episode is run by this task."""
        self._tasks[episode] = task
        task.add_done_callback(lambda _: self._tasks.pop(episode) if self._tasks.get(episode) is task else None)

    def finish(self, episode: Episode) -> None:
        """One has ended; it is to be scored."""
        self.partials.pop(episode.id, None)
        self.unscored[episode.id] = episode

    def cancel(self, episodes: Iterable[str]) -> None:
        """Nobody wants these any more: their tasks end, and with them their generate calls."""
        for episode in episodes:
            self.partials.pop(episode, None)
            self.unscored.pop(episode, None)
            task = self._tasks.pop(episode, None)
            if task is not None:
                task.cancel()

    async def over_age(self, pending: Mapping[str, PendingGroup], *, next_version: int, max_lag: int) -> dict[str, int]:
        """The groups that would be rejected whenever they ended, and how many of their tokens nobody has collected.

        An episode that has ended counts if it is scored or may yet be, one in flight by the tokens it is known to hold.
        What is not known to be too old is not in it.
        """
        drawn = {r.id: (r.group, r.oldest_version, r.num_sampled) for r in self._rollouts_here()}
        for call in await self._engine.in_flight():
            if call.oldest is not None:
                earlier = call.rollout.num_sampled if call.rollout.calls else 0
                drawn[call.rollout.id] = (call.rollout.group, call.oldest, earlier + call.num_drawn)
        oldest = {group: each.oldest for group, each in pending.items()}
        tokens: Counter[str] = Counter()
        for group, version, count in drawn.values():
            if group in oldest:
                known = oldest[group]
                oldest[group] = version if known is None else min(known, version)
                tokens[group] += count
        return {
            group: tokens[group]
            for group, first in oldest.items()
            if first is not None and is_over_age(first, next_version=next_version, max_lag=max_lag)
        }

    def _rollouts_here(self) -> Iterator[Rollout]:
        """Those with tokens that no engine has and nobody has collected."""
        yield from self.partials.values()
        for episode in self.unscored.values():
            if episode.outcome is None:
                yield from (rollout for rollout in episode.rollouts if rollout.num_sampled)

    async def unfinished(self, pending: Mapping[str, PendingGroup]) -> list[UnfinishedGroup]:
        """The pending groups for a checkpoint: what is half drawn of them, or was when the tasks were about to end."""
        rollouts = self._left if self.is_over else await self._half_drawn()
        ended: dict[str, list[Episode]] = {group: list(each.episodes) for group, each in pending.items()}
        drawn: dict[str, list[Rollout]] = {group: [] for group in pending}
        for episode in self.unscored.values():
            if episode.outcome is None:  # one that the machinery failed is tried again, from its start
                ended[episode.group].append(episode)
        has_ended = {episode.id for episodes in ended.values() for episode in episodes}
        for rollout in rollouts.values():
            if rollout.group in drawn and rollout.episode not in has_ended and is_resumable(rollout):
                drawn[rollout.group].append(rollout)
        return [UnfinishedGroup(each.number, tuple(ended[group]), tuple(drawn[group])) for group, each in pending.items()]

    async def _half_drawn(self) -> dict[str, Rollout]:
        calls = await self._engine.in_flight()
        return self.partials | {call.rollout.id: call.partial() for call in calls if call.oldest is not None}

    async def end(self) -> None:
        """The tasks are about to end, and with them what they have under way: note it. The first call counts."""
        if not self.is_over:
            self._left = await self._half_drawn()
            self.is_over = True

    def forget_calls(self) -> None:
        """The tasks are gone: what is half drawn waits for its call to be made again."""
        self._tasks.clear()
        if self.is_over:
            self.partials = dict(self._left)
