"""`headrace bench controller`: the launcher's own CPU time per rollout, with 10,000 in flight.

The four loops run with the real buffer, ledger, scorer, tokenizer and batches around a stub engine and a stub trainer. The
figure is the CPU time of the launcher's thread, less the stub engine's, per rollout; every rollout goes from submission to
training.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.bench.controller_stream import encoding_rows, stream_cost
from headrace.bench.drive_loops import make_session
from headrace.bench.harness import Row, run_parts
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
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.config import Recipe

IN_FLIGHT = 10_000
BATCH = 256


def run(*, quick: bool, json_file: Path | None) -> int:
    """Medians of several runs; `--quick` takes fewer and shorter ones."""
    return run_parts("controller", {"controller": lambda: _measure(quick=quick)}, quick=quick, json_file=json_file)


def _measure(*, quick: bool) -> Iterator[list[Row]]:
    versions, repetitions = (60, 2) if quick else (120, 7)
    yield make_rows([measure(in_flight=IN_FLIGHT, versions=versions) for _ in range(repetitions)])
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

    @property
    def controller(self) -> float:
        return self.total - self.stub


def make_rows(costs: list[Cost]) -> list[Row]:
    """Medians, and the least that was seen."""
    return [
        Row("controller per rollout", statistics.median(cost.controller for cost in costs), "µs", goal="≤ 100"),
        Row("least of the repetitions", min(cost.controller for cost in costs), "µs"),
        Row("in flight at once", min(cost.in_flight for cost in costs), "rollouts"),
        Row("stub engine, not counted", statistics.median(cost.stub for cost in costs), "µs"),
    ]


def measure(*, in_flight: int, versions: int, batch: int = BATCH) -> Cost:
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
    asyncio.run(session.train())
    spent = time.thread_time() - observer.started
    assert trainer.num_rollouts == total == session.policy.ledger.counts()["trained"]
    assert engine.most_in_flight >= in_flight, f"only {engine.most_in_flight} were in flight"
    scale = 1e6 / total
    return Cost(total, engine.most_in_flight, total=spent * scale, stub=engine.seconds * scale)


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
