"""`headrace bench presets`: every preset on the same work, on an emulated cluster and for real.

The emulated cluster (`emulated`) puts timed stubs behind the real loops, gate, buffer, batches and metrics, in virtual time. The
bound of a load is what the slower of its two pools could do if it never waited: min(generation, training) in tokens a second.
All contestants get the same lengths, slots, truncation and trainer; only their settings differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.bench.emulated import EmulatedCluster, EmulatedScorer, EmulatedTrainer, Load, Trained
from headrace.bench.harness import Row, run_parts
from headrace.bench.stubs import StubStore
from headrace.bench.virtual_time import run_virtually
from headrace.config import make_recipe
from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.observe import Observer
from headrace.run import POLICY, Roles, Session, make_canary
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.config import Recipe

LOADS = {
    load.name: load
    for load in (
        Load(name="trainer-bound", sigma=0.5, training=1.05),
        Load(name="engine-bound", sigma=0.5, training=0.95),
        Load(name="long tail", sigma=1.0, training=1.05),
    )
}
OURS = "default"


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
    lineage, observer, encoder = Lineage.new(), Observer(), PromptEncoder(build_tokenizer())
    cluster = EmulatedCluster(load, observer.timeline("engine"))
    trainer = EmulatedTrainer(lineage, cluster, observer.timeline("trainer"))
    rows = [{"prompt": [{"role": "user", "content": f"{number:04d}"}], "answer": str(number)} for number in range(256)]
    roles = Roles(
        engine=cluster,
        trainers={POLICY: trainer},
        scorer=EmulatedScorer(load.score_seconds),
        environment=SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, UserInputs(tasks=rows)),
        canary=make_canary(encoder.encode("canary")),
        stop_ids=(1,),
        services=(),
    )
    session = Session(
        recipe=recipe,
        roles=roles,
        lineage=lineage,
        observer=observer,
        store=StubStore(),  # type: ignore[arg-type]
        held_out={},
        command_started=0.0,
        identity="bench",
    )
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
