"""Two policies over one engine: each has its own trainer, version, buffer and ledger, and neither trains the other's tokens."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from stubbed import make_roles

from headrace.bench.loads import finished
from headrace.bench.stubs import StubTrainer
from headrace.config import make_recipe
from headrace.engine import EngineState
from headrace.observe import Observer
from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling, WeightUpdate
from headrace.run import Run, leg, run_loops
from headrace.sync import Lineage
from headrace.trainer import Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import Array, Batch
    from headrace.run import PolicyState

SIGNATURE = {"red": 11, "blue": 12}
"""The token that each policy samples."""
STEPS = 6


class Engine:
    """Holds the weights of several policies; samples for the one that a rollout names, and stamps its version."""

    def __init__(self) -> None:
        self.held: dict[str, WeightUpdate] = {}
        self.num_tokens = 0

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        await asyncio.sleep(0.001 * (len(rollout.id) % 3))
        update = self.held[rollout.policy]
        count = 1 + int(rollout.id[-1]) % 3
        self.num_tokens += count
        named = {"policy": rollout.policy, "lineage": update.lineage, "sampling": sampling, "reason": FinishReason.STOP}
        return finished(rollout, np.full(count, SIGNATURE[rollout.policy]), version=update.version, **named)

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        held = self.held.get(update.policy)
        assert held is None or held.version < update.version
        self.held[update.policy] = update

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        assert all(rollout.policy in self.held for rollout in rollouts)
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]

    async def pause(self, interrupt: Interrupt) -> None: ...

    async def resume(self) -> None: ...

    async def state(self) -> EngineState:
        return EngineState(0, "", 0, 0, 1, 1, self.num_tokens)

    async def in_flight(self) -> list[Any]:
        return []


class Trainer(StubTrainer):
    """Keeps the batches that it is given."""

    def __init__(self, policy: str, lineage: Lineage, *, is_inline: bool) -> None:
        super().__init__(lineage)
        self.policy, self.is_inline = policy, is_inline
        self.batches: list[Batch] = []

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        self.batches.append(batch)
        await asyncio.sleep(0.002)
        return await super().step(batch, learning_rate=learning_rate)

    async def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Published:
        assert canary.rollouts[0].policy == self.policy
        update = WeightUpdate(policy=self.policy, lineage=self._lineage.id, version=version)
        return Published(update, np.zeros(1, dtype=np.float32))


def length(completion: str, **_: object) -> float:
    return float(len(completion))


def test_two_policies_train_over_one_engine_and_never_on_each_others_tokens():
    recipe = make_recipe(
        {
            "steps": STEPS,
            "sampling": {"max_tokens": 4},
            "engine": {"slots": 4},
            "staleness": {"max_lag": 2},
            "train": {"batch": 8, "group_size": 2},
            "sync": {"canary_limit": 1e9},
        }
    )
    lineage, engine = Lineage.new(), Engine()
    trainers = {"red": Trainer("red", lineage, is_inline=True), "blue": Trainer("blue", lineage, is_inline=False)}
    versions: dict[str, list[int]] = {"red": [], "blue": []}
    prompts = [str(number) for number in range(7)]

    async def after_version(policy: PolicyState) -> None:
        versions[policy.name].append(policy.version)

    async def main() -> Run:
        run = Run(
            recipe,
            make_roles(recipe, engine, trainers["red"], trainers=trainers, reward=length, prompts=prompts),
            lineage=lineage,
            observer=Observer(),
            on_trained=lambda *_: None,
            after_version=after_version,
        )
        async with asyncio.timeout(60), leg(run):
            await run_loops(run)
            for policy in run.policies.values():
                await policy.published()
        return run

    run = asyncio.run(main())
    assert versions == {name: list(range(1, STEPS + 1)) for name in trainers}
    for name, trainer in trainers.items():
        policy = run.policies[name]
        rollouts = [rollout for batch in trainer.batches for rollout in batch.rollouts]
        assert len(rollouts) == STEPS * 8 and {rollout.policy for rollout in rollouts} == {name}
        assert {int(token) for rollout in rollouts for token in rollout.token_ids[rollout.is_sampled]} == {SIGNATURE[name]}
        assert policy.held_version == policy.version == engine.held[name].version == STEPS
        assert max(batch.version - rollout.oldest_version for batch in trainer.batches for rollout in batch.rollouts) <= 2
        policy.ledger.close()
        counts = policy.ledger.counts()
        assert (
            counts["trained"] == STEPS * 8 and counts["submitted"] == counts["trained"] + counts["rejected"] + counts["unused"]
        )
        assert policy.submitted_groups * 2 == counts["submitted"]
    assert not {*run.policies["red"].in_flight.groups} & {*run.policies["blue"].in_flight.groups}
