"""`headrace bench controller`: what the launcher itself costs per rollout, with 10,000 of them in flight.

The four loops run as they do in a run, with the real buffer, ledger, scorer, tokenizer and batches, around an engine and
a trainer that do nothing. The figure is the processor time of the launcher's thread from the start of the loops to their
end, every rollout going all the way from submission to training, less what the stub engine measured of itself, divided
by the number of rollouts.

The parts come from runs of their own, in which the moves the loops make are timed one by one; what no part claims is the
loops' and the event loop's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.bench.carry import carry
from headrace.bench.clock import PARTS, Clock
from headrace.bench.stubs import StubEngine, StubStore, StubTrainer, answer
from headrace.bench.table import Row, report
from headrace.config import make_recipe
from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.observe import Observer
from headrace.records import decode, encode, pack_rollouts, unpack_rollouts
from headrace.run import POLICY, Roles, Session, make_canary
from headrace.score import RewardFunction, RewardScorer
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.config import Recipe

IN_FLIGHT = 10_000
BATCH = 256
GOAL = 100.0
"""Microseconds of the launcher's thread per rollout."""


def run(*, quick: bool, json_file: Path | None) -> int:
    """Medians of several runs; status 1 if a goal is missed. `--quick` takes fewer and shorter ones, and judges nothing."""
    versions, repetitions = (60, 2) if quick else (120, 7)
    totals: list[Cost] = []
    parts: list[Cost] = []
    for number in range(repetitions):  # in turn, so that a busy moment of the machine falls on both
        totals.append(measure(in_flight=IN_FLIGHT, versions=versions))
        parts.append(measure(in_flight=IN_FLIGHT, versions=versions, is_timed=True))
        print(f"{number + 1} of {repetitions}: {totals[-1].controller:.1f} µs per rollout", flush=True)
    carried = [carry(in_flight=IN_FLIGHT, rounds=1 if quick else 3) for _ in range(repetitions)]
    rows = make_rows(totals, parts)
    rows.append(Row("the stream per rollout, out and back", statistics.median(carried), "µs"))
    rows += stream_rows(repetitions=repetitions)
    return report("controller", rows, json_file=json_file, quick=quick)


@dataclass(frozen=True)
class Cost:
    """Of one run, in microseconds of its thread per rollout."""

    rollouts: int
    in_flight: int
    """The most there were at once."""
    total: float
    stub: float
    """Of that, the stub engine's own."""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def controller(self) -> float:
        return self.total - self.stub


def make_rows(totals: list[Cost], parts: list[Cost]) -> list[Row]:
    """The figure and what it is made of: medians, and the rest is what they leave."""
    whole = statistics.median(cost.controller for cost in totals)
    rows = [
        Row("controller per rollout", whole, "µs", goal=f"≤ {GOAL:g}"),
        Row("least of the repetitions", min(cost.controller for cost in totals), "µs"),
        Row("in flight at once", min(cost.in_flight for cost in totals), "rollouts"),
        Row("stub engine, not counted", statistics.median(cost.stub for cost in totals), "µs"),
    ]
    claimed = {name: statistics.median(cost.parts[name] for cost in parts) for name in PARTS}
    rows += [Row(f"of it {name}: {PARTS[name]}", value, "µs") for name, value in claimed.items()]
    return [*rows, Row("of it the rest: loops and event loop", whole - sum(claimed.values()), "µs")]


def stream_rows(*, repetitions: int, num: int = 256) -> list[Row]:
    """Carrying rollouts between processes: once out of the engine's, once into the launcher's."""
    rollouts = [answer(number).replace(id=f"g{number // 8}/{number % 8}", group=f"g{number // 8}") for number in range(num)]
    frame = encode(pack_rollouts(rollouts))
    assert unpack_rollouts(decode(frame)) == rollouts
    out = _per_item(lambda: encode(pack_rollouts(rollouts)), num=num, repetitions=repetitions)
    back = _per_item(lambda: unpack_rollouts(decode(frame)), num=num, repetitions=repetitions)
    return [
        Row(f"pack + encode, {num} at a time", out, "µs", goal="≤ 8"),
        Row(f"decode + unpack, {num} at a time", back, "µs", goal="≤ 8"),
        Row("bytes of a rollout on the wire", len(frame) / num, "bytes"),
    ]


def _per_item(work: Callable[[], object], *, num: int, repetitions: int, times: int = 10) -> float:
    seen = []
    for _ in range(repetitions):
        started = time.thread_time()
        for _ in range(times):
            work()
        seen.append((time.thread_time() - started) / times / num * 1e6)
    return statistics.median(seen)


def measure(*, in_flight: int, versions: int, batch: int = BATCH, is_timed: bool = False) -> Cost:
    """One run of the four loops over stubs; `in_flight` rollouts must have been in flight at once."""
    recipe = make_recipe(
        {
            "steps": versions,
            "sampling": {"max_tokens": 32},
            "engine": {"slots": in_flight},
            # Submission may run ahead by what is to be in flight, a wave being answered and a batch being trained.
            "staleness": {"max_lag": -(-in_flight // batch) + 2},
            "train": {"batch": batch, "group_size": 8},
            "checkpoint": {"every": versions},
            "observe": {"keep_rollouts_every": 0},
            "sync": {"canary_limit": 1e9},  # a stub knows no logprobs
        }
    )
    total = versions * batch
    lineage = Lineage.new()
    engine, trainer = StubEngine(in_flight=in_flight, total=total, wave=batch), StubTrainer(lineage)
    observer = _StartObserver()
    session = _make_session(recipe, engine, trainer, observer, lineage, tasks=total // 8)
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
    """Knows the thread's time when the loops began."""

    started = 0.0

    def start(self) -> None:
        super().start()
        self.started = time.thread_time()


def _make_session(
    recipe: Recipe, engine: StubEngine, trainer: StubTrainer, observer: Observer, lineage: Lineage, *, tasks: int
) -> Session:
    encoder = PromptEncoder(build_tokenizer())
    rows = [{"prompt": [{"role": "user", "content": f"{number:08d}"}], "answer": str(number)} for number in range(tasks)]
    roles = Roles(
        engine=engine,  # type: ignore[arg-type]  # all of it that a run calls
        trainers={POLICY: trainer},
        scorer=RewardScorer([(RewardFunction(trivial), 1.0)], decode=encoder.decode, settings=recipe.reward),
        environment=SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, UserInputs(tasks=rows)),
        canary=make_canary(encoder.encode("canary")),
        stop_ids=(1,),
        services=(engine.serve,),
    )
    return Session(
        recipe=recipe,
        roles=roles,
        lineage=lineage,
        observer=observer,
        store=StubStore(),  # type: ignore[arg-type]
        held_out={},
        command_started=time.perf_counter(),
        identity="bench",
    )


def trivial(completion: str, **_: object) -> float:
    """The reward: next to nothing to compute, and siblings differ."""
    return float(ord(completion[0]) % 7)
