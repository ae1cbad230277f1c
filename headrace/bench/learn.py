"""`headrace bench learn`: does the quickstart learn, from its warm-up to its last step, over several seeds?

Each seed has its own weights, warm-up, tasks and held-out tasks. The schedule is the recipe's; nothing was tuned on held-out
tasks. `--losses` does the same for each loss named, with the constants below.
"""

from __future__ import annotations

import functools
import math
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


def run(*, seeds: int | None = None, losses: str | None = None, quick: bool, json_file: Path | None) -> int:
    """One whole quickstart per seed, and per loss if any are named; `--quick` runs two seeds for a few steps."""
    steps = 10 if quick else None
    if losses is None:
        parts = {"seeds": functools.partial(_learn, "", seeds or (2 if quick else 5), steps=steps)}
    else:
        count = seeds or (2 if quick else 3)
        parts = {
            loss: functools.partial(_learn, f"{loss}, ", count, steps=steps, train={"loss": loss, **LOSSES[loss]})
            for loss in choose_losses(losses)
        }
    return run_parts("learn", parts, quick=quick, json_file=json_file)


def choose_losses(names: str) -> list[str]:
    """Parse a comma-separated list; losses without constants here are rejected before training."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in LOSSES:
            raise ConfigError(f"--losses = {names}: {name!r} is none of those with constants here: {', '.join(LOSSES)}")
    if not chosen:
        raise ConfigError(f"--losses = {names!r}: name at least one of {', '.join(LOSSES)}")
    return chosen


def _learn(title: str, seeds: int, *, steps: int | None, **settings: Any) -> Iterator[list[Row]]:  # noqa: ANN401  (of a recipe)
    after = []
    for seed in range(seeds):
        summary, name = _train(seed, steps=steps, **settings), f"{title}seed {seed}"
        after.append(summary["success_after"])
        yield [
            Row(f"{name}: success before", summary["success_before"], "share", goal="0.20 to 0.40"),
            Row(f"{name}: greedy before", summary["greedy_before"], "share", goal="≤ 0.60"),
            Row(f"{name}: success after", summary["success_after"], "share", goal="≥ 0.95"),
            Row(f"{name}: greedy after", summary["greedy_after"], "share"),
            Row(f"{name}: RL", summary["seconds"]["rl"], "s", goal="≤ 90"),
            Row(f"{name}: mean lag", summary["lag"]["mean"], "versions"),
        ]
    yield [Row(f"{title}all seeds: least success after", min(after), "share", goal="≥ 0.95")]


def _train(seed: int, *, steps: int | None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401  (sections of a recipe)
    with tempfile.TemporaryDirectory() as folder:
        result = headrace.train(recipe=RECIPE, steps=steps, seed=seed, run_dir=Path(folder) / "run", quiet=True, **settings)
    judged = ("success_before", "success_after", "greedy_before", "greedy_after")
    return {**result.summary, **{name: math.nan for name in judged if result.summary[name] is None}}  # NaN misses every goal
