"""One run's state and the moves the loops make on it. The loops decide when; this says what."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.buffer import Group, GroupBuffer
from headrace.envs import EngineClient
from headrace.observe import Signal
from headrace.partial import interrupt_of
from headrace.records import Episode, InfraAbort, Invalid, Sampling, Scored
from headrace.run.batches import columns_first, make_batches, with_column, with_token_advantages
from headrace.run.in_flight import Flight
from headrace.run.ledger import Ledger
from headrace.run.skipped_steps import NotFiniteGradient, SkippedSteps
from headrace.run.work import Begun, FinishedEpisodes, PendingGroup, Work
from headrace.settings import ConfigError
from headrace.staleness import Gate, too_old
from headrace.trainer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from headrace.config import Recipe
    from headrace.engine import SleepingEngine
    from headrace.observe import Observer
    from headrace.records import Batch, Plain, WeightUpdate
    from headrace.run.in_flight import UnfinishedGroup
    from headrace.run.roles import Roles
    from headrace.sync import Lineage

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ATTEMPTS = 3
"""How often an episode is begun when the machinery fails it."""


class Stalled(RuntimeError):
    """No token, no score and no version for longer than the deadline."""


class NoProgress(RuntimeError):
    """Groups are dropped one after another and none is trained."""


class Run:
    """Everything the loops share."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        *,
        lineage: Lineage,
        observer: Observer,
        on_trained: Callable[[Begun, list[dict[str, float]]], None],
        after_version: Callable[[], Awaitable[None]],
        rests_at: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.recipe, self.lineage, self.observer = recipe, lineage, observer
        self.roles, around = roles, roles.around
        self.engine, self.trainer, self.scorer = roles.engine, roles.trainer, around.scorer
        self.environment, self.encoder = around.environment, around.encoder
        self.tasks, self.canary = around.tasks, around.canary
        self._on_trained, self.after_version = on_trained, after_version
        self.rests_at = rests_at
        """Whether the trainer must rest when it has made a version: it is evaluated or saved then."""
        self._underway: list[Begun] = []
        self.trainer_timeline, self.scorer_timeline = observer.timeline("trainer"), observer.timeline("scorer")
        self.version = 0
        """Trained."""
        self.held_version = 0
        """Held by every engine: the gate counts from this one."""
        self.publication: asyncio.Task[None] | None = None
        self.canary_difference = 0.0
        self.last_sync: WeightUpdate | None = None
        """What the engines took last."""
        self.failed_syncs = 0
        """Updates that were refused, and sent again."""
        self.leg_end = recipe.steps
        self.is_stopping = False
        self.ledger = Ledger()
        self.gate = Gate(
            depth=recipe.gate_depth,
            groups_per_batch=recipe.groups_per_batch,
            steps=recipe.steps,
            extra=recipe.extra_groups,
        )
        waiting = recipe.batches_waiting
        self.buffer = GroupBuffer(
            batch=recipe.groups_per_batch,
            capacity=None if waiting is None else waiting * recipe.groups_per_batch,
            in_order=recipe.order == "submission",
        )
        self._sampling = Sampling(**dataclasses.asdict(recipe.sampling), stop_ids=roles.stop_ids)
        self._num_places = 2 * recipe.engine.slots * recipe.num_engines
        self._most_pending = max(recipe.groups_per_batch, self._num_places // recipe.train.group_size)
        """Groups in flight at most where no gate bounds them: enough to keep every slot busy."""
        self.submitted_groups = 0
        self.dropped_groups = 0
        self.dropped_in_a_row = 0
        self.skipped = SkippedSteps(limit=recipe.train.max_skipped, observer=observer)
        self.is_whole = True
        """The weights are those of `version`, not of some way to the next."""
        self.progressed_at = time.monotonic()
        self.pending: dict[str, PendingGroup] = {}
        self.room = Signal()
        self._group_done = Signal()
        self.work: asyncio.Queue[Work] = asyncio.Queue()
        self.places = asyncio.Semaphore(self._num_places)
        self.finished = FinishedEpisodes()
        self.flight = Flight(self.engine)
        self.wasted_tokens = 0
        self.scoring = 0
        self._spawned: set[asyncio.Task[Any]] = set()
        self._tasks: asyncio.TaskGroup | None = None

    # Tasks of this leg

    def attach(self, tasks: asyncio.TaskGroup) -> None:
        """Tasks spawned from now on belong to this group, and their failure is its failure."""
        self._tasks = tasks
        self.flight.is_over = False
        self.note_progress()
        self.places = asyncio.Semaphore(self._num_places)

    def attached(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """A task of this leg."""
        assert self._tasks is not None
        task = self._tasks.create_task(self.noted(coroutine))
        task.add_done_callback(lambda _: coroutine.close())  # a task that is cancelled at once has not begun it
        return task

    def spawn(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = self.attached(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def noted(self, coroutine: Coroutine[None, None, T]) -> T:
        """What the coroutine returns. If it fails, what is in flight is noted before the other tasks hear of it and end."""
        try:
            return await coroutine
        except Exception:
            with contextlib.suppress(Exception):  # the engine itself may be what failed: then nothing half drawn is kept
                await self.flight.end()
            raise

    async def published(self) -> None:
        """Every engine holds the newest version that was trained."""
        if self.publication is not None:
            await self.publication
            self.publication = None

    def cancel_spawned(self) -> None:
        for task in list(self._spawned):
            task.cancel()

    def stop(self) -> None:
        """Asked to end early: `train` returns at its next look."""
        self.is_stopping = True
        self.buffer.ready.set()

    def forget_in_flight(self) -> None:
        """The leg's tasks are gone: what they held goes on, from what was noted of it, if the run does."""
        self.work = asyncio.Queue()
        self.scoring = 0
        self.publication = None
        self.flight.forget_calls()
        self._queue_again()

    def waiting_tokens(self) -> int:
        """Sampled tokens in the buffer."""
        rollouts = (r for group in self.buffer.groups() for episode in group.episodes for r in episode.rollouts)
        return sum(rollout.num_sampled for rollout in rollouts)

    async def drained(self) -> None:
        """Nothing is in flight any more. Woken by every group that is complete."""
        while self.pending:
            self._group_done.clear()
            await self._group_done.wait()

    def note_progress(self) -> None:
        """Something moved; the deadline counts from now."""
        self.progressed_at = time.monotonic()

    async def watch(self) -> None:
        """Fails the run when nothing has moved for `deadline` seconds, naming what is waited for.

        Wakes by the clock. A long computation in this thread is no wait: whoever makes one notes progress when it is done.
        """
        deadline, seen = self.recipe.deadline, (-1, -1, -1)
        while True:
            await asyncio.sleep(min(deadline / 4, 5.0))
            state = await self.engine.state()
            before, seen = seen, (state.tokens, self.trainer.num_passes, self.scorer.num_calls)
            if seen != before:
                self.note_progress()
            late = time.monotonic() - self.progressed_at
            if late > deadline:
                raise Stalled(
                    f"nothing has moved for {late:.0f} s (deadline = {deadline:g}): {len(self.pending)} groups in flight, "
                    f"{state.running} rollouts decoding and {state.waiting} queued, {self.scoring} being scored, "
                    f"{len(self.buffer)} groups waiting of {self.recipe.groups_per_batch} a batch takes"
                    f"{self.roles.describe()}"
                )

    # feed

    def may_submit(self) -> bool:
        is_open = self.gate.is_open(version=self.held_version, submitted=self.submitted_groups, dropped=self.dropped_groups)
        has_room = not self.buffer.is_full and (self.recipe.gate_depth is not None or len(self.pending) < self._most_pending)
        return is_open and has_room and self.version < self.leg_end and not self.is_stopping

    def submit(self, task: dict[str, Plain]) -> None:
        group = f"g{self.submitted_groups}"
        works = [Work(task, group, self.submitted_groups, index) for index in range(self.recipe.train.group_size)]
        self.pending[group] = PendingGroup(self.submitted_groups, task)
        self.submitted_groups += 1
        self.ledger.submit(work.episode for work in works)
        for work in works:
            self.work.put_nowait(work)

    def take_up(self, groups: list[UnfinishedGroup]) -> None:
        """Go on with the groups that were in flight when a checkpoint was written, and are `pending` again."""
        staleness = self.recipe.staleness
        for saved in groups:
            group = saved.as_of(self.version, lineage=self.lineage, max_lag=staleness.max_lag if staleness.reject else None)
            self.wasted_tokens += saved.num_sampled - group.num_sampled
            for episode in group.episodes:
                if episode.outcome is None:
                    self.flight.unscored[episode.id] = episode
                else:
                    self.pending[episode.group].episodes.append(episode)
            self.flight.partials |= {rollout.id: rollout for rollout in group.rollouts}
        self._queue_again()

    def _queue_again(self) -> None:
        """Queue what is pending and has not ended, what is half drawn first; ids, and so random numbers, are the same."""
        self.finished, flight = FinishedEpisodes(), self.flight
        for episode in flight.unscored.values():
            self.finished.put(episode)
        size = self.recipe.train.group_size
        works = [Work(p.task, group, p.number, index) for group, p in self.pending.items() for index in range(size)]
        ended = flight.unscored.keys() | {episode.id for pending in self.pending.values() for episode in pending.episodes}
        for work in sorted(works, key=lambda work: work.episode not in flight.partials):
            if work.episode not in ended:
                self.work.put_nowait(work)

    # generate

    def client(self, work: Work) -> EngineClient:
        return EngineClient(
            self.engine,
            self.encoder,
            episode=work.episode,
            group=work.group,
            index=work.index,
            sampling=self._sampling,
            seed=self.recipe.seed,
            partials=self.flight.partials,
        )

    def is_wanted(self, group: str) -> bool:
        """Whether a group is in flight; one that was cancelled is not, though parts of it may still be on their way."""
        return group in self.pending

    def begin_episode(self, work: Work, episode: Coroutine[None, None, None]) -> None:
        """Run one in a task of its own, in the place that was taken for it."""
        places, task = self.places, self.spawn(episode)
        task.add_done_callback(lambda _: places.release())  # not in the coroutine: one cancelled at once never begins
        self.flight.begin(work.episode, task)

    def finish(self, episode: Episode) -> None:
        """An episode has ended; it is to be scored."""
        kind = self.recipe.train.advantage
        if kind != "gae" and any(rollout.step_rewards for rollout in episode.rollouts):
            raise ConfigError(
                f"train.advantage = '{kind}': episode {episode.id!r} has step_rewards, which only 'gae' looks at; set it to "
                f"'gae' and train.loss to 'ppo', or have the environment leave them out"
            )
        if self.is_wanted(episode.group):
            self.flight.finish(episode)
            self.finished.put(episode)
        self.note_progress()

    # score

    def try_again(self, episode: Episode) -> bool:
        """Queue a failed episode once more, while attempts last."""
        if episode.attempts >= MAX_ATTEMPTS:
            return False
        self.wasted_tokens += sum(rollout.num_sampled for rollout in episode.rollouts)
        self.flight.unscored.pop(episode.id, None)
        pending = self.pending[episode.group]
        index = int(episode.id.rpartition("/")[2])
        self.work.put_nowait(Work(pending.task, episode.group, pending.number, index, episode.attempts + 1))
        return True

    def collect(self, episode: Episode) -> Group | None:
        """The episode's group, once it is whole and can be trained."""
        pending = self.pending[episode.group]
        self.flight.unscored.pop(episode.id, None)
        pending.episodes.append(episode)
        if len(pending.episodes) < self.recipe.train.group_size:
            return None
        del self.pending[episode.group]
        self.room.set()
        self._group_done.set()
        order = sorted(pending.episodes, key=lambda member: int(member.id.rpartition("/")[2]))
        scored = tuple(member for member in order if isinstance(member.outcome, Scored))
        for member in order:
            self._settle_unscored(member)
        if len(scored) >= self.recipe.train.fewest_siblings:
            self.ledger.buffer(member.id for member in scored)
            return Group(number=pending.number, episodes=scored)
        self.ledger.settle((member.id for member in scored), "filtered", "fewer than two siblings were scored")
        reason = next((member.outcome.reason for member in order if isinstance(member.outcome, Invalid | InfraAbort)), "")
        self._drop(pending.number, order)
        self.dropped_in_a_row += 1
        limit = max(64, 4 * self.recipe.groups_per_batch)
        if self.dropped_in_a_row >= limit:
            raise NoProgress(f"{limit} groups in a row could not be trained; the last because: {reason}")
        return None

    def _settle_unscored(self, episode: Episode) -> None:
        if isinstance(episode.outcome, Invalid | InfraAbort):
            state = "filtered" if isinstance(episode.outcome, Invalid) else "failed"
            log.warning("%s is %s: %s", episode.id, state, episode.outcome.reason)
            self.ledger.settle([episode.id], state, episode.outcome.reason)

    def _drop(self, number: int, episodes: list[Episode]) -> None:
        self.buffer.skip(number)
        self.dropped_groups += 1
        self.wasted_tokens += sum(rollout.num_sampled for episode in episodes for rollout in episode.rollouts)
        self.room.set()

    # train

    def reject_stale(self, version: int) -> None:
        """Take out of the buffer what is too old for the version about to be trained."""
        staleness = self.recipe.staleness
        max_lag = staleness.max_lag if staleness.reject else None
        for group in self.buffer.groups():
            if group.is_within(self.lineage.id, oldest=None if max_lag is None else version - max_lag):
                continue
            reason = too_old(group.episodes, version=version, max_lag=max_lag, lineage=self.lineage)
            if reason is not None:
                self.ledger.settle(group.ids, "rejected", reason)
                self._drop(group.number, list(group.episodes))

    async def leave_unfinished(self, version: int) -> None:
        """The batch of `version` has been taken: do with what is not in it as `partial` says. In a synchronous run that has
        more in flight, generation stops here, if it has not already, and goes on in `go_on`."""
        if self.recipe.stops_when_whole and self.recipe.engine.sleep == "never":
            await self._stand_still()
        if self.recipe.partial.cancel == "over_age" and version + 1 < self.recipe.steps:
            max_lag = self.recipe.staleness.max_lag
            for group, tokens in (await self.flight.over_age(self.pending, next_version=version + 1, max_lag=max_lag)).items():
                self._cancel(group, tokens)

    async def make_room(self) -> None:
        """A batch is whole and the trainer is about to be asked: with `engine.sleep` the engines stop here and give their
        memory back. They take it again in `publish`, when the trainer is done, and go on in `go_on`."""
        if self.recipe.engine.sleep != "never":
            await self._stand_still()
            await self._sleeper.sleep(weights=self.recipe.engine.sleep == "weights")

    async def wake_engines(self) -> None:
        """New weights lie ready: the engines need their memory to load them."""
        if self.recipe.engine.sleep != "never":
            await self._sleeper.wake()

    @property
    def _sleeper(self) -> SleepingEngine:
        return cast("SleepingEngine", self.engine)  # every engine that `engine.sleep` may be set for

    async def _stand_still(self) -> None:
        await self.engine.pause(interrupt_of(self.recipe.partial.interrupt, kv=self.recipe.partial.kv))

    async def go_on(self) -> None:
        """The next version is published: where generation was stopped it goes on, the unfinished first."""
        if self.recipe.takes_turns:
            await self.published()
            await self.engine.resume()

    def _cancel(self, group: str, tokens: int) -> None:
        """Its slots are free, the books say why, and another may be submitted. `tokens`: drawn and not collected."""
        pending = self.pending.pop(group)
        ids = [f"{group}/{index}" for index in range(self.recipe.train.group_size)]
        self.flight.cancel(ids)
        self.ledger.settle(ids, "rejected", "lag, cancelled in flight")
        self.wasted_tokens += tokens
        self._drop(pending.number, pending.episodes)
        self._group_done.set()

    async def begin(self, version: int) -> Begun:
        """Take a batch out of the buffer and ask the trainer for its steps; it has been asked when this returns."""
        begun = Begun(version, self.buffer.take(), steps_before=self.trainer.num_steps)
        self._underway.append(begun)
        self.room.set()
        begun.batches = await self._batches(begun.groups, version)
        rate = learning_rate(self.recipe.train, version=version, steps=self.recipe.steps)
        begun.steps = [self.trainer.step(batch, learning_rate=rate) for batch in begun.batches]
        if not self.trainer.is_here:
            begun.publishing = self.trainer.publish(version + 1)
        return begun

    async def _batches(self, groups: list[Group], version: int) -> list[Batch]:
        """The groups as one batch per optimizer step. What must be known of the policy at the start of the version, before its
        weights move or to make advantages of it, is asked for now; otherwise the one forward pass of a step serves."""
        batches = make_batches(groups, self.recipe, version=version)
        for name in columns_first(batches, self.recipe):
            batches = [with_column(batch, name, await self.trainer.forward(batch, column=name)) for batch in batches]
        return with_token_advantages(batches, self.recipe)

    def may_run_ahead(self, version: int) -> bool:
        """Whether a version may begin before the one before it has ended: not where the trainer must rest in between."""
        is_in_turn = self.trainer.is_here or self.recipe.takes_turns
        return not is_in_turn and version < self.leg_end and not self.rests_at(version)

    @contextlib.contextmanager
    def settled_on_failure(self) -> Iterator[None]:
        """Groups taken to be trained wait again if training them fails, so that a checkpoint made then is complete. Steps that
        another process was asked for are not taken back, unless it was they that failed: `finish_underway` waits for them."""
        try:
            yield
        except BaseException as error:
            is_elsewhere = isinstance(error, asyncio.CancelledError | NotFiniteGradient) and not self.trainer.is_here
            self._put_back(is_asked_kept=is_elsewhere)
            raise

    async def finish_underway(self) -> None:
        """After a failure elsewhere: what the trainer was asked for is trained, and counts."""
        await self.trainer.abandon()
        try:
            async with asyncio.timeout(self.recipe.deadline):
                while self._underway:
                    begun = self._underway[0]
                    seen = [await step for step in begun.steps]
                    self.version += 1
                    self.settle_trained(begun, seen)
        except BaseException:
            self._put_back()
            raise

    def _put_back(self, *, is_asked_kept: bool = False) -> None:
        """Newest first, so that they wait in the order they did."""
        kept = [begun for begun in self._underway if begun.steps] if is_asked_kept else []
        returned = [begun for begun in self._underway if begun not in kept]
        for begun in reversed(returned):
            self.buffer.put_back(begun.groups)
        if returned:
            self.is_whole = self.trainer.num_steps == returned[0].steps_before
        self._underway = kept

    def settle_trained(self, begun: Begun, seen: list[dict[str, float]]) -> None:
        """A version is trained; whatever happens now, it was."""
        self.dropped_in_a_row = 0
        self.note_progress()
        self._underway.remove(begun)
        for group in begun.groups:
            self.ledger.settle(group.ids, "trained")
        ahead = sum(len(group.episodes) for other in self._underway for group in other.groups)
        self.ledger.check(buffered=self.buffer.num_episodes + ahead)
        self.skipped.note(begun, seen)
        self._on_trained(begun, seen)
