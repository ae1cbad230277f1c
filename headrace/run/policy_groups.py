"""The groups of one policy, from submission until they are taken for training or dropped."""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING

from headrace.algorithms import unwanted
from headrace.buffer import Entry, Group, buffer_capacity, make_buffer, num_sampled, open_journal, units_per_group
from headrace.envs import can_resume
from headrace.records import InfraAbort, Invalid, Scored
from headrace.run.in_flight import EpisodeInFlight, GroupInFlight, InFlightTable
from headrace.run.ledger import Ledger
from headrace.run.pace import Pace
from headrace.run.recovered import RecoveredGroups
from headrace.run.retries import Retries
from headrace.staleness import LengthBias, Rejection, groups_ahead, is_automatic, make_gate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.buffer import Place
    from headrace.config import Recipe
    from headrace.observe import Observer, Signal
    from headrace.records import Episode
    from headrace.run.batches import StartedBatch
    from headrace.run.state import Roles
    from headrace.sync import Lineage
    from headrace.tasks import Task

log = logging.getLogger(__name__)
POLICY = "policy"
"""The policy's name in a run with a single policy."""
MAX_ATTEMPTS = 3
"""Runs of an episode before an infrastructure failure counts as failed."""


class NoProgress(RuntimeError):
    """Group after group is dropped and none is trained."""


class PolicyGroups:
    """Decides when another group may be submitted, and what becomes of those that are complete."""

    def __init__(self, name: str, recipe: Recipe, roles: Roles, *, lineage: Lineage, observer: Observer, room: Signal) -> None:
        """`room` wakes `feed` when it may be able to submit again."""
        self.name, self.recipe, self.lineage = name, recipe, lineage
        self._room, self._tasks = room, roles.tasks
        self.version = 0
        """The newest trained version."""
        self.held_version = 0
        """The newest version held by every engine; the gate counts from it."""
        self.started: list[StartedBatch] = []
        """Batches in training, oldest first."""
        self._num_engines = recipe.engine.num_engines
        """Whose slots bound what is in flight: more than the recipe has may have joined."""
        self.gate = make_gate(recipe)
        self._shares_device = roles.shares_device
        self.pace = Pace(recipe, shares_device=roles.shares_device) if is_automatic(recipe) else None
        """Moves the gate's depth, with `staleness.max_lag = "auto"`."""
        self._units = units_per_group(recipe)
        self.in_flight = InFlightTable(roles.engine, keeps_turns=can_resume(roles.environment), units=self._units)
        self.buffer = make_buffer(
            recipe,
            waits_for=self._waits_for,
            num_in_flight=lambda: self.in_flight.num_units,
            slots=self._gate_slots,
            journal=open_journal(recipe, observer.folder, say=observer.screen.say),
            on_room=room.set,
        )
        self.recovered = RecoveredGroups(self.buffer.journal)
        self.ledger = Ledger(self._count_open)
        self.submitted_groups = 0
        self._num_dropped = 0
        """Groups, or with `buffer.unit = "episode"` episodes, that will never be trained."""
        self._dropped_in_a_row = 0
        self.retries = Retries()
        self.lengths = LengthBias()
        self.filtered: list[float] = []
        """Mean rewards of the groups that `[filter]` dropped since the last batch was taken."""
        self.num_retried = 0
        """Times that an episode was run again since this process started."""
        self.wasted_tokens = 0
        """Sampled tokens that will never be trained."""

    def _count_open(self) -> tuple[int, int]:
        """Rollouts buffered, including those in training, and in flight."""
        in_training = sum(group.num_episodes for started in self.started for group in started.groups)
        return self.buffer.num_episodes + in_training, sum(len(group.episodes) for group in self.in_flight.groups.values())

    @property
    def unfinished(self) -> StartedBatch | None:
        """The batch of which parts are still to leave the buffer, if there is one."""
        return self.started[-1] if self.started and self.started[-1].left else None

    @property
    def is_trainer_idle(self) -> bool:
        """The trainer has nothing to do until groups are complete."""
        return not self.started or self.started[-1].is_waiting

    @property
    def rejection(self) -> Rejection:
        """Which groups are too old."""
        return Rejection.of(self.recipe)

    @property
    def dropped_groups(self) -> int:
        """Groups that will never be trained. Episodes lost one by one are rounded up to groups, or a batch might stay short."""
        return -(-self._num_dropped // self._units)

    def _waits_for(self) -> int | None:
        """Number of the oldest group in flight or, with `staleness.rejected = "wait"`, of the first that must be complete
        before the next batch is taken, or its next part. If that left those in flight behind, a batch of them would be trained
        at the version after it at the earliest, the next one version later, and so on; the first of a batch has held the oldest
        version."""
        if not self.recipe.staleness.waits:
            return self.in_flight.oldest
        following, max_lag = self.version + len(self.started) + (self.unfinished is None), self.rejection.max_lag
        groups = itertools.islice(self.in_flight.groups.values(), 0, None, self.recipe.train.groups_per_batch)
        late = (group.number for at, group in enumerate(groups, following) if at - group.held_version > max_lag)
        return next(late, None)

    def _gate_slots(self) -> int | None:
        """Groups that the gate lets be submitted and untrained at the moment, less `partial.oversample`'s; None: no gate."""
        depth = self.gate.depth
        return None if depth is None else groups_ahead(depth + 1, self.recipe.train.groups_per_batch)

    def use(self, recipe: Recipe) -> None:
        """Settings have changed. In exact mode the gate, which lets groups in ahead of training, is renewed for each leg. With
        a smaller lag it stays closed until enough of what is ahead has been trained or rejected."""
        self.recipe, self.buffer.capacity = recipe, buffer_capacity(recipe, slots=self._gate_slots)
        if not recipe.exact:
            self.renew_gate()

    def count_engines(self, num_engines: int) -> None:
        """Engines have joined or left: where only their slots bound what is in flight, the bound follows."""
        if self.pace is not None:
            self.pace.slots = self.recipe.engine.slots * num_engines
        if num_engines != self._num_engines:
            self._num_engines = num_engines
            if not self.gate.bounds_in_flight:
                self.renew_gate()

    @property
    def _max_in_flight(self) -> float:
        """Limit on groups in flight where no gate sets one: those that wait for their last episode or for a slow reward."""
        train, calls = self.recipe.train, max_generate_calls(self.recipe, self._num_engines)
        return math.inf if self.gate.bounds_in_flight else 4 * max(train.groups_per_batch, calls // train.group_size)

    def renew_gate(self) -> None:
        """By the recipe, or to the depth that the controller has chosen."""
        if not is_automatic(self.recipe):
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(self.recipe, shares_device=self._shares_device)
        depth = None if self.pace is None else self.pace.controller.depth
        self.gate = make_gate(self.recipe, depth=depth, num_engines=self._num_engines)
        self.buffer.update()  # its window follows the gate
        self._room.set()

    # Submitting

    def has_room(self) -> bool:
        """Whether gate and buffer admit another group."""
        if self.buffer.is_full or len(self.in_flight) >= self._max_in_flight:
            return False
        counts = {"submitted": self.submitted_groups, "dropped": self.dropped_groups}
        return self.gate.is_open(version=self.held_version, unfinished=self.in_flight.num_unfinished, **counts)

    @property
    def num_missing(self) -> int:
        """Groups that the next batch lacks, or its next part if they are taken one by one."""
        return max(0, -(-self.buffer.wanted // self._units) - self.buffer.num_available // self._units)

    def next_task(self) -> Task:
        """For the next group: one that was rejected, or another."""
        return self.retries.next_task(self.submitted_groups) or self._tasks.next()

    async def read_ahead(self, number: int | None = None) -> bool:
        """Read what the journal has of this group, or of the next to be submitted; returns whether that took any time."""
        first = (self.submitted_groups if number is None else number) * self._units
        return await self.recovered.read_ahead(first, first + self._units)

    def submit(self, task: Task) -> list[EpisodeInFlight]:
        """Add a new group and return its episodes, but those that the journal has."""
        group = self._add_group(self.submitted_groups, task)
        self.submitted_groups += 1
        self.ledger.submitted += len(group.episodes)
        self._take_recovered(group)
        return [record for record in group.episodes if record.ended is None]

    def _take_recovered(self, group: GroupInFlight) -> None:
        """Collect what the journal has of a group, as if it had been generated and scored now."""
        for place, episodes in self.recovered.take(group, number=self.in_flight.number):
            records = {record.id: record for record in group.episodes}
            for episode in episodes:
                self.collect(records[episode.id], episode, place=place)
            self.recovered.release(place)

    def _add_group(self, number: int, task: Task, *, indexes: Iterable[int] | None = None) -> GroupInFlight:
        name = f"g{number}" if self.name == POLICY else f"{self.name}.g{number}"  # seeds derive from it
        group = GroupInFlight(self.name, name, number, task, held_version=self.held_version)
        self.in_flight.add(group, indexes=range(self.recipe.train.group_size) if indexes is None else indexes)
        return group

    # Collecting

    def is_retried(self, record: EpisodeInFlight, episode: Episode) -> bool:
        """Whether to run the episode again: an infrastructure failure ended it, and attempts are left."""
        if not isinstance(episode.outcome, InfraAbort) or record.attempt >= MAX_ATTEMPTS:
            return False
        self.wasted_tokens += num_sampled([episode])
        self.num_retried += 1
        if self.num_retried == 1:
            log.warning("an episode failed and is run again; later ones are counted as `retried`: %s", episode.outcome.reason)
        record.partials.clear()
        record.attempt += 1
        self.in_flight.end(record, None)
        return True

    def collect(self, record: EpisodeInFlight, episode: Episode, *, place: Place | None = None) -> None:
        """Record an episode's outcome. What is complete goes to the buffer, or is dropped if too few episodes were scored: a
        group or, with `buffer.unit = "episode"`, this episode. `place`: where the journal has it."""
        group, num_before = record.group, self.buffer.num_available // self._units
        self.in_flight.end(record, episode)
        self._room.set()
        ended = [each.ended for each in self.in_flight.leave(record) if each.ended is not None]
        if not ended:
            return
        self._keep_or_drop(record, ended, place=place)
        if self.pace is not None:
            num_arrived = max(0, self.buffer.num_available // self._units - num_before)
            self.pace.completed(submitted_at=group.submitted_at, num_arrived=num_arrived)

    def _keep_or_drop(self, record: EpisodeInFlight, ended: list[Episode], *, place: Place | None) -> None:
        """Put what is complete into the buffer, or drop it if too few of its episodes were scored."""
        group, reason = record.group, self._settle_unscored(ended)
        scored = tuple(member for member in ended if isinstance(member.outcome, Scored))
        complete = Group(self.in_flight.number(record), scored, group.task.source, group.task.index)
        group.rewards += complete.unshaped_rewards
        self.lengths.ended(complete.number, [num_sampled([member]) for member in ended])
        if group.name not in self.in_flight.groups:
            self._tasks.report(group.number, group.task, group.rewards)
        if len(scored) >= self.recipe.train.fewest_siblings:
            if self.recipe.staleness.retries:
                self.retries.keep(complete.number, group.task)
            unscored = tuple(member for member in ended if not isinstance(member.outcome, Scored))
            entry = Entry(complete, group.task_fingerprint, unscored) if self.buffer.journal else None
            self._put(complete, entry=entry, place=place)
            self._dropped_in_a_row = 0
            return
        self.ledger.settle("filtered", len(scored), reason="fewer than two siblings were scored" if scored else "")
        self._drop(complete.number, num_sampled(ended))
        self._filter()
        self._dropped_in_a_row += 1
        # What cannot be trained often fails at once, and is replaced, while better groups are still generated.
        limit = max(64, 4 * self.recipe.train.groups_per_batch, 8 * len(self.in_flight.groups)) * self._units
        if self._dropped_in_a_row >= limit:
            what = "groups" if self._units == 1 else "episodes"
            raise NoProgress(f"{limit} {what} in a row could not be trained; the last because: {reason}")

    def _settle_unscored(self, ended: list[Episode]) -> str:
        """Count the episodes that have no score, and return why the last of them has none."""
        reason = ""
        for member in ended:
            if isinstance(member.outcome, Invalid | InfraAbort):
                state, reason = "filtered" if isinstance(member.outcome, Invalid) else "failed", member.outcome.reason
                log.warning("%s is %s: %s", member.id, state, reason)
                self.ledger.settle(state, reason=reason, id=member.id)
        return reason

    def _put(self, group: Group, *, entry: Entry | None, place: Place | None) -> None:
        self.buffer.put(group, entry=entry, place=place)
        for oldest in self.buffer.overwritten():
            self._reject(oldest, "overwritten")
        self._filter()

    def _filter(self) -> None:
        """Drop what `[filter]` does not want of the groups that may leave now. `feed` submits others in their place. Only those
        are judged: in submission order, what is dropped then does not depend on which group is complete first."""
        settings, batch = self.recipe.filter, self.buffer.batch
        if not settings.is_on:
            return
        taken = self.unfinished.groups if self.unfinished is not None else []
        groups, most = [*taken, *self.buffer.available()], (settings.max_draws - 1) * batch - len(self.filtered)
        for place, reason in unwanted([group.unshaped_rewards for group in groups], settings, batch=batch, most=most).items():
            assert place >= len(taken), "what was taken was judged before"
            group = groups[place]
            self.filtered.append(sum(group.unshaped_rewards) / len(group.unshaped_rewards))
            self.ledger.settle("filtered", group.num_episodes, reason=reason)
            self._drop(group.number, group.num_sampled)

    def _reject(self, group: Group, reason: str) -> None:
        self.ledger.settle("rejected", group.num_episodes, reason=reason)
        if self.recipe.staleness.retries:
            self.retries.add(group.number)
        self._drop(group.number, group.num_sampled)

    def _drop(self, number: int, wasted_tokens: int, *, count: int = 1) -> None:
        self.buffer.drop(number)
        self.lengths.dropped(number)
        self.retries.forget(number)
        self._num_dropped += count
        self.wasted_tokens += wasted_tokens
        self._room.set()

    # Staleness

    def reject_stale(self, version: int) -> None:
        """Remove groups too old to train `version` from the buffer."""
        rejection = self.rejection
        for group in self.buffer.suspects(older_than=rejection.older_than(version)):
            reason = rejection.reason(group, version=version, lineage=self.lineage)
            if reason is not None:
                self._reject(group, reason)
        self._filter()

    def staleness_metrics(self) -> dict[str, float]:
        """How far submission runs ahead, tasks submitted again, and whether long rollouts are trained as often as short."""
        depth = {} if self.gate.depth is None else {"staleness/depth": self.gate.depth}
        resubmitted = {"staleness/resubmitted": self.retries.num_resubmitted} if self.recipe.staleness.retries else {}
        return {**depth, **resubmitted, **self.lengths.metrics()}

    async def cancel_over_age(self, version: int) -> None:
        """With `partial.cancel`, after taking the batch of `version`: cancel groups too old for every later one."""
        if self.recipe.partial.cancels and version + 1 < self.recipe.steps:
            held = None if self.recipe.partial.leases else self.held_version
            over_age = await self.in_flight.over_age(self.rejection, next_version=version + 1, held=held)
            for name, tokens in over_age.items():
                self.cancel(name, tokens)

    def cancel(self, name: str, tokens: int) -> None:
        """Cancel a group in flight for which `tokens` were sampled; another may be submitted in its place."""
        group = self.in_flight.cancel(name)
        self._tasks.report(group.number, group.task, group.rewards)
        self.ledger.settle("rejected", len(group.episodes), reason="lag, cancelled in flight")
        if self.recipe.staleness.retries:
            self.retries.add(group.number, group.task)
        self.lengths.cancelled([tokens // len(group.episodes)] * len(group.episodes))
        first = self.in_flight.number(group.episodes[0])  # none of its numbers is in the buffer
        self._drop(first, tokens, count=1 if self._units == 1 else len(group.episodes))
        self._filter()

    def _lose(self, group: Group) -> None:
        self.ledger.settle("failed", group.num_episodes, reason="its copy on disk, in the journal, is damaged")
        self._drop(group.number, group.num_sampled)


def max_generate_calls(recipe: Recipe, num_engines: int = 0) -> int:
    """Twice the slots of the engines, by default the recipe's, so that the next call is waiting when a slot frees up."""
    return 2 * recipe.engine.slots * (num_engines or recipe.engine.num_engines)
