"""`headrace bench partial`: what each interrupt policy costs, on the same long-tailed work.

The loops, gate, buffer, ledger, engine and weight updates are those of a run. The trainer is a stub: a step takes a fixed time,
and it publishes two sets of weights in turn. Choices differ only in settings; they take turns, and figures are medians.

The stall of an update is time in which slots that were decoding do not: from when admission stops for it (`drain`) or the
weights change, until as many decode again. Each interval between two steps counts, minus the time of a usual step times the
share of slots that decoded in it; for `keep` that leaves the time without a decode step beyond a usual one. Here, unlike in a
run, engine and launcher share a process: after a swap the decode thread may wait for the launcher's, which is busy with the
groups that the new version admits. The stall includes that wait; a separate row has the part before it. There is no canary.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.harness import Row, run_parts
from headrace.bench.loads import lognormal_lengths
from headrace.bench.step_recorder import RecordedStep, StepRecorder, exchanges_of, stalls_of, usual_step
from headrace.bench.stubs import PlannedLengths, StubScorer, StubTrainer, drive, make_run
from headrace.config import make_recipe
from headrace.engine import HeldAdapter, NativeEngine, build_core
from headrace.launch import UserInputs, make_roles, model_folder, pick_device, set_threads
from headrace.model import named_tensors
from headrace.observe import Observer, ProcessTimeline
from headrace.run import POLICY, Run
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import Published

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from headrace.config import Recipe
    from headrace.records import Array, Batch, Rollout, WeightUpdate
    from headrace.run import PolicyState, Roles, StartedBatch

    Figures = dict[tuple[str, str], float]
    """Of one turn, by name and unit."""

_WARM_VERSIONS = 2
_SWITCH_SECONDS = 0.0002
"""How long the decode thread may wait for the launcher's, which in a run is in another process. Python's default is 5 ms."""

_IN_TURN = {"buffer.kind": "synchronous"}
CHOICES: dict[str, dict[str, Any]] = {
    "keep": {"partial.interrupt": "keep"},
    "retract": {"partial.interrupt": "retract"},
    "drain": {"partial.interrupt": "drain"},
    "abort": {"partial.interrupt": "abort"},
    "keep, cancel over age": {"partial.interrupt": "keep", "partial.cancel": "over_age"},
    "in turn": _IN_TURN,
    "in turn, oversample ×2 and recycle": {**_IN_TURN, "partial.interrupt": "abort", "partial.oversample": 2.0},
}


@dataclass(frozen=True)
class Plan:
    """What to measure on a GPU or a CPU: batches of `groups` groups, rollouts of `mean` tokens before the `cap`, `seconds` per
    step of the stub trainer, and `versions` versions per turn."""

    device: str
    dtype: str
    model: dict[str, Any]
    slots: int
    groups: int
    mean: int
    cap: int
    seconds: float
    versions: int
    turns: int
    max_lag: int = 2
    group_size: int = 4


def make_plan(device: str, *, quick: bool) -> Plan:
    """For a GPU or a CPU; `quick` takes two short turns of each choice."""
    turns = 2 if quick else 3
    if device == "cuda":
        model, versions = {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "context": 1024}, 4 if quick else 8
        return Plan(device, "bfloat16", model, 256, groups=32, mean=160, cap=768, seconds=0.25, versions=versions, turns=turns)
    model, versions = {"hidden_size": 96, "num_layers": 2, "num_heads": 3, "context": 512}, 5 if quick else 10
    return Plan(device, "float32", model, 48, groups=8, mean=48, cap=384, seconds=0.1, versions=versions, turns=turns)


def run(*, quick: bool, json_file: Path | None, device: str = "auto") -> int:
    """`--quick` takes two short turns of each choice."""
    plan = make_plan(pick_device(device), quick=quick)

    def part() -> Iterator[list[Row]]:
        for name, turns in measure(plan).items():
            yield rows_of(name, turns)

    return run_parts("partial", {"choices": part}, quick=quick, json_file=json_file)


def rows_of(name: str, turns: Sequence[Figures]) -> list[Row]:
    """The medians of one choice."""
    return [
        Row(
            f"{name}: {figure}",
            statistics.median(turn[figure, unit] for turn in turns),
            unit,
            goal="≤ 1" if (name, unit) == ("keep", "decode steps") else "",
        )
        for figure, unit in turns[0]
    ]


def figures_of(*, seconds: float, wasted: int, lags: Array, steps: Sequence[RecordedStep], recomputed: int) -> Figures:
    """Of one turn; `lags` are those of every trained token, `wasted` counts tokens sampled for nothing."""
    usual = usual_step(steps)
    stalls, exchanges = stalls_of(steps, usual=usual), exchanges_of(steps)
    stall = statistics.median(stalls or [0.0])
    return {
        ("tokens wasted", "share"): wasted / (len(lags) + wasted),
        ("stall per update", "ms"): 1e3 * stall,
        ("stall per update", "decode steps"): stall / usual,
        ("until the engine could step", "ms"): 1e3 * statistics.median(exchanges or [0.0]),
        ("KV recomputed per update", "tokens"): recomputed / max(len(stalls), 1),
        ("lag, mean", "versions"): float(lags.mean()),
        ("lag, p50", "versions"): float(np.percentile(lags, 50)),
        ("lag, p90", "versions"): float(np.percentile(lags, 90)),
        ("lag, max", "versions"): float(lags.max()),
        ("trained", "tokens/s"): len(lags) / seconds,
    }


def _recipe(plan: Plan, settings: dict[str, Any]) -> Recipe:
    return make_recipe(
        {
            "steps": 1_000_000,
            "threads": max(1, (os.cpu_count() or 1) // 2),
            "device": plan.device,
            "model": {"path": "builtin:tiny", "dtype": plan.dtype, **plan.model},
            "tasks": [{"source": "builtin:sort_digits"}],
            "sampling": {"max_tokens": plan.cap},
            "train": {"batch": plan.groups * plan.group_size, "group_size": plan.group_size},
            "engine": {"slots": plan.slots},
            "staleness": {"max_lag": plan.max_lag},
            "sync": {"canary_limit": 1e9},  # the stub has no logprobs
            **settings,
        }
    )


class CountedRun(Run):
    async def lost_tokens(self) -> int:
        """Tokens sampled for groups that were or will be dropped: a group over age is lost, cancelled or not."""
        policy = self.policies[POLICY]
        over_age = await policy.in_flight.over_age(policy.rejection, next_version=policy.version, held=policy.held_version)
        return policy.wasted_tokens + sum(over_age.values())


class UnscoredEngine(NativeEngine):
    """Scores no canary: the stub trainer has nothing to compare it with."""

    async def score(self, rollouts: Sequence[Rollout], *, held: HeldAdapter | None = None) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]


class SlowTrainer(StubTrainer):
    """Takes a fixed time per step, like a trainer in another process, and publishes two sets of weights in turn."""

    def __init__(self, sync: WeightSync, tensors: list[tuple[str, Tensor]], *, seconds: float) -> None:
        super().__init__(sync.lineage, is_inline=False)
        self._sync, self._seconds = sync, seconds
        self._sets = [tensors, [(name, tensor * 1.001) for name, tensor in tensors]]

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        await asyncio.sleep(self._seconds if batch.is_last else 0.0)
        return await super().step(batch, learning_rate=learning_rate)

    async def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Published:
        update = await asyncio.to_thread(self._sync.offer, version, self._sets[version % 2], whole=whole)
        return Published(update, np.zeros(1, dtype=np.float32))

    async def release(self, update: WeightUpdate) -> None:
        self._sync.release(update)

    async def abort(self, update: WeightUpdate) -> None:
        self._sync.abort(update)


def measure(plan: Plan) -> dict[str, list[Figures]]:
    """All turns of each choice, interleaved."""
    recipe = _recipe(plan, {})
    set_threads(recipe)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with model_folder(recipe, UserInputs(), say=lambda _: None) as path:
            return asyncio.run(_measure(plan, recipe, path))
    finally:
        sys.setswitchinterval(before)


async def _measure(plan: Plan, recipe: Recipe, path: str) -> dict[str, list[Figures]]:
    core, _ = build_core(recipe, path, name="engine-0", device=plan.device)
    core.wait_warm()
    sync = WeightSync(Lineage.new(), MemoryTransport(plan.device))
    engine = UnscoredEngine(core, sync=sync, timeline=ProcessTimeline("engine"))
    tensors = [(name, tensor.detach().clone()) for name, tensor in named_tensors(core.model)]

    async def watch_engine() -> None:
        await asyncio.shield(asyncio.wrap_future(engine.died))

    trainer = SlowTrainer(sync, tensors, seconds=plan.seconds)
    roles = make_roles(recipe, path, UserInputs(), engine=engine, trainer=trainer, services=(watch_engine,))
    roles = dataclasses.replace(
        roles, scorer=StubScorer(lambda rollout: len(rollout) % 2), stop_ids=()
    )  # every rollout reaches its full length
    recorder, observer = StepRecorder(core), Observer(elsewhere=("engine", "trainer"))
    seen: dict[str, list[Figures]] = {name: [] for name in CHOICES}
    engine.start()
    try:
        for number in range(plan.turns):
            for name, settings in CHOICES.items():
                sync.lineage = Lineage.new()  # versions restart at 0
                given = (_recipe(plan, settings), roles, sync.lineage, observer)
                seen[name].append(await _turn(plan, given, recorder, number))
    finally:
        engine.close()
    return seen


async def _turn(plan: Plan, given: tuple[Recipe, Roles, Lineage, Observer], recorder: StepRecorder, number: int) -> Figures:
    """Run the loops, and measure after the warm-up versions. Lengths follow from group, index and turn alone: they are the same
    for every choice."""
    recipe, roles, lineage, observer = given
    lengths = lognormal_lengths(4096, mean=plan.mean, sigma=1.0, cap=plan.cap)
    lags: list[Array] = []
    started, lost = 0.0, 0

    def length_of(group: int, index: int) -> int:
        return lengths[(group * plan.group_size + index + 977 * number) % len(lengths)]

    def on_trained(_: PolicyState, batch: StartedBatch) -> None:
        if started:
            versions = np.concatenate([rollout.versions for part in batch.batches for rollout in part.rollouts])
            lags.append(batch.version - versions[versions >= 0])

    async def after_version(policy: PolicyState) -> None:
        nonlocal started, lost
        if policy.version == _WARM_VERSIONS:
            started, lost = time.perf_counter(), await measured.lost_tokens()
            recorder.start()

    async def on_end() -> tuple[float, int]:
        seconds = time.perf_counter() - started
        recorder.is_on = False
        return seconds, await measured.lost_tokens() - lost

    versions = plan.versions + _WARM_VERSIONS
    roles = dataclasses.replace(roles, environment=PlannedLengths(length_of))
    how: dict[str, Any] = {"versions": versions, "after_version": after_version, "on_trained": on_trained}
    measured = make_run(CountedRun, recipe, roles, lineage, observer, **how)
    seconds, wasted = await drive(measured, on_end=on_end)
    trained = np.concatenate(lags)
    return figures_of(seconds=seconds, wasted=wasted, lags=trained, steps=recorder.steps, recomputed=recorder.recomputed)
