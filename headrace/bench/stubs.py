"""Engines, trainers and a store that do almost nothing, and functions that run the four loops with them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

import numpy as np

from headrace.algorithms import PROXIMAL
from headrace.bench.loads import finished
from headrace.engine import EngineState, InFlight
from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.observe import Observer
from headrace.partial import Interrupt
from headrace.records import Rollout, Sampling, Scored, WeightUpdate
from headrace.run import POLICY, Roles, Run, Session, fewer_gc_pauses, leg, make_canary, run_loops
from headrace.trainer import Published

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.durable import Fingerprints
    from headrace.engine import Engine, Increment
    from headrace.envs import Client, EngineClient
    from headrace.records import Array, Batch, Episode, Plain
    from headrace.run import PolicyState, StartedBatch
    from headrace.score import Scorer, Sums
    from headrace.sync import Lineage

    AnyRun = TypeVar("AnyRun", bound=Run)
    OnTokens = Callable[[Increment], None] | None

T = TypeVar("T")
PROMPT, COMPLETION = 10, 10
"""Tokens of every rollout that `answer` makes."""


def answer(number: int, *, version: int = 0, lineage: str = "") -> Rollout:
    """A finished rollout; each number has a different text and so a different score."""
    token_ids = np.full(PROMPT + COMPLETION, 10 + number, dtype=np.int32)
    prompt = Rollout.from_prompt(token_ids[:PROMPT], id=str(number))
    rollout = finished(prompt, token_ids[PROMPT:], logprobs=-0.5, version=version, lineage=lineage)
    return rollout.replace(episode="", group="")


async def _nothing(*_: Any, **__: Any) -> None:  # noqa: ANN401  (a method of any signature)
    """Stands in for methods with nothing to pause, send or keep."""


class InstantEngine:
    """Answers at once, with `tokens` made-up tokens."""

    def __init__(self, *, tokens: int = 0) -> None:
        self._tokens = tokens
        self._sampled = self._version = 0
        self._lineage = ""

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens = None) -> Rollout:
        await asyncio.sleep(0)
        self._sampled += self._tokens
        token_ids = np.full(self._tokens, 10 + self._sampled // self._tokens % 7)
        return finished(rollout, token_ids, version=self._version, lineage=self._lineage, sampling=sampling)

    async def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        raise NotImplementedError("no benchmark streams")
        yield

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]

    pause = resume = _nothing

    def release(self, rollout_ids: Sequence[str]) -> None:
        """Nothing is kept."""

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        self._version, self._lineage = update.version, update.lineage

    async def state(self) -> EngineState:
        return EngineState(self._version, self._lineage, 0, 0, 1, 1, self._sampled)

    async def in_flight(self) -> list[InFlight]:
        return []


class FrozenEngine(InstantEngine):
    """A real engine that keeps its weights: the stub trainer has none to send."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens = None) -> Rollout:
        return await self._engine.generate(rollout, sampling, on_tokens=on_tokens)

    async def state(self) -> EngineState:
        return await self._engine.state()


class WaveEngine(InstantEngine):
    """Holds requests until `in_flight` wait, then answers the oldest `wave`; `seconds` is its own CPU time, not the
    controller's."""

    def __init__(self, *, in_flight: int, total: int, wave: int) -> None:
        super().__init__()
        self._in_flight, self._total, self._wave = in_flight, total, wave
        self._requests: deque[tuple[Rollout, asyncio.Future[Rollout]]] = deque()
        self._arrived = asyncio.Event()
        self._answers: list[Rollout] = []
        self._num_answered = self.most_in_flight = 0
        self.seconds = 0.0

    async def serve(self) -> NoReturn:
        """Waits until `in_flight` requests wait, or all that remain of `total`; woken by `generate`."""
        while True:
            while len(self._requests) < min(self._in_flight, self._total - self._num_answered) or not self._requests:
                self._arrived.clear()
                await self._arrived.wait()
            self.most_in_flight = max(self.most_in_flight, len(self._requests))
            started = time.thread_time()
            wave = [self._requests.popleft() for _ in range(min(self._wave, len(self._requests)))]
            rollouts = []
            for number, (prompt, _) in enumerate(wave, start=self._num_answered):
                made = self._answers[number % len(self._answers)]
                rollouts.append(made.replace(id=prompt.id, episode=prompt.episode, group=prompt.group, index=prompt.index))
            self._num_answered += len(wave)
            self.seconds += time.thread_time() - started
            for (_, future), rollout in zip(wave, rollouts, strict=True):
                if not future.done():
                    future.set_result(rollout)
            await asyncio.sleep(0)

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens = None) -> Rollout:
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._requests.append((rollout, future))
        self._arrived.set()
        return await future

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        started = time.thread_time()
        await super().load(update, interrupt=interrupt)
        self._answers = [answer(number, version=update.version, lineage=update.lineage) for number in range(16)]
        self.seconds += time.thread_time() - started

    async def state(self) -> EngineState:
        return EngineState(self._version, self._lineage, len(self._requests), 0, self._in_flight, 0, self._num_answered)


class StubTrainer:
    """Accepts batches and keeps nothing of them."""

    is_lost = False

    def __init__(self, lineage: Lineage, *, is_inline: bool = True) -> None:
        """`is_inline`: whether it behaves like a trainer in the launcher's process."""
        self._lineage, self.is_inline = lineage, is_inline
        self.num_steps = self.num_passes = self.num_rollouts = 0

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in batch.rollouts]

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        self.num_steps += batch.is_last
        self.num_rollouts += len(batch.rollouts)
        return {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0}

    async def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Published:
        update = WeightUpdate(policy="policy", lineage=self._lineage.id, version=version)
        return Published(update, np.zeros(1, dtype=np.float32))

    async def save(self, folder: Path) -> Fingerprints:
        return {}

    release = abort = abandon = load = _nothing


class PlannedLengths(SingleTurn):
    """The built-in environment, with a length for each sibling of each group; groups count in the order of submission."""

    def __init__(self, length_of: Callable[[int, int], int]) -> None:
        """`length_of(group, index)`: tokens to sample."""
        self._length_of = length_of

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        engine = cast("EngineClient", client)
        length = self._length_of(int(engine.group.removeprefix("g")), engine.index)
        engine.sampling = dataclasses.replace(engine.sampling, max_tokens=length)
        return await super().run(task, client)


class StubStore:
    save = _nothing


class StubScorer:
    """Scores every round of episodes, by their one rollout, after so many `seconds`. Siblings get different scores."""

    num_calls = 0
    weights: ClassVar[dict[str, float]] = {}

    def __init__(self, reward: Callable[[Rollout], float] = lambda rollout: rollout.index % 4, *, seconds: float = 0.0) -> None:
        self._reward, self._seconds = reward, seconds

    async def score(self, episodes: Sequence[Episode], *, is_training: bool = True) -> list[Episode]:
        await asyncio.sleep(self._seconds)
        self.num_calls += len(episodes)
        return [self._scored(episode) for episode in episodes]

    def _scored(self, episode: Episode) -> Episode:
        (rollout,) = episode.rollouts
        outcome = Scored(float(self._reward(rollout)))
        return episode.replace(outcome=outcome, rollouts=(rollout.replace(outcome=outcome),))

    def take_logged(self) -> Sums:
        return {}


class StartObserver(Observer):
    """Records the thread's CPU time when the loops start."""

    started = 0.0

    def start(self) -> None:
        super().start()
        self.started = time.thread_time()


def make_session(
    recipe: Recipe,
    lineage: Lineage,
    observer: Observer,
    *,
    engine: Engine,
    trainer: StubTrainer,
    scorer: Scorer | Callable[[PromptEncoder], Scorer],
    num_tasks: int,
    **more: object,
) -> Session:
    """A session of single-turn episodes over these roles, with `num_tasks` tasks of equal length and a store that keeps
    nothing. `scorer` may be made from the encoder; `more` are other fields of `Roles`."""
    encoder = PromptEncoder(build_tokenizer())
    rows = [{"prompt": [{"role": "user", "content": f"{at:08d}"}], "answer": str(at)} for at in range(num_tasks)]
    roles = Roles(
        engine=engine,
        trainers={POLICY: trainer},
        scorer=scorer(encoder) if callable(scorer) else scorer,
        environment=SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, UserInputs(tasks=rows)),
        canary=make_canary(encoder.encode("canary")),
        stop_ids=(1,),
        **{"services": (), **more},  # type: ignore[arg-type]
    )
    stubs: dict[str, Any] = {"store": StubStore(), "held_out": {}, "command_started": time.perf_counter(), "identity": "bench"}
    return Session(recipe=recipe, roles=roles, lineage=lineage, observer=observer, **stubs)


def make_run(
    kind: type[AnyRun],
    recipe: Recipe,
    roles: Roles,
    lineage: Lineage,
    observer: Observer,
    *,
    versions: int,
    after_version: Callable[[PolicyState], Awaitable[None]],
    on_trained: Callable[[PolicyState, StartedBatch], None] = lambda *_: None,
    first_version: int = 0,
) -> AnyRun:
    """A run of `versions` versions after `first_version`."""
    run = kind(recipe, roles, lineage=lineage, observer=observer, on_trained=on_trained, after_version=after_version)
    policy = run.policies[POLICY]
    policy.version = policy.held_version = first_version
    policy.submitted_groups = first_version * recipe.train.groups_per_batch
    run.leg_end = first_version + versions
    return run


async def drive(run: Run, *, on_end: Callable[[], Awaitable[T]]) -> T:
    """Run the loops to the run's last version; returns the result of `on_end`, called while everything still runs."""
    with fewer_gc_pauses():
        async with leg(run):
            await run_loops(run)
            found = await on_end()
            await run.policies[POLICY].published()
    return found
