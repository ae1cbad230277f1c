"""`headrace bench lag`: what lag costs, by loss.

Engine and trainer take turns in one process, and the engine gets weights that are exactly `lag` versions old (version 0 while
there are no older ones), so every token of a batch has that lag. A version is one batch and one optimizer step. The task is
`builtin:sort_digits` with 5 to 8 digits; the reward is the share of right places, and is far from 1 at the end. All runs start
from one model, which SFT taught to sort 2 to 4 digits; seeds differ in tasks and sampling, and a seed has the same tasks at
every lag and with every loss. The curve is the mean reward of the batch that each version sampled, its area the mean over all
versions. The last `lag` versions are only sampled from.

The parts `paired` and `slower` compare the default algorithm at lag 8 and at lag 0, seed by seed, at two rates: what a
lag costs depends on how much is learned in so many versions. Each loss is a part of its own, at the fastest rate at which lag 0
learns steadily. Runs are trained side by side in child processes, one for each core, with one thread each.
"""

from __future__ import annotations

import functools
import os
import queue
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from headrace.bench.child import Child
from headrace.bench.harness import Row, run_parts, say
from headrace.buffer import Group
from headrace.config import make_recipe
from headrace.engine import EngineCore, Request
from headrace.launch import UserInputs, build_trainer, model_folder
from headrace.model import load_model, load_tokenizer
from headrace.records import Episode, Rollout, Sampling, Scored
from headrace.run import make_batches
from headrace.tasks import builtin_reward, open_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.config import Recipe
    from headrace.records import Array

    Learn = Callable[[str, int, int], "Future[Learned]"]
    """Begins to train by a name in `WAYS`, with a lag and a seed."""


class Pace(NamedTuple):
    steps: int
    learning_rate: float


class Learned(NamedTuple):
    curve: list[float]  # mean reward of what each version sampled
    kl: float  # of the policy and the one that sampled, mean over the last half


LAGS, SEEDS, PAIRS = (0, 2, 8, 32), 5, 12
PAIRED = {"paired": Pace(300, 7e-5), "slower": Pace(600, 3.5e-5)}
FAST = Pace(100, 4e-4)
SOURCE = "builtin:sort_digits"
SETTINGS: dict[str, Any] = {
    "orchestrate": "inline",
    "device": "cpu",
    "threads": 1,
    "sft": {"steps": 55, "batch": 64, "learning_rate": 1e-3, "warmup_steps": 19},
    "sft.tasks": [{"source": SOURCE, "options": {"min_length": 2, "max_length": 4}}],
    "tasks": [{"source": SOURCE, "options": {"min_length": 5}}],
    "sampling.max_tokens": 10,
    "model": {"hidden_size": 64, "num_heads": 2},
    "train": {"batch": 64, "group_size": 8},
}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "no ratio": {"train.loss": "reinforce"},
    "tis": {"staleness.correct": "tis"},
    "decoupled PPO": {"train.loss": "decoupled_ppo"},
    "CISPO": {"train.loss": "cispo"},
    "GSPO": {"train.loss": "gspo", "train.constants": {"clip_low": 0.03, "clip_high": 0.04}},
    "M2PO": {"train.loss": "m2po"},
}
"""What each sets over the defaults, which are PPO's clip with the ratio taken against the recorded logprobs. "no ratio" is
what becomes of a loss whose old logprobs the trainer computes itself, one step a version: its ratio is always 1, and nothing
knows that other weights sampled the tokens. GSPO's clip is that of `bench learn`."""


DIFFERS_AT_0 = ("GSPO",)
"""At lag 0 all ratios are 1, and the others have one gradient: they are trained once for all. GSPO's mean is another."""


def run(*, seeds: int | None = None, only: str | None = None, quick: bool, json_file: Path | None) -> int:
    """`--quick` trains two seeds for a few versions at lags 0 and 2."""
    lags, lag, pairs = ((0, 2), 2, 2) if quick else (LAGS, 8, max(seeds or 0, PAIRS))
    recipe = make_recipe({**SETTINGS, **({"sft.steps": 2} if quick else {})})
    with model_folder(recipe, UserInputs(), say=say) as folder, ExitStack() as stack:
        learners = Learners(folder, stack)
        parts: dict[str, Any] = {}
        for name, pace in PAIRED.items():
            learn = functools.partial(learners, pace._replace(steps=3) if quick else pace)
            parts[name] = functools.partial(_pair, learn, lag, pairs, name=name)
        learn = functools.partial(learners, FAST._replace(steps=3) if quick else FAST)
        for way in WAYS:
            parts[way] = functools.partial(_measure, learn, way, lags, seeds or (2 if quick else SEEDS))
        return run_parts("lag", parts, quick=quick, json_file=json_file, only=only)


class Learners:
    """Child processes that train, one for each core of this process; they are started when the first run is asked for."""

    def __init__(self, folder: str, stack: ExitStack) -> None:
        """`stack` ends them."""
        self._folder, self._stack = folder, stack
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[tuple[Any, ...], Future[Learned]] = {}

    def __call__(self, pace: Pace, way: str, lag: int, seed: int) -> Future[Learned]:
        """Begin a run, unless it has been begun before."""
        key = (*pace, way, lag, seed)
        if key not in self._begun:
            self._begun[key] = (self._threads or self._start()).submit(self._learn, key)
        return self._begun[key]

    def _start(self) -> ThreadPoolExecutor:
        cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(cores)
        logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for number in range(cores):
            child = Child(f"learner {number}", "headrace.bench.lag:learner", {"folder": self._folder}, log=logs / str(number))
            self._free.put(self._stack.enter_context(child))
        self._stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        return self._threads

    def _learn(self, key: tuple[Any, ...]) -> Learned:
        child = self._free.get()
        try:
            return Learned(**child.ask(list(key), seconds=3600))
        finally:
            self._free.put(child)  # one that has ended says so to the next


def learner(settings: dict[str, Any], orders: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """A child process that trains whatever it is told."""
    torch.set_num_threads(1)  # the model is too small for more
    for steps, learning_rate, way, lag, seed in orders:
        yield _learn(settings["folder"], Pace(steps, learning_rate), way, lag, seed)._asdict()


def _pair(learn: Learn, lag: int, seeds: int, *, name: str = "paired") -> Iterator[list[Row]]:
    """The default at this lag against lag 0, on the same seeds."""
    fresh, stale = [], []
    pairs = [(learn("default", 0, seed), learn("default", lag, seed)) for seed in range(seeds)]
    for seed, (at_0, at_lag) in enumerate(pairs):
        fresh.append(at_0.result().curve)
        stale.append(at_lag.result().curve)
        yield [Row(f"{name}, seed {seed}: area at lag {lag} ÷ lag 0", float(np.mean(stale[-1]) / np.mean(fresh[-1])), "ratio")]
    area = np.mean(stale, axis=1)
    ratios = area / np.mean(fresh, axis=1)
    low, high = interval(ratios)
    delayed = area / np.mean([curve[:1] * lag + curve[:-lag] for curve in fresh], axis=1)
    yield [
        Row(f"{name}, area at lag {lag} ÷ lag 0: mean of {seeds} seeds", float(ratios.mean()), "ratio"),
        Row(f"{name}, area at lag {lag} ÷ lag 0: 95 % interval from", low, "ratio", goal="≥ 0.97"),
        Row(f"{name}, area at lag {lag} ÷ lag 0: 95 % interval to", high, "ratio"),
        Row(f"{name}, area at lag {lag} ÷ lag 0 begun {lag} versions later", float(delayed.mean()), "ratio"),
        *(
            Row(f"{name}, lag {each}: reward of the last tenth", _last(curves), "reward", curve=_points(curves))
            for each, curves in ((0, fresh), (lag, stale))
        ),
    ]


def _points(curves: list[list[float]]) -> list[tuple[float, float]]:
    return [(float(at), float(value)) for at, value in enumerate(np.mean(curves, axis=0))]


def _last(curves: list[list[float]]) -> float:
    """Mean reward over the last tenth of the versions."""
    return float(np.mean([curve[-max(1, len(curve) // 10) :] for curve in curves]))


def interval(values: Array, *, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean."""
    chosen = np.random.default_rng(seed).integers(len(values), size=(10_000, len(values)))
    low, high = np.quantile(values[chosen].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def _measure(learn: Learn, way: str, lags: tuple[int, ...], seeds: int) -> Iterator[list[Row]]:
    """The area of each lag over its seeds, with the reward of the last tenth and of its worst seed."""
    begun = {lag: [learn(way if lag or way in DIFFERS_AT_0 else "default", lag, seed) for seed in range(seeds)] for lag in lags}
    for lag, runs in begun.items():
        learned = [each.result() for each in runs]
        curves, name = [each.curve for each in learned], f"{way}, lag {lag}"
        yield [
            Row(f"{name}: area", float(np.mean(curves)), "reward", curve=_points(curves)),
            Row(f"{name}: reward of the last tenth", _last(curves), "reward"),
            Row(f"{name}: the same, worst seed", min(_last([curve]) for curve in curves), "reward"),
            Row(f"{name}: KL to the policy that sampled", float(np.mean([each.kl for each in learned])), "nats"),
        ]


def _learn(folder: str, pace: Pace, way: str, lag: int, seed: int) -> Learned:
    recipe = make_recipe({**SETTINGS, **WAYS[way], "seed": seed})
    trainer, sampler = build_trainer(recipe, folder, device="cpu"), Sampler(folder, recipe)
    held = deque([trainer.arena.memory.clone()], maxlen=lag + 1)
    curve, apart = [0.0] * pace.steps, []
    for version in range(pace.steps + lag):
        sampled_by = max(0, version - lag)
        groups = sampler.sample(held[0], version=sampled_by, number=version)
        curve[sampled_by] = float(np.mean([episode.reward for group in groups for episode in group.episodes]))
        if version < pace.steps:
            (batch,) = make_batches(groups, recipe, version=version)
            assert all(set(rollout.versions[rollout.loss_mask]) == {sampled_by} for rollout in batch.rollouts)
            apart.append(trainer.forward_backward(batch)["kl"])
            trainer.optim_step(pace.learning_rate)
            held.append(trainer.arena.memory.clone())
        elif len(held) > 1:
            held.popleft()
    return Learned(curve, float(np.mean(apart[pace.steps // 2 :])))


@dataclass
class Sampler:
    """An engine that is told which weights to sample with."""

    folder: str
    recipe: Recipe

    def __post_init__(self) -> None:
        self._tokenizer: Any = load_tokenizer(self.folder)
        (tasks,) = self.recipe.tasks
        self._tasks = open_source(SOURCE, seed=self.recipe.seed, split="train", options=tasks.options)
        slots, context = self.recipe.train.batch, 32
        self._core = EngineCore(load_model(self.folder), name="engine", slots=slots, context=context)

    def sample(self, weights: torch.Tensor, *, version: int, number: int) -> list[Group]:
        """Batch `number`, sampled and scored under these weights."""
        self._core.arena.memory.copy_(weights)
        self._core.changed_weights(policy="policy", lineage=str(number), version=version)
        train, done = self.recipe.train, dict[str, Rollout]()
        first = number * train.groups_per_batch
        rows = {index: self._tasks.row(index) for index in range(first, first + train.groups_per_batch)}
        for index, row in rows.items():
            prompt = self._tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for sibling in range(train.group_size):
                name = f"{index}/{sibling}"
                rollout = Rollout.from_prompt(prompt, id=name, group=str(index))
                chosen = Sampling(
                    max_tokens=self.recipe.sampling.max_tokens,
                    stop_ids=(self._tokenizer.eos_token_id,),
                    seed=(self.recipe.seed << 32) + index * train.group_size + sibling,
                )
                self._core.submit(Request(rollout, chosen, on_done=lambda found: done.update({found.id: found})))
        while self._core.has_work:
            self._core.step()
        return [
            Group(index, tuple(self._scored(done[f"{index}/{sibling}"], row) for sibling in range(train.group_size)))
            for index, row in rows.items()
        ]

    def _scored(self, rollout: Rollout, row: dict[str, Any]) -> Episode:
        reward = builtin_reward(SOURCE)
        assert reward is not None
        sampled = rollout.token_ids[rollout.loss_mask]
        text = self._tokenizer.decode(sampled.tolist(), skip_special_tokens=True)
        outcome = Scored(float(reward(completion=text, **row) or 0.0))
        return Episode(id=rollout.id, group=rollout.group, task=row, rollouts=(rollout,), outcome=outcome)
