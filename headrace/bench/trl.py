"""`headrace bench trl`: the same model learns the same task with TRL and with Headrace; which is there first?

On a CPU it is the quickstart, warmed up once per seed for both. On a GPU `--model` learns to reverse lists of numbers, and
TRL samples with vLLM. Tasks, batch, group size, loss, advantages, optimizer and learning rates are equal, nothing is evaluated
meanwhile, and one reward function notes the time of every sample it scores. Headrace runs as its recipe says, asynchronously.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import headrace
from headrace.bench.child import Child
from headrace.bench.harness import Row, default_device, run_parts, say
from headrace.bench.learn import RECIPE
from headrace.bench.step_trl import grpo_config, missing_modules
from headrace.config import load_recipe, make_recipe
from headrace.launch import UserInputs, model_folder
from headrace.settings import ConfigError
from headrace.tasks import open_source
from headrace.trainer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.records import Array

GOAL = 0.95
_WINDOW = 4  # batches over which success is averaged
_SECONDS = 900.0
_ON_GPU: dict[str, Any] = {
    "steps": 150,
    "model.dtype": "bfloat16",
    "model.context": 512,
    "sampling.max_tokens": 24,
    "staleness.max_lag": 1,
    "train.learning_rate": 3e-5,
    "train.warmup_steps": 10,
}
_ALONE: dict[str, Any] = {"evaluate.every": 0, "evaluate.tasks": [], "sft.steps": 0}
_SHOWN = ("3 81", "40 7 62", "19 5 77 30", "58 26")


class Curve(NamedTuple):
    """The samples of a run, in the order they were scored."""

    seconds: Array  # since training began
    rewards: Array
    setup: float  # seconds from the command until training began
    batch: int

    @property
    def success(self) -> Array:
        """The share of right answers among the last samples, after each of them."""
        width = _WINDOW * self.batch
        sums = np.cumsum(np.concatenate([np.zeros(width), self.rewards >= 1.0]))
        return np.asarray((sums[width:] - sums[:-width]) / width)

    @property
    def reached(self) -> float:
        """Seconds of training until success is at the goal; NaN if it never is."""
        there = np.flatnonzero(self.success >= GOAL)
        return float(self.seconds[there[0]]) if len(there) else math.nan

    def points(self) -> list[tuple[float, float]]:
        """(Seconds, mean reward) of each batch."""
        ends = range(self.batch, len(self.rewards) + 1, self.batch)
        return [(float(self.seconds[end - 1]), float(self.rewards[end - self.batch : end].mean())) for end in ends]


def run(*, seeds: int | None = None, model: str | None = None, quick: bool, json_file: Path | None) -> int:
    """Both learn in turn, seed after seed; `--quick` takes one seed and a few steps."""
    device = default_device()
    if (device == "cuda") != (model is not None):
        raise ConfigError("--model: needed on a GPU, the folder of a small chat model such as SmolLM2; on a CPU it is built in")
    if missing := missing_modules(device):
        raise ConfigError(f"bench trl: {', '.join(missing)} not installed; `pip install headrace[dev]` has TRL")
    compare = functools.partial(_compare, seeds or (1 if quick else 3), model, steps=8 if quick else None)
    return run_parts("trl", {"learning": compare}, quick=quick, json_file=json_file)


def _compare(seeds: int, model: str | None, *, steps: int | None) -> Iterator[list[Row]]:
    threads, given = 0, {} if steps is None else {"steps": steps}
    for seed in range(seeds):
        settings = {**(_ON_GPU if model else {}), **given, "seed": seed}
        recipe = load_recipe(RECIPE, settings) if model is None else make_recipe(settings)
        start = model_folder(recipe, UserInputs(), say=say) if model is None else contextlib.nullcontext(model)
        with tempfile.TemporaryDirectory(prefix="headrace-trl-") as place, start as folder:
            rows = _tasks(model, seed=seed, count=recipe.steps * recipe.train.groups_per_batch)
            order = {"model": folder, "settings": settings, "rows": rows, "place": place, "is_on_gpu": model is not None}
            if model is None and not threads:
                threads = _fastest_threads({**order, "settings": {**settings, "steps": 8}})
            ours = _learn("Headrace", "learn_here", order)
            theirs = _learn("TRL", "learn_with_trl", {**order, "threads": threads})
        yield _rows(seed, ours, theirs)


def _fastest_threads(order: dict[str, Any]) -> int:
    """Threads of torch with which TRL's steps take the least time on this machine."""
    took = {}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        seconds = _learn("TRL", "learn_with_trl", {**order, "threads": threads}).points()
        took[threads] = float(np.median(np.diff([second for second, _ in seconds])))
        say(f"TRL with {threads} thread(s): {took[threads]:.3g} s a step")
    return min(took, key=lambda threads: took[threads])


def _learn(name: str, function: str, order: dict[str, Any]) -> Curve:
    log, commanded = Path(order["place"]) / f"{name}.log", time.time()
    with Child(name, f"headrace.bench.trl:{function}", order, log=log) as child:
        began, samples, batch = child.hear(seconds=_SECONDS)
    moments, rewards = np.asarray(samples).T
    return Curve(moments - began, rewards, began - commanded, batch)


def _rows(seed: int, ours: Curve, theirs: Curve) -> list[Row]:
    def row(what: str, unit: str, value: Callable[[Curve], float]) -> Row:
        return Row(f"seed {seed}: {what}", value(ours), unit, peers={"TRL": value(theirs)})

    is_reached = math.isfinite(ours.reached) or math.isfinite(theirs.reached)
    return [
        *([row(f"RL to {GOAL:.0%} success", "s", lambda curve: curve.reached)] if is_reached else []),
        row("from the command to RL", "s", lambda curve: curve.setup),
        row("all steps", "s", lambda curve: float(curve.seconds[-1])),
        row(f"success in the last {_WINDOW} batches", "share", lambda curve: float(curve.success[-1])),
        *(
            Row(f"seed {seed}: reward of the last batch, {name}", curve.points()[-1][1], "mean", curve=curve.points())
            for name, curve in (("Headrace", ours), ("TRL", theirs))
        ),
    ]


def _tasks(model: str | None, *, seed: int, count: int) -> list[dict[str, Any]]:
    if model is None:
        source = open_source("builtin:sort_digits", seed=seed, split="train")
        return [source.row(index) for index in range(count)]
    random = np.random.default_rng(seed)
    shown = "".join(f"{numbers} -> {_reversed(numbers)}\n" for numbers in _SHOWN)
    rows = []
    for _ in range(count):
        numbers = " ".join(map(str, random.integers(1, 100, size=random.integers(2, 6))))
        text = f"Write the numbers in reverse order, and nothing else.\n{shown}{numbers} ->"
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": _reversed(numbers)})
    return rows


def _reversed(numbers: str) -> str:
    return " ".join(numbers.split()[::-1])


class _Samples:
    """The reward of both: the share of right places, as in `builtin:sort_digits`, by digit or by number."""

    __name__ = "right"

    def __init__(self, *, by_number: bool) -> None:
        self._by_number = by_number
        self.seen: list[tuple[float, float]] = []  # (moment, reward)

    def __call__(self, prompts: list[Any], completions: list[Any], answer: list[str], **_: object) -> list[float]:
        parts = str.split if self._by_number else list[str]
        pairs = [(parts(given[0]["content"]), parts(wanted)) for given, wanted in zip(completions, answer, strict=True)]
        found = [sum(map(operator.eq, given, wanted)) / max(len(given), len(wanted)) for given, wanted in pairs]
        now = time.time()
        self.seen += [(now, value) for value in found]
        return found


def learn_here(order: dict[str, Any], orders: Iterator[Any]) -> Iterator[tuple[float, list[tuple[float, float]], int]]:
    """Runs in Headrace's process: when training began, the samples and the size of a batch."""
    samples = _Samples(by_number=order["is_on_gpu"])
    called = time.time()
    result = headrace.train(
        order["model"],
        recipe=None if order["is_on_gpu"] else RECIPE,
        tasks=order["rows"],
        reward=samples,
        run_dir=Path(order["place"]) / "run",
        quiet=True,
        **order["settings"],
        **_ALONE,
    )
    seconds = result.summary["seconds"]
    yield called + seconds["setup"] + seconds["warmup"], samples.seen, load_recipe(RECIPE).train.batch


def learn_with_trl(order: dict[str, Any], orders: Iterator[Any]) -> Iterator[tuple[float, list[tuple[float, float]], int]]:
    """Runs in TRL's process. The learning rates are ours, step by step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")  # for mypy, which may run without it
    is_on_gpu = order["is_on_gpu"]
    if not is_on_gpu:
        torch.set_num_threads(order["threads"])
    recipe = make_recipe(order["settings"]) if is_on_gpu else load_recipe(RECIPE, order["settings"])
    train, samples = recipe.train, _Samples(by_number=is_on_gpu)
    began: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            began.append(time.time())

    config = grpo_config(
        is_on_gpu=is_on_gpu,
        output_dir=order["place"],
        max_steps=recipe.steps,
        per_device_train_batch_size=train.batch,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        num_generations=train.group_size,
        max_completion_length=recipe.sampling.max_tokens,
        loss_type="dapo",  # the mean over the batch's tokens
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=train.learning_rate,
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        seed=recipe.seed,
        shuffle_dataset=False,
        logging_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=order["model"],
        args=config,
        reward_funcs=[samples],
        train_dataset=Dataset.from_list(order["rows"]),
        processing_class=AutoTokenizer.from_pretrained(order["model"], trust_remote_code=False, padding_side="left"),
        callbacks=[Clock()],
    )
    optimizer = trainer.create_optimizer()

    def factor(step: int) -> float:
        return learning_rate(train, version=step, steps=recipe.steps) / train.learning_rate

    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    trainer.train()
    yield began[0], samples.seen, train.batch
