"""`headrace bench overlap`: how near generation and training, side by side, come to the slower of the two alone.

Four measurements take turns, and each figure is the median of its turns: both roles in their own processes (async);
generation alone and training alone, in the same processes with the same threads while the other role is a stub that takes
no time; and the synchronous run, in which both have all the cores in turn. Every rollout has the same number of tokens, so
that tokens a second mean the same in all of them.

Where there are cores for both, the trainer is pinned to its half and the engine and the launcher to the other, in every
measurement but the synchronous one: the cores are disjoint. The bound is the slower role alone, or what the cores could do
if they never idled, whichever is less: a token takes so many seconds of a core to generate, to train and to carry.
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

import numpy as np

from headrace.bench.stubs import StubTrainer
from headrace.bench.table import Row, report
from headrace.config import make_recipe
from headrace.engine import EngineState, Increment, InFlight, append_call
from headrace.launch import LocalProcesses, UserInputs, model_folder, set_threads
from headrace.observe import WAITING, Observer
from headrace.partial import Interrupt
from headrace.records import Call, FinishReason, Rollout, Sampling
from headrace.run import POLICY, Run, few_collections, leg, run_loops
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from headrace.config import Recipe
    from headrace.engine import Engine
    from headrace.records import Array, WeightUpdate
    from headrace.run import Roles

Halves = tuple[set[int], set[int]]
_LAG = 2


@dataclass(frozen=True)
class Case:
    """A model and a load."""

    name: str
    model: dict[str, Any]
    tokens: int
    batch: int
    versions: int
    """Measured in one turn, after two that warm up."""


CASES = (
    Case("quickstart", {"path": "builtin:tiny"}, tokens=10, batch=256, versions=20),
    Case(
        "larger",
        {"path": "builtin:tiny", "hidden_size": 256, "num_layers": 6, "num_heads": 4, "context": 128},
        tokens=64,
        batch=64,
        versions=4,
    ),
)


@dataclass(frozen=True)
class Turn:
    """What one measurement saw."""

    tokens_per_second: float
    launcher: float
    """Seconds of a core the launcher took for each token."""
    budget: dict[str, dict[str, float]]

    def working(self, role: str) -> float:
        """The share of the time in which the role computed."""
        return 1.0 - sum(share for state, share in self.budget[role].items() if state in WAITING)


def run(*, quick: bool, json_file: Path | None) -> int:
    """Status 1 if a goal is missed; `--quick` takes two turns of a few small batches, and judges nothing."""
    rows: list[Row] = []
    for case in CASES:
        chosen = dataclasses.replace(case, tokens=10, batch=16, versions=2) if quick else case
        rows += asyncio.run(_measure(chosen, turns=2 if quick else 5))
    return report("overlap", rows, json_file=json_file, quick=quick)


async def _measure(case: Case, *, turns: int) -> list[Row]:
    cores = os.cpu_count() or 1
    share = max(1, cores // 2)
    seen: dict[str, list[Turn]] = {name: [] for name in ("async", "generation", "training", "sync")}
    with tempfile.TemporaryDirectory() as folder:
        shared, whole = _recipe(case, threads=share, lag=_LAG), _recipe(case, threads=cores, lag=0)
        set_threads(shared)
        halves = (set(range(share)), set(range(share, cores))) if cores > 1 else None
        async with (
            _rig(shared, Path(folder) / "shared", halves=halves) as beside,
            _rig(whole, Path(folder) / "whole") as in_turn,
        ):
            for _ in range(turns):
                with _launcher_on(halves):
                    seen["async"].append(await beside.turn(case))
                    seen["generation"].append(await beside.turn(case, has_trainer=False))
                    seen["training"].append(await beside.turn(case, has_engine=False))
                seen["sync"].append(await in_turn.turn(case))
    return _rows(case, seen, cores=cores)


def _rows(case: Case, seen: dict[str, list[Turn]], *, cores: int) -> list[Row]:
    rate = {name: statistics.median(turn.tokens_per_second for turn in turns) for name, turns in seen.items()}
    launcher = statistics.median(turn.launcher for turn in seen["async"])
    slower = min(rate["generation"], rate["training"])
    share = max(1, cores // 2)
    work = {
        role: share * statistics.median(turn.working(role) / turn.tokens_per_second for turn in seen[alone])
        for role, alone in (("engine", "generation"), ("trainer", "training"))
    }
    bound = min(slower, cores / (work["engine"] + work["trainer"] + launcher))

    def of(role: str, state: str) -> float:
        return statistics.median(turn.budget[role][state] for turn in seen["async"])

    def pace(role: str, alone: str) -> float:
        """How much longer the same work takes beside the other role: what the processes share beyond cores."""
        per_token = [
            statistics.median(t.working(role) / t.tokens_per_second for t in seen[which]) for which in ("async", alone)
        ]
        return per_token[0] / per_token[1]

    name = case.name
    return [
        Row(f"{name}: async", rate["async"], "tokens/s", bound=bound),
        Row(f"{name}: generation alone", rate["generation"], "tokens/s"),
        Row(f"{name}: training alone", rate["training"], "tokens/s"),
        Row(f"{name}: sync, all cores in turn", rate["sync"], "tokens/s"),
        Row(f"{name}: async ÷ slower alone", rate["async"] / slower, "ratio", goal="≥ 0.97", bound=bound / slower),
        Row(f"{name}: async ÷ bound", rate["async"] / bound, "ratio"),
        Row(f"{name}: async ÷ sync", rate["async"] / rate["sync"], "ratio"),
        Row(f"{name}: trainer idle", of("trainer", "wait-batch"), "share", goal="≤ 0.03"),
        Row(f"{name}: trainer descheduled", of("trainer", "descheduled"), "share"),
        Row(f"{name}: trainer's work per token, async ÷ alone", pace("trainer", "training"), "ratio"),
        Row(f"{name}: engine's work per token, async ÷ alone", pace("engine", "generation"), "ratio"),
        Row(f"{name}: trainer publishing", of("trainer", "publish"), "share"),
        Row(f"{name}: engine waiting at the gate", of("engine", "wait-gate"), "share"),
        Row(f"{name}: engine descheduled", of("engine", "descheduled"), "share"),
        Row(f"{name}: engine swapping", of("engine", "swap"), "share"),
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
            "staleness": {"max_lag": lag, "reject": False},
            "sync": {"canary_limit": 1e9},  # a stub knows no logprobs
        }
    )


class _Rig:
    """Processes that are started once and measured often."""

    def __init__(self, recipe: Recipe, roles: Roles, observer: Observer, lineage: Lineage) -> None:
        self._recipe, self._roles, self._observer, self._lineage = recipe, roles, observer, lineage
        self._version = 0
        """The processes live on from turn to turn, and an engine refuses an older version than the one it holds."""

    async def turn(self, case: Case, *, has_engine: bool = True, has_trainer: bool = True) -> Turn:
        """One run of the loops over `case.versions` versions, from its third on, after those of the turns before."""
        moments: list[tuple[float, float]] = []
        tokens = case.batch * case.tokens

        async def after_version(_: object) -> None:
            if len(moments) == 1:
                await roles.refresh()
                self._observer.start()
            moments.append((time.perf_counter(), time.process_time()))

        roles = self._stubbed(case, has_engine=has_engine, has_trainer=has_trainer)
        run = Run(
            self._recipe,
            roles,
            lineage=self._lineage,
            observer=self._observer,
            on_trained=lambda *_: None,
            after_version=after_version,
        )
        policy = run.policies[POLICY]
        policy.version = policy.held_version = self._version
        policy.submitted_groups = self._version * self._recipe.train.groups_per_batch
        run.leg_end = self._version = self._version + case.versions + 2
        with few_collections():
            async with leg(run):
                await run_loops(run)
                await roles.refresh()
                budget = self._observer.budget()
                await policy.published()
        (began, began_cpu), (ended, ended_cpu) = moments[1], moments[-1]
        trained = tokens * case.versions
        return Turn(trained / (ended - began), (ended_cpu - began_cpu) / trained, budget)

    def _stubbed(self, case: Case, *, has_engine: bool, has_trainer: bool) -> Roles:
        roles = dataclasses.replace(self._roles, stop_ids=())  # so that every rollout has all its tokens
        if not has_engine:
            roles = dataclasses.replace(roles, engine=InstantEngine(tokens=case.tokens))
        if not has_trainer:
            trainers = {POLICY: InstantTrainer(self._lineage)}
            roles = dataclasses.replace(roles, engine=Unchanging(roles.engine), trainers=trainers)
        return roles


def _pin(process: int, cores: set[int]) -> None:
    """Every thread that a process has; those it begins later inherit it."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


@contextlib.contextmanager
def _launcher_on(halves: Halves | None) -> Iterator[None]:
    """This process beside the engine, not the trainer."""
    if halves is None:
        yield
        return
    before = os.sched_getaffinity(0)
    _pin(os.getpid(), halves[0])
    try:
        yield
    finally:
        _pin(os.getpid(), before)


@contextlib.asynccontextmanager
async def _rig(recipe: Recipe, folder: Path, *, halves: Halves | None = None) -> AsyncIterator[_Rig]:
    (folder / "logs").mkdir(parents=True)
    given = UserInputs()
    with LocalProcesses(recipe, folder) as processes, contextlib.ExitStack() as held:
        path = await asyncio.to_thread(held.enter_context, model_folder(recipe, given, say=lambda _: None))
        observer, lineage = Observer(elsewhere=processes.reporting_roles), Lineage.new()
        async with processes.roles(path, given, observer=observer, lineage=lineage) as roles:
            if halves is not None:
                _pin(processes.engines[0].handle.pid, halves[0])
                _pin(processes.trainer.handle.pid, halves[1])
            yield _Rig(recipe, roles, observer, lineage)


class InstantEngine:
    """Answers at once, with tokens made up beforehand."""

    def __init__(self, *, tokens: int) -> None:
        self._tokens = tokens
        self._drawn = self._version = 0
        self._lineage = ""

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        await asyncio.sleep(0)
        count, start = self._tokens, len(rollout)
        self._drawn += count
        call = Call(
            start=start,
            stop=start + count,
            engine="stub",
            sampling=sampling,
            finish_reason=FinishReason.LENGTH,
            started=0.0,
            finished=0.0,
        )
        return append_call(
            rollout,
            call,
            token_ids=np.full(count, 10 + self._drawn // count % 7, dtype=np.int32),
            logprobs=np.full(count, -1.0, dtype=np.float32),
            versions=np.full(count, self._version, dtype=np.int32),
            masks=[],
            policy="policy",
            lineage=self._lineage,
        )

    async def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        raise NotImplementedError("nobody streams here")
        yield

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]

    async def pause(self, interrupt: Interrupt) -> None:
        """Nothing is ever in flight."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        self._version, self._lineage = update.version, update.lineage

    async def state(self) -> EngineState:
        return EngineState(self._version, self._lineage, 0, 0, 1, 1, self._drawn)

    async def in_flight(self) -> list[InFlight]:
        return []  # nothing is ever half drawn


class Unchanging(InstantEngine):
    """A real engine whose weights stay as they are: its trainer has none to send."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(tokens=0)
        self._engine = engine

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        return await self._engine.generate(rollout, sampling)

    async def state(self) -> EngineState:
        return await self._engine.state()


class InstantTrainer(StubTrainer):
    """Has trained as soon as it is asked, and takes its turn as one in another process does."""

    is_inline = False
