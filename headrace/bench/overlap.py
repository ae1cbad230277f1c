"""`headrace bench overlap`: how close generation and training, side by side, come to the slower of the two alone.

Four measurements take turns; figures are medians. Async: both roles in their own processes. Generation alone and training
alone: the same processes and threads, with a stub that takes no time as the other role. Sync: each role has all cores in turn.
All rollouts have the same number of tokens, so tokens/s compare.

With two cores or more the trainer is pinned to one half and the engine and the launcher to the other, except in sync. The bound
is the slower role alone or, if less, what the cores could do if they never idled: their number ÷ the core-seconds that it takes
to generate, train and transport a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.harness import Row, run_parts
from headrace.bench.stubs import FrozenEngine, InstantEngine, StubTrainer, drive, make_run
from headrace.config import make_recipe
from headrace.launch import LocalProcesses, UserInputs, model_folder, set_threads
from headrace.observe import WAITING, Observer
from headrace.run import POLICY, Run
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.bench.harness import Part
    from headrace.config import Recipe
    from headrace.run import Roles

Halves = tuple[set[int], set[int]]
"""Cores of the engine and the launcher, and of the trainer."""
_LAG = 2
_WARM_VERSIONS = 2


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    tokens: int
    batch: int
    versions: int
    """Measured in one turn, after the warm-up."""


_LARGER = {"path": "builtin:tiny", "hidden_size": 256, "num_layers": 6, "num_heads": 4, "context": 128}
CASES = (
    Case("quickstart", {"path": "builtin:tiny"}, tokens=10, batch=256, versions=20),
    Case("larger", _LARGER, tokens=64, batch=64, versions=4),
)


@dataclass(frozen=True)
class Turn:
    tokens_per_second: float
    launcher: float
    """Core-seconds of the launcher per token."""
    budget: dict[str, dict[str, float]]
    """By role: the share of its time in each state."""

    def work(self, role: str) -> float:
        """Seconds per token in which the role computed."""
        idle = sum(share for state, share in self.budget[role].items() if state in WAITING)
        return (1.0 - idle) / self.tokens_per_second


def run(*, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes two turns of a few small batches."""

    def part_of(case: Case) -> Part:
        small = dataclasses.replace(case, tokens=10, batch=16, versions=2)
        return lambda: [_measure(small if quick else case, turns=2 if quick else 5)]

    return run_parts("overlap", {case.name: part_of(case) for case in CASES}, quick=quick, json_file=json_file)


def _measure(case: Case, *, turns: int) -> list[Row]:
    cores = len(os.sched_getaffinity(0))
    shared, whole = _recipe(case, threads=max(1, cores // 2), lag=_LAG), _recipe(case, threads=cores, lag=0)
    set_threads(shared)
    with (
        tempfile.TemporaryDirectory() as folder,
        model_folder(shared, UserInputs(), say=lambda _: None) as model,  # both have the same
    ):
        seen = asyncio.run(_take_turns(case, shared, whole, model, Path(folder), turns=turns))
    return _rows(case, seen, cores=cores)


async def _take_turns(
    case: Case, shared: Recipe, whole: Recipe, model: str, folder: Path, *, turns: int
) -> dict[str, list[Turn]]:
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    halves = (set(cores[:half]), set(cores[half:])) if half else None
    seen: dict[str, list[Turn]] = {name: [] for name in ("async", "generation", "training", "sync")}
    async with (
        _start(shared, model, folder / "shared", halves=halves) as side_by_side,
        _start(whole, model, folder / "whole") as in_turn,
    ):
        for _ in range(turns):
            _pin(os.getpid(), halves[0] if halves else set(cores))
            try:
                seen["async"].append(await side_by_side.turn(case))
                seen["generation"].append(await side_by_side.turn(case, has_trainer=False))
                seen["training"].append(await side_by_side.turn(case, has_engine=False))
            finally:
                _pin(os.getpid(), set(cores))
            seen["sync"].append(await in_turn.turn(case))
    return seen


def _rows(case: Case, seen: dict[str, list[Turn]], *, cores: int) -> list[Row]:
    name = case.name
    rate = {kind: statistics.median(turn.tokens_per_second for turn in turns) for kind, turns in seen.items()}
    launcher = statistics.median(turn.launcher for turn in seen["async"])
    slower = min(rate["generation"], rate["training"])

    def work(role: str, measurement: str) -> float:
        return statistics.median(turn.work(role) for turn in seen[measurement])

    def share(role: str, state: str) -> float:
        return statistics.median(turn.budget[role][state] for turn in seen["async"])

    engine, trainer = work("engine", "generation"), work("trainer", "training")
    # Core-seconds per token; each role has as many threads as half the cores.
    bound = min(slower, cores / (max(1, cores // 2) * (engine + trainer) + launcher))
    return [
        Row(f"{name}: async", rate["async"], "tokens/s", bound=bound),
        Row(f"{name}: generation alone", rate["generation"], "tokens/s"),
        Row(f"{name}: training alone", rate["training"], "tokens/s"),
        Row(f"{name}: sync, all cores in turn", rate["sync"], "tokens/s"),
        Row(f"{name}: async ÷ slower alone", rate["async"] / slower, "ratio", goal="≥ 0.97", bound=bound / slower),
        Row(f"{name}: async ÷ sync", rate["async"] / rate["sync"], "ratio"),
        Row(f"{name}: trainer idle", share("trainer", "wait-batch"), "share", goal="≤ 0.03"),
        Row(f"{name}: trainer descheduled", share("trainer", "descheduled"), "share"),
        # How much longer the same work takes beside the other role: contention for anything but cores.
        Row(f"{name}: trainer's work per token, async ÷ alone", work("trainer", "async") / trainer, "ratio"),
        Row(f"{name}: engine's work per token, async ÷ alone", work("engine", "async") / engine, "ratio"),
        Row(f"{name}: engine waiting at the gate", share("engine", "wait-gate"), "share"),
        Row(f"{name}: engine swapping", share("engine", "swap"), "share"),
        Row(f"{name}: launcher, of one core", launcher * rate["async"], "share"),
    ]


def _recipe(case: Case, *, threads: int, lag: int) -> Recipe:
    return make_recipe(
        {
            "steps": 1_000_000,
            "threads": threads,
            "model": case.model,
            "tasks": [{"source": "builtin:sort_digits"}],
            "sampling": {"max_tokens": case.tokens},
            "train": {"batch": case.batch, "group_size": 8, "learning_rate": 1e-4},
            "engine": {"slots": case.batch},
            "staleness": {"max_lag": lag, "reject": "never"},
            "sync": {"canary_limit": 1e9},  # a stub has no logprobs
        }
    )


class _Rig:
    """Processes that are started once and measured many times."""

    def __init__(self, recipe: Recipe, roles: Roles, observer: Observer, lineage: Lineage) -> None:
        self._recipe, self._roles, self._observer, self._lineage = recipe, roles, observer, lineage
        self._version = 0
        """Rises from turn to turn: an engine rejects versions older than its own."""

    async def turn(self, case: Case, *, has_engine: bool = True, has_trainer: bool = True) -> Turn:
        """Run the loops for `case.versions` versions after the warm-up; a role that is left out is a stub."""
        moments: list[tuple[float, float]] = []

        async def after_version(_: object) -> None:
            if len(moments) == _WARM_VERSIONS - 1:
                await roles.refresh()
                self._observer.start()
            moments.append((time.perf_counter(), time.process_time()))

        async def on_end() -> dict[str, dict[str, float]]:
            await roles.refresh()
            return self._observer.budget()

        roles = dataclasses.replace(self._roles, stop_ids=())  # every rollout reaches its full length
        if not has_engine:
            roles = dataclasses.replace(roles, engine=InstantEngine(tokens=case.tokens))
        if not has_trainer:  # behaves like a trainer in another process
            trainers = {POLICY: StubTrainer(self._lineage, is_inline=False)}
            roles = dataclasses.replace(roles, engine=FrozenEngine(roles.engine), trainers=trainers)
        versions = case.versions + _WARM_VERSIONS
        given, first = (self._recipe, roles, self._lineage, self._observer), self._version
        run = make_run(Run, *given, versions=versions, first_version=first, after_version=after_version)
        self._version += versions
        budget = await drive(run, on_end=on_end)
        (started, started_cpu), (ended, ended_cpu) = moments[_WARM_VERSIONS - 1], moments[-1]
        trained = case.batch * case.tokens * case.versions
        return Turn(trained / (ended - started), (ended_cpu - started_cpu) / trained, budget)


@contextlib.asynccontextmanager
async def _start(recipe: Recipe, model: str, folder: Path, *, halves: Halves | None = None) -> AsyncIterator[_Rig]:
    (folder / "logs").mkdir(parents=True)
    with LocalProcesses(recipe, folder) as processes:
        observer, lineage = Observer(elsewhere=processes.reporting_roles), Lineage.new()
        async with processes.roles(model, UserInputs(), observer=observer, lineage=lineage) as roles:
            if halves is not None:
                _pin(processes.engines[0].handle.pid, halves[0])
                _pin(processes.trainers[0].handle.pid, halves[1])
            yield _Rig(recipe, roles, observer, lineage)


def _pin(process: int, cores: set[int]) -> None:
    """Pin all threads of a process; threads started later inherit it."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
