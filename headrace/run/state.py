"""What the loops share: the policies, the queues and signals between loops, and the tasks of the current leg."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.algorithms import ADVANTAGES
from headrace.envs import CallLimit, EngineClient
from headrace.observe import Signal
from headrace.partial import engines_take_turns, pauses_unfinished
from headrace.records import Sampling
from headrace.run.policy import PolicyState, max_generate_calls
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from headrace.config import Recipe
    from headrace.engine import SleepingEngine
    from headrace.observe import Observer
    from headrace.partial import Interrupt
    from headrace.records import Episode, Plain
    from headrace.run.in_flight import EpisodeInFlight
    from headrace.run.roles import Roles
    from headrace.run.work import StartedBatch
    from headrace.sync import Lineage

T = TypeVar("T")


class Stalled(RuntimeError):
    """No token, score or training step for longer than `deadline`."""


class Run:
    """State shared by the loops; per-policy state is in `policies`."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        *,
        lineage: Lineage,
        observer: Observer,
        on_trained: Callable[[PolicyState, StartedBatch, list[dict[str, float]]], None],
        after_version: Callable[[PolicyState], Awaitable[None]],
        rests_at: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`on_trained` gets the metrics of a version's steps; `after_version` is called once it is being published. Training
        does not run ahead of a version that is evaluated or saved (`rests_at`)."""
        self.recipe, self.roles, self.observer = recipe, roles, observer
        self.on_trained, self.after_version, self.rests_at = on_trained, after_version, rests_at
        self.room = Signal()
        """Wakes `feed`: a group or a batch may have made room."""
        self.queued: asyncio.Queue[EpisodeInFlight] = asyncio.Queue()
        """Episodes for `generate` to start."""
        self.finished: list[tuple[EpisodeInFlight, Episode]] = []
        """Ended episodes for `score`, which takes all of them at once."""
        self.has_finished = Signal()
        self.generate_calls = CallLimit(max_generate_calls(recipe))
        """Bounds concurrent generate calls; an episode that awaits a tool holds none."""
        self.policies = {
            name: PolicyState(name, recipe, roles, lineage=lineage, observer=observer, room=self.room)
            for name in roles.trainers
        }
        self.leg_end = recipe.steps
        """The version at which `train` returns."""
        self.is_stopping = False
        self.num_scoring = 0
        self.progressed_at = time.monotonic()
        self._sampling = Sampling(**dataclasses.asdict(recipe.sampling), stop_ids=roles.stop_ids)
        self._task_group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # Tasks of the current leg

    def start_leg(self, tasks: asyncio.TaskGroup) -> None:
        """Spawn into `tasks` from now on (one failure cancels all), and queue again what is in flight."""
        self._task_group = tasks
        self.queued, self.finished, self.num_scoring = asyncio.Queue(), [], 0
        for policy in self.policies.values():
            policy.publication = None
            queued, ended = policy.in_flight.reopen()
            for record in queued:
                self.queued.put_nowait(record)
            self.finished += ended
        if self.finished:
            self.has_finished.set()
        self.note_progress()

    async def end_leg(self) -> None:
        """Cancel the leg's tasks, keeping what is in flight for the next leg or a checkpoint."""
        for policy in self.policies.values():
            await policy.in_flight.close()
        for task in list(self._tasks):
            task.cancel()

    def spawn(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of this leg."""
        assert self._task_group is not None
        task = self._task_group.create_task(self._keeping_in_flight(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: coroutine.close())  # it never ran if the task was cancelled before it started
        return task

    async def _keeping_in_flight(self, coroutine: Coroutine[None, None, T]) -> T:
        """On failure, save what is in flight before the task group cancels the other tasks."""
        try:
            return await coroutine
        except Exception:
            with contextlib.suppress(Exception):  # if the engine itself failed, partial rollouts are lost
                for policy in self.policies.values():
                    await policy.in_flight.close()
            raise

    def stop(self) -> None:
        """End early: wakes `train`, which returns at its next check."""
        self.is_stopping = True
        for policy in self.policies.values():
            policy.buffer.ready.set()

    async def drained(self) -> None:
        """Wait until nothing is in flight. Woken by each completed or dropped group."""
        while any(map(len, (policy.in_flight for policy in self.policies.values()))):
            self.room.clear()
            await self.room.wait()

    def note_progress(self) -> None:
        """Restart the deadline that `watch` enforces."""
        self.progressed_at = time.monotonic()

    async def watch(self) -> None:
        """Fail the run when nothing has moved for `deadline` seconds, and say what it waits for. Woken by a timer."""
        deadline, seen, policies = self.recipe.deadline, (-1, -1, -1), self.policies.values()
        while True:
            await asyncio.sleep(min(deadline / 4, 5.0))
            state = await self.roles.engine.state()
            passes = sum(policy.trainer.num_passes for policy in policies)
            before, seen = seen, (state.tokens, passes, self.roles.scorer.num_calls)
            if seen != before:
                self.note_progress()
            late = time.monotonic() - self.progressed_at
            if late > deadline:
                raise Stalled(
                    f"nothing has moved for {late:.0f} s (deadline = {deadline:g}): "
                    f"{sum(len(policy.in_flight) for policy in policies)} groups in flight, {state.running} rollouts decoding "
                    f"and {state.waiting} queued, {self.num_scoring} being scored, {sum(len(p.buffer) for p in policies)} "
                    f"groups waiting of {self.recipe.train.groups_per_batch} a batch takes{self.roles.describe()}"
                )

    # Called by feed, generate and score

    def may_submit(self, policy: PolicyState) -> bool:
        return policy.version < self.leg_end and not self.is_stopping and policy.has_room()

    def submit(self, policy: PolicyState, task: dict[str, Plain]) -> None:
        for record in policy.submit(task):
            self.queued.put_nowait(record)

    def client(self, record: EpisodeInFlight) -> EngineClient:
        return EngineClient(
            self.roles.engine,
            self.roles.encoder,
            policy=record.group.policy,
            episode=record.id,
            group=record.group.name,
            index=record.index,
            sampling=self._sampling,
            seed=self.recipe.seed,
            partials=record.partials,
            limit=self.generate_calls,
        )

    def finish(self, record: EpisodeInFlight, episode: Episode) -> None:
        """Hand an ended episode to `score`."""
        kind = self.recipe.train.advantage
        if not ADVANTAGES[kind].learns_values and any(rollout.step_rewards for rollout in episode.rollouts):
            raise ConfigError(
                f"train.advantage = '{kind}': episode {episode.id!r} has step_rewards, which only 'gae' looks at; set it to "
                f"'gae' and train.loss to 'ppo', or have the environment leave them out"
            )
        if episode.outcome is None:  # a failed one runs again if the leg ends before `score` sees it
            record.ended = episode
        self.finished.append((record, episode))
        self.has_finished.set()
        self.note_progress()

    def collect(self, record: EpisodeInFlight, episode: Episode) -> None:
        """Retry an episode that has an outcome, or add it to its group."""
        policy = self.policies[record.group.policy]
        if record.group.is_cancelled:
            return
        if policy.is_retried(record, episode):
            self.queued.put_nowait(record)
        else:
            policy.collect(record, episode)

    # Called by train

    def may_run_ahead(self, policy: PolicyState, version: int) -> bool:
        """Whether `version` may start while the previous one still trains."""
        is_in_turn = policy.trainer.is_inline or engines_take_turns(self.recipe)
        return not is_in_turn and version < self.leg_end and not self.rests_at(version)

    def settle_trained(self, policy: PolicyState, started: StartedBatch, seen: list[dict[str, float]]) -> None:
        policy.settle_trained(started, seen)
        self.note_progress()
        self.on_trained(policy, started, seen)

    async def finish_started(self, policy: PolicyState) -> None:
        """After a failure elsewhere: wait for the steps already sent to the trainer's process, and count them."""
        await policy.trainer.abandon()
        try:
            async with asyncio.timeout(self.recipe.deadline):
                while policy.started:
                    started = policy.started[0]
                    self.settle_trained(policy, started, [await step for step in started.steps])
        except BaseException:
            policy.return_groups()
            raise

    # Pausing the engines while a batch is trained

    @property
    def interrupt(self) -> Interrupt:
        """What a pause or update does to rollouts in flight."""
        return self.recipe.partial.pausing

    @property
    def _sleeper(self) -> SleepingEngine | None:
        """The engine, if `engine.sleep` lends its memory to the trainer."""
        return cast("SleepingEngine", self.roles.engine) if self.recipe.engine.sleeps else None

    async def sleep_engines(self) -> None:
        """A batch is ready: with `engine.sleep`, pause the engines and free their memory for the trainer."""
        if self._sleeper is not None:
            await self._sleeper.pause(self.interrupt)
            await self._sleeper.sleep(weights=self.recipe.engine.gives_back_weights)

    async def stop_generation(self) -> None:
        """A batch was taken: in a synchronous run that samples more than a batch, pause the rest until the next version."""
        if pauses_unfinished(self.recipe) and self._sleeper is None:
            await self.roles.engine.pause(self.interrupt)

    async def wake_engines(self) -> None:
        """Give sleeping engines their memory back, so that they can load new weights."""
        if self._sleeper is not None:
            await self._sleeper.wake()

    async def resume_generation(self, policy: PolicyState) -> None:
        """Resume paused engines once they hold the version being published."""
        if engines_take_turns(self.recipe):
            await policy.published()
            await self.roles.engine.resume()
