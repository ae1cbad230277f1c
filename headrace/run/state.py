"""What the loops share: the roles, the policies, the queues and signals between loops, and the tasks of the current leg."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from headrace.algorithms import ADVANTAGES
from headrace.envs import CallLimit, EngineClient, can_resume
from headrace.observe import Signal
from headrace.partial import engines_take_turns
from headrace.records import Sampling
from headrace.run.lending import Lending
from headrace.run.metrics import NotFiniteGradient
from headrace.run.policy import PolicyState
from headrace.run.policy_groups import max_generate_calls
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.engine import Engine, SleepingEngine
    from headrace.envs import Environment, PromptEncoder
    from headrace.observe import Observer
    from headrace.records import Batch, Episode
    from headrace.run.batches import StartedBatch
    from headrace.run.in_flight import EpisodeInFlight
    from headrace.run.lending import Lender
    from headrace.score import Scorer
    from headrace.sync import Lineage
    from headrace.tasks import SampledTasks, TaskStream
    from headrace.trainer import PolicyTrainer

P = ParamSpec("P")
T = TypeVar("T")


async def _nothing(*_: object) -> None:
    """A run in one process has nothing to refresh, and one without callbacks shows its batches to nobody."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The parts that do a run's work. `launch` makes them; the loops do not know which process each is in."""

    engine: Engine
    trainers: Mapping[str, PolicyTrainer]
    """By policy name."""
    scorer: Scorer
    environment: Environment
    encoder: PromptEncoder
    tasks: TaskStream | SampledTasks
    canary: Batch
    """A fixed prompt that trainer and engine both score at every version."""
    stop_ids: tuple[int, ...]
    """Tokens that end a turn: from the tokenizer, the model's generation config and `sampling.stop`."""
    services: tuple[Callable[[], Coroutine[None, None, None]], ...]
    """Coroutines that run beside the loops: an inline engine's loop, or supervision of other processes."""
    describe: Callable[[], str] = str
    """What each process is doing and where its log is, for an error."""
    versions: Callable[[], Mapping[str, int]] = dict
    """The version each engine holds, if there are several."""
    engine_peak: Callable[[], int] = int
    """Peak memory of the engine in bytes; of several, the largest."""
    turns: Callable[[], Mapping[str, int]] = dict
    """Calls so far that continued a rollout: on the engine that generated it last, or on another."""
    refresh: Callable[[], Awaitable[None]] = _nothing
    """Makes every process report how it has spent its time so far."""
    shares_device: bool = False
    """Whether engines and trainers compute on one GPU, or one core."""
    lender: Lender | None = None
    """Of the spare engine on the trainer's device (`engine.lend`), if there is one."""
    losses: Callable[[], Mapping[str, Any]] = dict
    """Which processes were started again how often, and which were given up, for the summary."""

    def with_stop_ids(self, ids: Iterable[int]) -> Roles:
        """A copy in which these tokens end a turn too."""
        return dataclasses.replace(self, stop_ids=tuple({*ids, *self.stop_ids}))

    def num_engines(self, recipe: Recipe) -> int:
        """As many as the recipe has, or as there are if more have joined."""
        return max(recipe.engine.num_engines, len(self.versions()))

    @property
    def trainer(self) -> PolicyTrainer:
        (trainer,) = self.trainers.values()
        return trainer


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
        on_trained: Callable[[PolicyState, StartedBatch], None],
        after_version: Callable[[PolicyState], Awaitable[None]],
        on_taken: Callable[[int, Sequence[Group]], Awaitable[None]] = _nothing,
        rests_at: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`on_taken` is called when groups have left the buffer to train a version, `on_trained` when it is trained,
        `after_version` once it is being published. Training does not run ahead of a version that is evaluated or saved
        (`rests_at`)."""
        self.recipe, self.roles, self.observer = recipe, roles, observer
        self.on_taken, self.on_trained, self.after_version, self.rests_at = on_taken, on_trained, after_version, rests_at
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
        self.lending = None if roles.lender is None else Lending(recipe, roles.lender, on_change=self._count_engines)
        self.leg_end = recipe.steps
        """The version at which `train` returns."""
        self.is_stopping = False
        self.num_scoring = 0
        self._stuck_at: set[str] = set()
        self.progressed_at = time.monotonic()
        self._sampling = Sampling(**dataclasses.asdict(recipe.sampling), stop_ids=roles.stop_ids)
        self._tasks: asyncio.TaskGroup | None = None

    # Tasks of the current leg

    def start_leg(self, tasks: asyncio.TaskGroup) -> None:
        """Spawn into `tasks` from now on (one failure cancels all), and queue again what is in flight."""
        self._tasks = tasks
        self.queued, self.finished, self.num_scoring = asyncio.Queue(), [], 0
        for policy in self.policies.values():
            policy.publication = None
            for record in policy.in_flight.reopen():
                if record.ended is None:
                    self.queued.put_nowait(record)
                elif record.ended.outcome is None:
                    self.finished.append((record, record.ended))
        if self.finished:
            self.has_finished.set()
        self.note_progress()

    def spawn(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[T]:
        """Call an async function in a task of this leg."""
        assert self._tasks is not None
        return self._tasks.create_task(self._keeping_in_flight(function, *args, **kwargs))

    async def _keeping_in_flight(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """On failure, save what is in flight before the task group cancels the other tasks."""
        try:
            return await function(*args, **kwargs)
        except Exception:
            with contextlib.suppress(Exception):  # if the engine itself failed, partial rollouts are lost
                await self.save_in_flight()
            raise

    async def save_in_flight(self) -> None:
        """Before the leg's tasks are cancelled: keep what is in flight for the next leg or a checkpoint."""
        for policy in self.policies.values():
            await policy.in_flight.close()

    def stop(self) -> None:
        """End early: `train` returns once no version's weights are begun."""
        self.is_stopping = True
        self._wake_train()

    def _wake_train(self) -> None:
        """The batch that it waits for, or a part of one, may not be wanted any more."""
        for policy in self.policies.values():
            following = policy.version + len(policy.started) - (policy.unfinished is not None)
            if self.is_over(policy, following):
                policy.buffer.ready.set()

    def is_over(self, policy: PolicyState, version: int) -> bool:
        """Whether `version` is not to be trained in this leg. One of which a step is made is, although the run is to end."""
        unfinished = policy.unfinished
        return (version >= self.leg_end or self.is_stopping) and (unfinished is None or unfinished.may_be_given_up)

    async def drained(self) -> None:
        """Wait until nothing is in flight. Woken by each completed or dropped group."""
        while any(map(len, (policy.in_flight for policy in self.policies.values()))):
            self.room.clear()
            await self.room.wait()

    def use(self, recipe: Recipe) -> None:
        """Settings have changed. In exact mode a leg may end earlier, never later than it would."""
        self.recipe = recipe
        self.leg_end = min(self.leg_end, recipe.steps) if recipe.exact else recipe.steps
        self._sampling = dataclasses.replace(self._sampling, temperature=recipe.sampling.temperature)
        for policy in self.policies.values():
            policy.use(recipe)
        self._wake_train()

    def note_progress(self) -> None:
        """Restart the deadline that `watch` enforces."""
        self.progressed_at = time.monotonic()

    async def watch(self) -> None:
        """Fail the run when nothing has moved for `deadline` seconds, and say what it waits for. Count the engines, because
        more than the recipe has may have joined. Woken by a timer."""
        deadline, seen, policies = self.recipe.deadline, (-1, -1, -1), self.policies.values()
        while True:
            await asyncio.sleep(min(deadline / 4, 5.0))
            self._count_engines()
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

    # Called by generate and score

    def client(self, record: EpisodeInFlight) -> EngineClient:
        return EngineClient(
            engine=self.roles.engine,
            encoder=self.roles.encoder,
            policy=record.group.policy,
            episode=record.id,
            group=record.group.name,
            index=record.index,
            group_size=self.recipe.train.group_size,
            sampling=self._sampling,
            seed=self.recipe.seed,
            partials=record.partials,
            keeps_turns=can_resume(self.roles.environment),
            limit=self.generate_calls,
            on_stuck=self._on_stuck,
            leased=set() if self.recipe.partial.leases else None,
        )

    def _on_stuck(self, message: str) -> None:
        """Say the first at each place: a leg may end with thousands of them."""
        place = message.partition(" left at ")[2]
        if place not in self._stuck_at:
            self._stuck_at.add(place)
            self.observer.screen.say(message)

    def finish(self, record: EpisodeInFlight, episode: Episode) -> None:
        """Hand an ended episode to `score`."""
        kind = self.recipe.train.advantage
        if not ADVANTAGES[kind].uses_step_rewards and any(rollout.step_rewards for rollout in episode.rollouts):
            others = ", ".join(repr(name) for name, traits in ADVANTAGES.items() if traits.uses_step_rewards)
            raise ConfigError(
                f"train.advantage = '{kind}': episode {episode.id!r} has step_rewards, which only {others} look at; set it to "
                f"one of these, or have the environment leave them out"
            )
        if episode.attempts != record.attempt:
            episode = episode.replace(attempts=record.attempt)
        if episode.outcome is None:  # a failed one runs again if the leg ends before `score` sees it
            self.policies[record.group.policy].in_flight.end(record, episode)
            record.partials.clear()
        self.finished.append((record, episode))
        if self.policies[record.group.policy].gate.counts_episodes:
            self.room.set()
        self.has_finished.set()
        self.note_load()
        self.note_progress()

    def note_load(self) -> None:
        """For `max_lag = "auto"` and `engine.lend`: how busy the engines are from now on. Called when an episode ends and when
        `feed` waits."""
        for policy in self.policies.values():
            if policy.pace is not None:
                policy.pace.note_load(calls=self.generate_calls.num_calls, is_closed=not policy.has_room())
            if self.lending is not None and self.lending.is_possible and policy.is_trainer_idle:
                calls, num_engines = self.generate_calls.num_calls, self.roles.num_engines(self.recipe)
                if self.lending.is_worth(missing=policy.num_missing, calls=calls, num_engines=num_engines):
                    self.lending.is_possible = False
                    self.spawn(self.lending.lend)

    # Called by train

    def may_run_ahead(self, policy: PolicyState, version: int) -> bool:
        """Whether `version` may start while the previous one still trains."""
        is_in_turn = policy.trainer.is_inline or engines_take_turns(self.recipe)
        return not is_in_turn and version < self.leg_end and not self.rests_at(version)

    def lend(self, policy: PolicyState) -> None:
        """If the trainer has nothing to do, its device may be lent: now, or at a later `note_load`, if that pays then."""
        is_over = self.is_over(policy, policy.version)  # no batch follows, and nobody would recall it
        if self.lending is not None and policy.is_trainer_idle and not is_over:
            self.lending.trainer_is_idle()
            self.note_load()

    def settle_trained(self, policy: PolicyState, started: StartedBatch) -> None:
        """The next version is trained."""
        policy.settle_trained(started)
        self.note_progress()
        self.on_trained(policy, started)

    def _count_engines(self) -> None:
        num_engines = self.roles.num_engines(self.recipe)
        self.generate_calls.resize(max_generate_calls(self.recipe, num_engines))
        for policy in self.policies.values():
            policy.count_engines(num_engines)

    async def finish_started(self, policy: PolicyState) -> None:
        """After a failure elsewhere: wait for the steps already sent to the trainer's process, and count them."""
        await policy.trainer.abandon()
        try:
            async with asyncio.timeout(self.recipe.deadline):
                while policy.started:
                    started = policy.started[0]
                    await started.make_steps()
                    self.settle_trained(policy, started)
                    with contextlib.suppress(NotFiniteGradient):  # the failure elsewhere is the one to report
                        await policy.skipped.check(started)
        except BaseException:
            policy.return_groups()
            raise

    async def pause_engines(self) -> None:
        """A batch is ready: recall the engine that is lent. In a synchronous run that samples more than a batch, pause the rest
        until the next version. With `engine.sleep`, also give the engines' memory to the trainer."""
        if self.lending is not None:
            await self.lending.recall()
        if engines_take_turns(self.recipe):
            await self.roles.engine.pause(self.recipe.partial.pausing)
        if self.recipe.engine.sleeps:
            await cast("SleepingEngine", self.roles.engine).sleep(weights=self.recipe.engine.gives_back_weights)

    async def wake_engines(self) -> None:
        """Give sleeping engines their memory back, so that they can load new weights."""
        if self.recipe.engine.sleeps:
            await cast("SleepingEngine", self.roles.engine).wake()

    async def resume_engines(self, policy: PolicyState) -> None:
        """Resume paused engines once they hold the version being published."""
        if engines_take_turns(self.recipe):
            await policy.published()
            await self.roles.engine.resume()
