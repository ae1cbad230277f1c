"""`headrace bench sparse`: does a task learn that almost never pays at first? With and without `[filter]` and `[sampler]`.

The reward is all or nothing. One training row in ten has 5 to 8 digits to sort; the answers of the others are shuffled, so that
they stay out of reach whatever the policy learns. SFT on at most 4 digits ends when about 0.5 % of the samples are right.
Each seed is trained twice, first with tied groups dropped and learnable tasks preferred, then plainly, until it has sampled at
least as many tokens. Held out are rows to sort. A seed has learned if half of them are solved at temperature 1.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import headrace
from headrace.bench.harness import Row, run_parts
from headrace.bench.learn import RECIPE
from headrace.tasks import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.records import Plain

STEPS, SEEDS, NUM_ROWS = 30, 5, 20_000
OPTIONS = {"min_length": 5}
SHARE = 0.1
"""Of the training rows that can be solved."""
SETTINGS: dict[str, Any] = {
    "evaluate.tasks.0.options": OPTIONS,
    "evaluate.every": 0,
    "sft.until_success": 0.005,
    "sft.check_every": 5,
    "train.schedule": "constant",  # the two runs have different numbers of steps
    "train.final_learning_rate": 0.0,
}
SELECTIVE: dict[str, Any] = {"filter.max_tied": 0.0, "sampler.kind": "learnable"}


def run(*, only: str | None = None, quick: bool, json_file: Path | None) -> int:
    """A part for each seed; `--quick` trains one for two steps."""
    steps, seeds = (2, 1) if quick else (STEPS, SEEDS)
    parts = {f"seed-{seed}": functools.partial(_compare, seed, steps=steps, quick=quick) for seed in range(seeds)}
    return run_parts("sparse", parts, quick=quick, json_file=json_file, only=only)


def exact(prompt: object, completion: str, answer: str, **_: object) -> float:
    return float(completion == answer)


def make_rows(seed: int, count: int) -> list[dict[str, Plain]]:
    """Rows of which the share `SHARE` can be solved."""
    source, random = open_source("builtin:sort_digits", seed=seed, split="train", options=OPTIONS), np.random.default_rng(seed)
    rows = [source.row(index) for index in range(count)]
    for row in rows:
        if random.random() >= SHARE:
            row["answer"] = "".join(random.permutation(list(str(row["answer"]))))
    return rows


def _compare(seed: int, *, steps: int, quick: bool) -> Iterator[list[Row]]:
    settings = {**SETTINGS, **({"sft.steps": 5, "evaluate.limit": 16} if quick else {})}
    train = functools.partial(
        headrace.train, recipe=RECIPE, tasks=make_rows(seed, 500 if quick else NUM_ROWS), reward=exact, seed=seed, quiet=True
    )
    with tempfile.TemporaryDirectory() as folder:
        found = train(steps=steps, run_dir=Path(folder) / "selective", **settings, **SELECTIVE).summary
        budget, sampled, made = found["tokens"]["sampled"], 0, 0
        while sampled < budget:  # answers may become shorter or longer: continue the run for what is missing
            per_step = sampled / made if made else 256 * 10.0  # at first, rollouts a batch and the most tokens of each
            made += max(1, round((budget - sampled) / max(per_step, 1)))
            plain = train(steps=made, run_dir=Path(folder) / "plain", **settings).summary
            sampled = plain["tokens"]["sampled"]
    after: dict[str, Any] = {"goal": "≥ 0.5", "peers": {"plain": plain["success_after"]}}
    yield [
        Row(f"seed {seed}: success before", found["success_before"], "share", peers={"plain": plain["success_before"]}),
        Row(f"seed {seed}: success after", found["success_after"], "share", **after),
        Row(f"seed {seed}: sampled tokens", budget, "tokens", peers={"plain": sampled}),
        Row(f"seed {seed}: versions", steps, "versions", peers={"plain": made}),
        Row(f"seed {seed}: RL", found["seconds"]["rl"], "s", peers={"plain": plain["seconds"]["rl"]}),
    ]
