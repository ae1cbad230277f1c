"""An emulated cluster: a whole session whose engines (`emulated_engines`), trainer and scorer are timed stubs, in virtual time.

Loops, gate, buffer, batches, metrics and publishing are the real ones. The trainer's time is a constant per token, whatever the
loss needs; its weights reach the engines while both go on.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.bench.emulated_engines import EmulatedCluster
from headrace.bench.stubs import StubScorer, StubTrainer, make_session
from headrace.bench.virtual_time import run_virtually
from headrace.config import make_recipe
from headrace.observe import Observer
from headrace.sync import Lineage

if TYPE_CHECKING:
    from headrace.bench.emulated_load import Load
    from headrace.config import Recipe
    from headrace.observe import Timeline
    from headrace.records import Batch, WeightUpdate
    from headrace.trainer import Published


@dataclass(frozen=True)
class Measured:
    """A run on the emulated cluster."""

    share: float
    """Tokens trained a second ÷ the bound's, after the warm-up."""
    whole: float
    """The least time for all versions ÷ the time they took, from the first request on."""
    trainer_idle: float
    engine_idle: float
    """Share of the slots' time in which they had nothing to decode."""
    stall: float
    """Seconds that a weight update keeps a slot from decoding."""
    lag_mean: float
    lag_max: int
    wasted: float
    """Share of the sampled tokens that were never trained."""


def emulate(load: Load, settings: dict[str, Any]) -> Measured:
    """Run all versions of a load with these settings."""
    return run_virtually(_emulate(load, _recipe(load, settings)))


def _recipe(load: Load, settings: dict[str, Any]) -> Recipe:
    return make_recipe(
        {
            **settings,
            "steps": load.steps,
            "deadline": 1e5,
            "sampling.max_tokens": load.max_tokens,
            "model.context": 2 * load.max_tokens,
            "engine.slots": load.slots,
            "engine.count": load.engines,
            "train.batch": load.batch,
            "train.group_size": load.group_size,
            "checkpoint.every": load.steps,
            "observe.keep_rollouts_every": 0,
            "sync.canary_limit": 1e9,  # a stub has no logprobs
        }
    )


async def _emulate(load: Load, recipe: Recipe) -> Measured:
    lineage, observer = Lineage.new(), Observer()
    cluster = EmulatedCluster(load, observer.timeline("engine"))
    trainer = EmulatedTrainer(lineage, cluster, observer.timeline("trainer"))
    roles: dict[str, Any] = {
        "engine": cluster,
        "trainer": trainer,
        "scorer": StubScorer(seconds=load.score_seconds),
        "versions": lambda: {engine.name: engine.version for engine in cluster.engines},
        "lender": cluster if recipe.engine.lend else None,
    }
    session = make_session(recipe, lineage, observer, **roles, num_tasks=256)
    await session.train()
    return _measured(load, trainer.trained, wasted=session.policy.wasted_tokens)


def _measured(load: Load, trained: list[Trained], *, wasted: int) -> Measured:
    begin, end = load.warm_versions, load.warm_versions + load.versions
    first = next(step for step in reversed(trained) if step.version < begin)
    window = [step for step in trained if begin <= step.version < end]
    last, tokens = window[-1], sum(step.tokens for step in window)
    seconds, updating = last.moment - first.moment, last.updating - first.updating
    return Measured(
        share=tokens / seconds / load.bound,
        whole=load.least_seconds() / last.moment,
        trainer_idle=1 - (last.training - first.training) / seconds,
        engine_idle=1 - (last.decoding - first.decoding + updating) / (seconds * load.num_slots),
        stall=updating / load.num_slots / load.versions,
        lag_mean=sum(step.lag_sum for step in window) / tokens,
        lag_max=max(step.lag_max for step in window),
        wasted=wasted / (wasted + sum(step.tokens for step in trained)),
    )


class Trained(NamedTuple):
    """The state of a cluster when an optimizer step has been trained. All but the first four are totals since the start."""

    version: int
    """Trained from."""
    tokens: int
    lag_sum: int
    lag_max: int
    moment: float
    training: float
    """Seconds."""
    decoding: float
    """Slot-seconds, as the next."""
    updating: float


class EmulatedTrainer(StubTrainer):
    """Steps run one after another. The weights are copied beside the next step, which waits for that before it changes them,
    and are offered only when the engines hold those before, as the real trainer does."""

    def __init__(self, lineage: Lineage, cluster: EmulatedCluster, timeline: Timeline) -> None:
        super().__init__(lineage, is_inline=False)
        self._cluster, self._load, self._timeline = cluster, cluster.load_, timeline
        self._turn = asyncio.Lock()
        self._held, self._copied = asyncio.Event(), asyncio.Event()
        self._held.set()
        self._copied.set()
        self.trained: list[Trained] = []
        self._training = 0.0

    def step(self, batch: Batch, *, learning_rate: float) -> asyncio.Task[dict[str, float]]:  # type: ignore[override]
        return asyncio.ensure_future(self._step(batch))

    async def _step(self, batch: Batch) -> dict[str, float]:
        versions = np.concatenate([rollout.versions for rollout in batch.rollouts])
        lags = batch.version - versions[versions >= 0]
        async with self._turn:
            with self._timeline.during("compute"):
                await asyncio.sleep(len(lags) / self._load.training_rate)
            self._training += len(lags) / self._load.training_rate
            if batch.is_last and not self._copied.is_set():
                with self._timeline.during("publish"):
                    await self._copied.wait()
            self._cluster.advance()
            of_batch, slots = (len(lags), int(lags.sum()), int(lags.max(initial=0))), self._cluster.seconds
            used = (self._training, slots.decoding, slots.updating)
            self.trained.append(Trained(batch.version, *of_batch, time.monotonic(), *used))
        return await super().step(batch, learning_rate=0.0)

    def publish(self, version: int, *, canary: Batch, whole: bool = False) -> asyncio.Task[Published]:  # type: ignore[override]
        return asyncio.ensure_future(self._publish(version, canary))

    async def _publish(self, version: int, canary: Batch) -> Published:
        async with self._turn:
            self._copied.clear()
        await self._held.wait()
        self._held.clear()
        if version:
            await asyncio.sleep(self._load.offer_seconds)
        self._copied.set()
        return await super().publish(version, canary=canary)

    async def release(self, update: WeightUpdate) -> None:
        self._held.set()

    abort = release
