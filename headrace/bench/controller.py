"""`headrace bench controller`: the launcher's own CPU time per rollout, with 10,000 in flight.

The four loops run with the real buffer, ledger, scorer, tokenizer and batches around a stub engine and a stub trainer. The
figure is the CPU time of the launcher's thread, less the stub engine's, per rollout; every rollout goes from submission to
training. Separate runs time each function that the loops call; the rest is the loops' and the event loop's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import statistics
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headrace.bench.controller_stream import encoding_rows, stream_cost
from headrace.bench.drive_loops import make_session
from headrace.bench.harness import Row, run_parts, take_turns
from headrace.bench.stubs import StubTrainer, WaveEngine
from headrace.config import make_recipe
from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.observe import Observer
from headrace.run import POLICY, Roles, make_canary
from headrace.score import RewardFunction, RewardScorer
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.run import Session

IN_FLIGHT = 10_000
BATCH = 256
PARTS = {
    "submit": "tasks, groups and the books",
    "prompt": "client, sampling and prompt tokens",
    "episode": "the environment's own steps",
    "score": "decoding, reward and outcome",
    "collect": "groups and the buffer",
    "batch": "staleness, advantages, weights, settling",
    "measure": "metrics of a version",
}


def run(*, quick: bool, json_file: Path | None) -> int:
    """Medians of several runs; `--quick` takes fewer and shorter ones."""
    return run_parts("controller", {"controller": lambda: _measure(quick=quick)}, quick=quick, json_file=json_file)


def _measure(*, quick: bool) -> Iterator[list[Row]]:
    versions, repetitions = (60, 2) if quick else (120, 7)
    cost = functools.partial(measure, in_flight=IN_FLIGHT, versions=versions)
    seen = take_turns({"total": lambda _: cost(), "parts": lambda _: cost(is_timed=True)}, repetitions)
    yield make_rows(seen["total"], seen["parts"])
    streamed = [stream_cost(in_flight=IN_FLIGHT, rounds=1 if quick else 3) for _ in range(repetitions)]
    yield [Row("the stream per rollout, out and back", statistics.median(streamed), "µs")]
    yield encoding_rows(repetitions=repetitions)


@dataclass(frozen=True)
class Cost:
    """One run, in microseconds of CPU time per rollout; `stub` is the stub engine's share of `total`."""

    rollouts: int
    in_flight: int
    """The most at once."""
    total: float
    stub: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def controller(self) -> float:
        return self.total - self.stub


def make_rows(totals: list[Cost], parts: list[Cost]) -> list[Row]:
    """The figure and its parts, all medians."""
    whole = statistics.median(cost.controller for cost in totals)
    rows = [
        Row("controller per rollout", whole, "µs", goal="≤ 100"),
        Row("least of the repetitions", min(cost.controller for cost in totals), "µs"),
        Row("in flight at once", min(cost.in_flight for cost in totals), "rollouts"),
        Row("stub engine, not counted", statistics.median(cost.stub for cost in totals), "µs"),
    ]
    claimed = {name: statistics.median(cost.parts[name] for cost in parts) for name in PARTS}
    rows += [Row(f"of it {name}: {PARTS[name]}", value, "µs") for name, value in claimed.items()]
    return [*rows, Row("of it the rest: loops and event loop", whole - sum(claimed.values()), "µs")]


def measure(*, in_flight: int, versions: int, batch: int = BATCH, is_timed: bool = False) -> Cost:
    """One run of the four loops over stubs; asserts that `in_flight` rollouts were in flight at once."""
    recipe = make_recipe(
        {
            "steps": versions,
            "sampling": {"max_tokens": 32},
            "engine": {"slots": in_flight},
            # Submission must run ahead by all rollouts in flight, a wave being answered and a batch being trained.
            "staleness": {"max_lag": -(-in_flight // batch) + 2},
            "train": {"batch": batch, "group_size": 8},
            "checkpoint": {"every": versions},
            "observe": {"keep_rollouts_every": 0},
            "sync": {"canary_limit": 1e9},  # a stub has no logprobs
        }
    )
    total = versions * batch
    lineage = Lineage.new()
    engine, trainer = WaveEngine(in_flight=in_flight, total=total, wave=batch), StubTrainer(lineage)
    observer = _StartObserver()
    session = make_session(recipe, _make_roles(recipe, engine, trainer, tasks=total // 8), lineage, observer)
    clock = Clock()
    if is_timed:
        clock.time_moves(session)
    asyncio.run(session.train())
    spent = time.thread_time() - observer.started
    assert trainer.num_rollouts == total == session.policy.ledger.counts()["trained"]
    assert engine.most_in_flight >= in_flight, f"only {engine.most_in_flight} were in flight"
    scale = 1e6 / total
    return Cost(
        rollouts=total,
        in_flight=engine.most_in_flight,
        total=spent * scale,
        stub=engine.seconds * scale,
        parts={name: clock.seconds[name] * scale for name in PARTS} if is_timed else {},
    )


class _StartObserver(Observer):
    """Records the thread's CPU time when the loops start."""

    started = 0.0

    def start(self) -> None:
        super().start()
        self.started = time.thread_time()


def _make_roles(recipe: Recipe, engine: WaveEngine, trainer: StubTrainer, *, tasks: int) -> Roles:
    encoder = PromptEncoder(build_tokenizer())
    rows = [{"prompt": [{"role": "user", "content": f"{number:08d}"}], "answer": str(number)} for number in range(tasks)]
    return Roles(
        engine=engine,
        trainers={POLICY: trainer},
        scorer=RewardScorer([(RewardFunction(trivial), 1.0)], decode=encoder.decode, settings=recipe.reward),
        environment=SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, UserInputs(tasks=rows)),
        canary=make_canary(encoder.encode("canary")),
        stop_ids=(1,),
        services=(engine.serve,),
    )


def trivial(completion: str, **_: object) -> float:
    """A reward that costs almost nothing and differs between siblings."""
    return float(ord(completion[0]) % 7)


class Clock:
    """CPU seconds of this thread in each part. Nested parts are counted once, the clock's own overhead not at all."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._inside = 0.0
        ticks = [time.thread_time() for _ in range(2001)]
        self._tick = (ticks[-1] - ticks[0]) / 2000

    def time_moves(self, session: Session) -> None:
        """Time the functions that the loops call."""
        moves: Any = session.run
        policy: Any = session.policy
        scorer: Any = session.roles.scorer
        policy.submit = self.timed("submit", policy.submit)
        policy.collect = self.timed("collect", policy.collect)
        scorer.score = self.timed_async("score", scorer.score)
        policy.reject_stale = self.timed("batch", policy.reject_stale)
        policy.start_batch = self.timed_async("batch", policy.start_batch)
        moves.settle_trained = self.timed("batch", moves.settle_trained)
        moves.after_version = self.timed_async("measure", moves.after_version)
        environment = SimpleNamespace(run=self.timed_async("episode", moves.roles.environment.run))
        moves.roles = dataclasses.replace(moves.roles, environment=environment)
        make_client = self.timed("prompt", moves.client)

        def client(record: object) -> Any:  # noqa: ANN401
            made = make_client(record)
            made.prompt = self.timed("prompt", made.prompt)
            return made

        moves.client = client

    def timed(self, name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts for this part."""

        def timed(*arguments: object, **keywords: object) -> Any:  # noqa: ANN401
            outside, self._inside = self._inside, 0.0
            started = time.thread_time()
            try:
                return move(*arguments, **keywords)
            finally:
                spent = time.thread_time() - started
                self.seconds[name] += spent - self._inside - self._tick
                self._inside = outside + spent + self._tick

        return timed

    def timed_async(self, name: str, move: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
        """The same for a coroutine function; time spent waiting does not count."""
        return lambda *arguments, **keywords: _Steps(move(*arguments, **keywords), self, name)


class _Steps:
    """A coroutine driven step by step with a clock around each step; it cannot be cancelled."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], clock: Clock, name: str) -> None:
        self._coroutine = coroutine
        self._step = clock.timed(name, self._send)

    def _send(self) -> tuple[bool, Any]:
        try:
            return False, self._coroutine.send(None)
        except StopIteration as end:
            return True, end.value

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            is_over, value = self._step()
            if is_over:
                return value
            yield value
