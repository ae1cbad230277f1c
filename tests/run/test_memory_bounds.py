"""What waits in the launcher is bounded, whatever the settings of staleness and however slow the trainer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from stubbed import make_roles

from headrace.bench.controller import trivial
from headrace.bench.stubs import InstantEngine, StubTrainer
from headrace.config import make_recipe
from headrace.observe import Observer
from headrace.run import POLICY, Run, leg, run_loops
from headrace.sync import Lineage

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.records import Batch
    from headrace.run import PolicyState

BATCH, GROUP, TOKENS, STEPS = 8, 4, 1000, 50
MAX_GB = 0.001


class StuckTrainer(StubTrainer):
    """Trains nothing until it is let go."""

    def __init__(self, lineage: Lineage) -> None:
        super().__init__(lineage, is_inline=False)
        self.may_go_on = asyncio.Event()

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        await self.may_go_on.wait()
        return await super().step(batch, learning_rate=learning_rate)


async def until_still(run: Run, policy: PolicyState) -> None:
    """Waits until nothing has been submitted, generated or scored for some turns of the event loop."""
    seen, turns = None, 0
    while turns < 50:
        await asyncio.sleep(0)
        now = (policy.submitted_groups, len(policy.in_flight), len(policy.buffer), run.num_scoring)
        seen, turns = now, turns + 1 if now == seen else 0


def make_run(recipe: Recipe, trainer: StuckTrainer, lineage: Lineage, **more: Any) -> Run:
    roles = make_roles(recipe, InstantEngine(tokens=TOKENS), trainer, reward=trivial, prompts=["12345"], **more)

    async def after_version(policy: PolicyState) -> None: ...

    return Run(recipe, roles, lineage=lineage, observer=Observer(), on_trained=lambda *_: None, after_version=after_version)


async def test_without_a_gate_what_is_in_flight_follows_the_engines() -> None:
    """2 × 8 slots of one engine are 16 episodes, and 4 × 4 groups at most wait for their last."""
    recipe = make_recipe({"engine.slots": 8, "staleness.gate": "none", "train": {"batch": BATCH, "group_size": GROUP}})
    held: dict[str, int] = {}
    lineage = Lineage.new()
    run = make_run(recipe, StuckTrainer(lineage), lineage, versions=lambda: held)
    policy = run.policies[POLICY]

    def bounds() -> tuple[bool, bool, float]:
        counts = {"version": 0, "submitted": 0, "dropped": 0}
        run._count_engines()
        return *(policy.gate.is_open(**counts, unfinished=each) for each in (15, 16)), policy._max_in_flight

    assert bounds() == (True, False, 16)
    run.room.clear()
    held.update({"engine-0": 0, "engine-1": 0})
    assert bounds() == (True, True, 32) and run.room.is_set(), "the feed is woken"
    del held["engine-1"]
    assert bounds() == (True, False, 16)


async def test_engines_that_join_before_a_version_is_trained_get_calls() -> None:
    recipe = make_recipe({"engine.slots": 8, "deadline": 0.4, "sync.canary_limit": 1e9})
    held: dict[str, int] = {}
    lineage = Lineage.new()
    run = make_run(recipe, StuckTrainer(lineage), lineage, versions=lambda: held)
    async with leg(run):
        assert run.generate_calls.num_free == 16
        held.update({"engine-0": 0, "engine-1": 0, "engine-2": 0})
        await asyncio.sleep(0.2)
        assert run.generate_calls.num_free == 48


@pytest.mark.parametrize("order", ["completion", "submission"])
async def test_without_gate_and_rejection_submission_stops_at_the_buffers_bytes(order: str) -> None:
    recipe = make_recipe(
        {
            "steps": STEPS,
            "sampling": {"max_tokens": 2 * TOKENS},
            "engine": {"slots": 8},
            "staleness": {"gate": "none", "reject": "never"},
            "buffer": {"max_gb": MAX_GB, "order": order},
            "train": {"batch": BATCH, "group_size": GROUP},
            "sync": {"canary_limit": 1e9},  # a stub has no logprobs
        }
    )
    lineage = Lineage.new()
    trainer = StuckTrainer(lineage)
    run = make_run(recipe, trainer, lineage)
    policy = run.policies[POLICY]
    async with leg(run):
        training = asyncio.ensure_future(run_loops(run))
        await until_still(run, policy)
        group_bytes = policy.buffer.num_bytes / len(policy.buffer)
        assert GROUP * TOKENS * 14 < group_bytes < GROUP * (TOKENS * 16 + 5000)
        most_in_flight = max(BATCH // GROUP, 2 * 8 // GROUP)
        assert MAX_GB * 1e9 <= policy.buffer.num_bytes < MAX_GB * 1e9 + (1 + most_in_flight) * group_bytes
        assert len(policy.in_flight) == run.queued.qsize() == len(run.finished) == 0
        assert policy.submitted_groups < 0.5 * STEPS * BATCH // GROUP, "far from all that the run will train"
        trainer.may_go_on.set()
        await training
    assert policy.ledger.counts()["trained"] == STEPS * BATCH
