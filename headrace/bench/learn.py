"""`headrace bench learn`: does the quickstart learn, from its warm-up to its last step, over several seeds?

Each seed has its own weights, warm-up, tasks and held-out tasks. The schedule is the recipe's; nothing is chosen after
looking at a held-out task.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import headrace
from headrace.bench.table import Row, show, write

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
_QUICK_STEPS = 20


def run(*, seeds: int = 5, quick: bool, json_file: Path | None) -> int:
    """One full quickstart per seed; status 1 if a seed misses a goal. `--quick` runs one seed for a few steps."""
    rows: list[Row] = []
    after: list[float] = []
    missed: list[str] = []
    for seed in range(1 if quick else seeds):
        summary = _train(seed, steps=_QUICK_STEPS if quick else None)
        rows += _rows(seed, summary)
        after.append(summary["success_after"])
        missed += [f"seed {seed}: {goal}" for goal in missed_goals(summary)]
        print(
            f"seed {seed}: held-out {summary['success_before']:.1%} -> {summary['success_after']:.1%}, greedy "
            f"{summary['greedy_before']:.1%} -> {summary['greedy_after']:.1%}, {summary['seconds']['rl']:.1f} s of RL, "
            f"lag {summary['lag']['mean']:.2f}",
            flush=True,
        )
    rows.append(Row("least success after, all seeds", min(after), "share", goal="≥ 0.95"))
    rows.append(Row("median success after", statistics.median(after), "share"))
    show("learn", rows)
    if json_file is not None:
        write("learn", rows, json_file)
    if quick:
        return 0
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def missed_goals(summary: dict[str, Any]) -> list[str]:
    """What a whole run was to show and did not."""
    goals = {
        "20 to 40 % sampled before RL": 0.2 <= summary["success_before"] <= 0.4,
        "at most 60 % greedy before RL": summary["greedy_before"] <= 0.6,
        "at least 95 % sampled after": summary["success_after"] >= 0.95,
        "at most 90 s of RL": summary["seconds"]["rl"] <= 90,
    }
    return [goal for goal, is_met in goals.items() if not is_met]


def _train(seed: int, *, steps: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = headrace.train(recipe=RECIPE, steps=steps, seed=seed, run_dir=Path(folder) / "run", quiet=True)
    return result.summary


def _rows(seed: int, summary: dict[str, Any]) -> list[Row]:
    seconds = summary["seconds"]
    return [
        Row(f"seed {seed}: success before", summary["success_before"], "share", goal="0.20 to 0.40"),
        Row(f"seed {seed}: greedy before", summary["greedy_before"], "share", goal="≤ 0.60"),
        Row(f"seed {seed}: success after", summary["success_after"], "share", goal="≥ 0.95"),
        Row(f"seed {seed}: greedy after", summary["greedy_after"], "share"),
        Row(f"seed {seed}: RL", seconds["rl"], "s", goal="≤ 90"),
        Row(f"seed {seed}: mean lag", summary["lag"]["mean"], "versions"),
    ]
