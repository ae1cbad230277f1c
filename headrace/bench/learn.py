"""`headrace bench learn`: does the quickstart learn, from its warm-up to its last step, over several seeds?

Each seed has its own weights, warm-up, tasks and held-out tasks. The schedule is the recipe's; nothing was tuned on held-out
tasks. `--losses` does the same for each loss named, with the constants below.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.bench.harness import Row, run_parts
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"constants": {"clip_low": 0.2, "clip_high": 0.28}},
    "cispo": {"constants": {"clip_low": 1.0, "clip_high": 4.0}},
    "gspo": {"constants": {"clip_low": 0.03, "clip_high": 0.04}},
    "decoupled_ppo": {"constants": {"clip_low": 0.2, "clip_high": 0.28, "cap": 5.0}},
}
"""`[train]` settings for each loss. GSPO's published 3e-4 and 4e-4 are for models with steps a thousand times smaller."""
_QUICK_STEPS = 10


def run(*, seeds: int | None = None, losses: str | None = None, quick: bool, json_file: Path | None) -> int:
    """One whole quickstart per seed, and per loss if any are named; `--quick` runs two seeds for a few steps."""
    steps = _QUICK_STEPS if quick else None
    if losses is None:
        parts = {"seeds": lambda: _of_seeds(seeds or (2 if quick else 5), steps=steps)}
    else:
        chosen = choose_losses(losses)
        parts = {"losses": lambda: _of_losses(chosen, seeds=seeds or (2 if quick else 3), steps=steps)}
    return run_parts("learn", parts, quick=quick, json_file=json_file)


def choose_losses(names: str) -> list[str]:
    """Parse a comma-separated list; unknown losses, and those without constants here, are rejected before training."""
    from headrace.algorithms import resolve_loss

    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in LOSSES:
            raise ConfigError(f"--losses = {names}: {name!r} is none of those with constants here: {', '.join(LOSSES)}")
        resolve_loss(name)
    if not chosen:
        raise ConfigError(f"--losses = {names!r}: name at least one of {', '.join(LOSSES)}")
    return chosen


def _of_seeds(seeds: int, *, steps: int | None) -> Iterator[list[Row]]:
    after = []
    for seed in range(seeds):
        summary = _train(seed, steps=steps)
        after.append(summary["success_after"])
        yield _rows(seed, summary)
    yield [
        Row("least success after, all seeds", min(after), "share", goal="≥ 0.95"),
        Row("median success after", statistics.median(after), "share"),
    ]


def _of_losses(losses: list[str], *, seeds: int, steps: int | None) -> Iterator[list[Row]]:
    for loss in losses:
        after = []
        for seed in range(seeds):
            summary = _train(seed, steps=steps, train={"loss": loss, **LOSSES[loss]})
            after.append(summary["success_after"])
            yield [Row(f"{loss}, seed {seed}: success after", after[-1], "share", goal="≥ 0.95")]
        yield [Row(f"{loss}: least success after", min(after), "share", goal="≥ 0.95")]


def _train(seed: int, *, steps: int | None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401  (sections of a recipe)
    with tempfile.TemporaryDirectory() as folder:
        result = headrace.train(recipe=RECIPE, steps=steps, seed=seed, run_dir=Path(folder) / "run", quiet=True, **settings)
    judged = ("success_before", "success_after", "greedy_before", "greedy_after")
    return {**result.summary, **{name: math.nan for name in judged if result.summary[name] is None}}  # NaN misses every goal


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
