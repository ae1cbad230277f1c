"""`headrace bench learn`: does the quickstart learn, from SFT to its last step, over several seeds?

Each seed has its own weights, SFT, tasks and held-out tasks. The schedule is the recipe's; nothing was tuned on held-out
tasks. `--losses` does the same for each loss or `algorithm=NAME` named, or for `all`, with the settings below.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.algorithms import NAMED
from headrace.bench.harness import Row, run_parts
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"constants": {"clip_low": 0.2, "clip_high": 0.28}},
    "grpo+dual_clip": {"loss": "grpo", "constants": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}},
    "cispo": {"constants": {"clip_low": 1.0, "clip_high": 4.0}},
    "gspo": {"constants": {"clip_low": 0.03, "clip_high": 0.04}},
    "luspo": {"constants": {"clip_low": 0.03, "clip_high": 0.04}},
    "gmpo": {"constants": {"clip_low": 0.4, "clip_high": 0.4}},
    "sapo": {"constants": {"tau_positive": 1.0, "tau_negative": 1.05}, "loss_mean": "sequence"},
    "vespo": {"constants": {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}},
    "kimi": {"constants": {"tau": 0.01}, "scale_rewards": "none"},
    "reinforce": {"advantage": "leave_one_out"},
    "topr": {},
    "decoupled_ppo": {"constants": {"clip_low": 0.2, "clip_high": 0.28, "cap": 5.0}},
    "a3po": {"constants": {"clip_low": 0.2, "clip_high": 0.28, "cap": 5.0}},
    "dppo": {"constants": {"mask": 0.2, "cap": 10.0, "tau": 0.001}},
    "m2po": {},
    "aipo": {"constants": {"cap": 4.0}},
    "ppo": {"constants": {"clip_low": 0.2, "clip_high": 0.2}, "advantage": "gae"},
}
"""`[train]` settings for each loss. GSPO's published 3e-4 and 4e-4, and LUSPO's 2e-3 and 2.5e-3, are for models with steps a
thousand times smaller. `distill` needs a teacher, `supervised` is SFT's."""
RUNS: dict[str, dict[str, Any]] = {
    **{name: {"train": {"loss": name, **settings}} for name, settings in LOSSES.items()},
    **{
        f"algorithm={name}": {
            "algorithm": name,
            "train": {"learning_rate": 1e-3 / settings.get("train.mini_batches", 1)},
            **({"sampling": {"max_tokens": 12}} if "reward.overlong_buffer" in settings else {}),
        }
        for name, settings in NAMED.items()
    },
}
"""What each name sets over the recipe. Its learning rate is for one optimizer step a version: at 16 steps of it a model of this
size forgets what it knew, so an algorithm that makes more steps makes smaller ones. Right answers have up to 9 tokens: of the
recipe's 10, a punishment of the last fifth would make it worth leaving a digit off."""


def run(
    *, seeds: int | None = None, losses: str | None = None, steps: int | None = None, quick: bool, json_file: Path | None
) -> int:
    """One whole quickstart per seed, and per loss if any are named; `--quick` runs two seeds for a few steps."""
    steps = steps or (10 if quick else None)
    if losses is None:
        parts = {"seeds": functools.partial(_learn, "", seeds or (2 if quick else 5), steps=steps)}
    else:
        count = seeds or (2 if quick else 3)
        parts = {
            loss: functools.partial(_learn, f"{loss}, ", count, steps=steps, **RUNS[loss]) for loss in choose_losses(losses)
        }
    return run_parts("learn", parts, quick=quick, json_file=json_file)


def choose_losses(names: str) -> list[str]:
    """Parse a comma-separated list; names without settings here are rejected before training."""
    chosen = list(RUNS) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in RUNS:
            raise ConfigError(f"--losses = {names}: {name!r} is none of those with settings here: {', '.join(RUNS)}")
    if not chosen:
        raise ConfigError(f"--losses = {names!r}: name at least one of {', '.join(RUNS)}, or all")
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
