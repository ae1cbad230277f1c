"""`headrace bench presets`: every preset on the same work, on an emulated cluster and for real.

The emulated cluster (`emulated`) puts timed stubs behind the real loops, gate, buffer and batches, in virtual time. The bound
of a load is what the slower of its two pools could do if it never waited: min(generation, training) in tokens a second. All
contestants get the same lengths, slots, truncation and trainer; only their settings differ.

For real, each trains the quickstart for the same number of seconds, from the same weights and with the same seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import headrace
from headrace.bench.emulated import emulate
from headrace.bench.emulated_load import Load
from headrace.bench.harness import Row, run_parts, say
from headrace.bench.learn import RECIPE
from headrace.config import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace.run import CallbackState

LOADS = (
    Load(name="trainer-bound", sigma=0.5, training=1.05),
    Load(name="engine-bound", sigma=0.5, training=0.95),
    Load(name="long tail", sigma=1.0, training=1.05),
)
_EVEN, _BOUND, _TAIL = LOADS
OTHERS = (
    *(dataclasses.replace(_TAIL, name=f"long tail, lengths {seed}", seed=seed) for seed in (1, 2)),
    *(dataclasses.replace(_TAIL, name=f"σ = {sigma}", sigma=sigma) for sigma in (0.8, 1.2)),
    dataclasses.replace(_TAIL, name="long tail, a slot for each rollout", slots=64),
    dataclasses.replace(_EVEN, name="a slot for each rollout", slots=64),
    dataclasses.replace(_EVEN, name="scores after 20 s", score_seconds=20.0),
    dataclasses.replace(_EVEN, name="8 groups, one engine", groups_per_batch=8, engines=1),
    dataclasses.replace(_EVEN, name="trainer 40 % slower", training=1.4),
    dataclasses.replace(_BOUND, name="engine-bound, lengths 1", seed=1),
    dataclasses.replace(_BOUND, name="trainer 30 % faster", training=0.7),
)
"""For the default alone: loads on which nothing of `max_lag = "auto"` was chosen."""
LENDING = (
    OTHERS[-1],
    dataclasses.replace(_BOUND, name="one engine, trainer twice as fast", engines=1, groups_per_batch=8, training=0.5),
)
"""For the default with and without `engine.lend`."""
OURS = "default"
"""The name of a recipe without a preset."""
CONTESTANTS: dict[str, dict[str, Any]] = {OURS: {}, **{name: {"preset": name} for name in PRESETS}}
_QUICK = ("trl", "areal", "pipelinerl")
_QUICK_SIZES: dict[str, Any] = {
    "engines": 2,
    "slots": 8,
    "groups_per_batch": 4,
    "warm_versions": 2,
    "versions": 4,
    "last_versions": 2,
}
_SECONDS = 12.0
"""Of RL, of each contestant that trains for real."""


def run(*, only: str | None = None, seeds: int | None = None, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes a few presets and small loads."""
    chosen = {name: own for name, own in CONTESTANTS.items() if not quick or name == OURS or name in _QUICK}
    loads = [dataclasses.replace(load, **_QUICK_SIZES) if quick else load for load in LOADS]
    parts: dict[str, Any] = {load.name: functools.partial(_emulated, load, chosen) for load in loads}
    others = [dataclasses.replace(load, **_QUICK_SIZES) for load in OTHERS[:1]] if quick else OTHERS
    parts["other loads"] = functools.partial(_others, others)
    lending = [dataclasses.replace(load, **_QUICK_SIZES) for load in LENDING[:1]] if quick else LENDING
    parts["lending"] = functools.partial(_lending, lending)
    few = {name: CONTESTANTS[name] for name in (OURS, _QUICK[0])}
    parts["real"] = functools.partial(
        _real, few if quick else chosen, seeds=range(seeds or 1), seconds=1.0 if quick else _SECONDS
    )
    return run_parts("presets", parts, quick=quick, json_file=json_file, only=only)


# The emulated cluster


GOALS = {
    "trainer-bound": {"share": "≥ 0.97", "trainer_idle": "≤ 0.03", "lag_mean": "≤ 2"},
    "engine-bound": {"share": "≥ 0.97", "lag_mean": "≤ 2"},
    "long tail": {"share": "≥ 0.95", "lag_mean": "≤ 2"},
}
FIGURES = {
    "share": ("share of the bound", "ratio"),
    "whole": ("with the first batches", "ratio"),
    "trainer_idle": ("trainer idle", "share"),
    "engine_idle": ("slots idle", "share"),
    "stall": ("stall per update", "s"),
    "lag_mean": ("mean lag", "versions"),
    "lag_max": ("largest lag", "versions"),
    "wasted": ("tokens wasted", "share"),
}


def _emulated(load: Load, contestants: Mapping[str, dict[str, Any]]) -> Iterator[list[Row]]:
    found = {name: dataclasses.asdict(emulate(load, settings)) for name, settings in contestants.items()}
    show_contestants(load.name, found, figures={name: title for name, (title, _) in FIGURES.items()}, best="share")
    yield [
        Row(
            f"{load.name}: {title}",
            found[OURS][figure],
            unit,
            goal=GOALS[load.name].get(figure, ""),
            peers=_peers(found, figure),
        )
        for figure, (title, unit) in FIGURES.items()
    ]


def _others(loads: Sequence[Load]) -> Iterator[list[Row]]:
    for load in loads:
        found = dataclasses.asdict(emulate(load, CONTESTANTS[OURS]))
        chosen = {figure: FIGURES[figure] for figure in ("share", "trainer_idle", "engine_idle", "lag_mean")}
        yield [Row(f"{load.name}: {title}", found[figure], unit) for figure, (title, unit) in chosen.items()]


def _lending(loads: Sequence[Load]) -> Iterator[list[Row]]:
    for load in loads:
        lent, alone = (dataclasses.asdict(emulate(load, {"engine.lend": lends})) for lends in (True, False))
        bounds = {"share": load.lending_bound / load.bound}
        yield [
            Row(
                f"{load.name}, lending: {title}", lent[figure], unit, bound=bounds.get(figure), peers={"without": alone[figure]}
            )
            for figure, (title, unit) in FIGURES.items()
            if figure in ("share", "trainer_idle", "lag_mean")
        ]


# For real


class _StopAfter:
    """A callback that ends a run after so many seconds of RL, and notes the reward of every version."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._started = seconds, 0.0
        self.curve: list[tuple[float, float]] = []

    def on_start(self, state: CallbackState) -> None:
        self._started = time.perf_counter()

    def on_step(self, state: CallbackState) -> None:
        passed = time.perf_counter() - self._started
        self.curve.append((passed, state.metrics["reward"]))
        if passed >= self._seconds:
            state.stop()


def _real(contestants: Mapping[str, dict[str, Any]], *, seeds: range, seconds: float) -> Iterator[list[Row]]:
    found = {}
    for name, settings in contestants.items():
        runs = [train_for_real(settings, seed=seed, seconds=seconds) for seed in seeds]
        found[name] = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        say(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()))
    figures = {"tokens": "tokens/s", "reward": f"reward after {seconds:g} s", "lag": "mean lag", "idle": "trainer idle"}
    show_contestants("quickstart", found, figures=figures, best="reward")
    yield [
        Row(f"quickstart: {title}", found[OURS][key], unit, peers=_peers(found, key))
        for (key, title), unit in zip(figures.items(), ("1/s", "mean", "versions", "share"), strict=True)
    ]


def train_for_real(settings: dict[str, Any], *, seed: int, seconds: float) -> dict[str, float]:
    """The quickstart for so many seconds of RL. `reward` is the mean of their last quarter."""
    clock = _StopAfter(seconds)
    alone: dict[str, Any] = {"evaluate.every": 0, "evaluate.tasks": [], **({} if seconds >= _SECONDS else {"sft.steps": 0})}
    with tempfile.TemporaryDirectory() as folder:
        result = headrace.train(
            recipe=RECIPE, seed=seed, run_dir=Path(folder) / "run", quiet=True, callbacks=[clock], **settings, **alone
        )
    summary, last = result.summary, [reward for passed, reward in clock.curve if passed >= 0.75 * clock.curve[-1][0]]
    return {
        "tokens": summary["tokens"]["trained"] / summary["seconds"]["rl"],
        "reward": float(np.mean(last)),
        "lag": summary["lag"]["mean"],
        "idle": summary["time_budget"]["trainer"]["wait-batch"],
    }


def _peers(found: Mapping[str, Mapping[str, float]], figure: str) -> dict[str, float]:
    return {name: each[figure] for name, each in found.items() if name != OURS}


def show_contestants(title: str, found: Mapping[str, Mapping[str, float]], *, figures: Mapping[str, str], best: str) -> None:
    """A line for each contestant, the best first."""
    table = Table(title=title, title_justify="left")
    table.add_column("preset")
    for name in figures.values():
        table.add_column(name, justify="right")
    for name, own in sorted(found.items(), key=lambda item: (-round(item[1][best], 3), item[1].get("lag_mean", 0.0))):
        table.add_row(name, *(f"{abs(own[figure]):.3f}" for figure in figures))
    Console(width=130).print(table)
