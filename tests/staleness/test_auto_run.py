"""`max_lag = "auto"` through the real loops, with engines and a trainer that take a given time on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from stubbed import make_roles

from headrace.bench.stubs import InstantEngine, StubTrainer, drive, make_run
from headrace.bench.virtual_time import run_virtually
from headrace.config import make_recipe
from headrace.observe import Observer
from headrace.run import POLICY, Run
from headrace.sync import Lineage

if TYPE_CHECKING:
    from headrace.records import Batch, Rollout, Sampling
    from headrace.run import PolicyState


class TimedEngine(InstantEngine):
    """Takes so many seconds for a rollout, on average."""

    def __init__(self, seconds: float, *, sigma: float = 0.0) -> None:
        super().__init__(tokens=3)
        self.seconds, self._sigma, self._random = seconds, sigma, random.Random(0)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        await asyncio.sleep(self.seconds * self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma))
        return await super().generate(rollout, sampling)


class TimedTrainer(StubTrainer):
    """Takes one step after the other, as a trainer in another process does; `idle` seconds before each."""

    def __init__(self, lineage: Lineage, seconds: float) -> None:
        super().__init__(lineage, is_inline=False)
        self.seconds, self.idle = seconds, list[float]()
        self._last: asyncio.Future[Any] | None = None
        self._free_at = 0.0

    def step(self, batch: Batch, *, learning_rate: float) -> Any:
        self._last = asyncio.ensure_future(self._after(self._last, super().step(batch, learning_rate=learning_rate)))
        return self._last

    async def _after(self, before: Any, step: Any) -> Any:
        if before is not None:
            await before
        now = asyncio.get_running_loop().time()
        self.idle.append(now - self._free_at)
        await asyncio.sleep(self.seconds)
        self._free_at = now + self.seconds
        return await step

    def publish(self, version: int, **arguments: Any) -> Any:
        async def published(after: Any) -> Any:
            await after
            return await super(TimedTrainer, self).publish(version, **arguments)

        return asyncio.ensure_future(published(self._last)) if self._last else super().publish(version, **arguments)


def simulate(*, engine: TimedEngine, train: float, versions: int, at: Any = None, **settings: Any) -> tuple:
    """(the run, its trainer, the gate's depth after each version); `at(version)` may change how long things take."""
    recipe = make_recipe(
        {
            **{"steps": 10_000, "deadline": 1e6, "sampling": {"max_tokens": 4}, "engine": {"slots": 128}},
            **{"train": {"batch": 16, "group_size": 2}, "sync": {"canary_limit": 1e9}, **settings},
        }
    )
    prompts = [str(number) for number in range(7)]
    depths: list[float] = []

    async def after_version(policy: PolicyState) -> None:
        depths.append(policy.gate.depth)
        if at is not None:
            at(policy.version)

    async def nothing() -> None:
        """Nothing to look at."""

    async def main() -> tuple:
        lineage = Lineage.new()
        trainer = TimedTrainer(lineage, train)
        roles = make_roles(recipe, engine, trainer, reward=constant, prompts=prompts)
        run = make_run(Run, recipe, roles, lineage, Observer(), versions=versions, after_version=after_version)
        await drive(run, on_end=nothing)
        return run, trainer, depths

    return run_virtually(main())


def constant(completion: str, **_: object) -> float:
    return 1.0


@pytest.mark.parametrize(("generate", "sigma", "least"), [(0.3, 0.0, 1.0), (2.5, 0.0, 3.0), (1.0, 1.0, 1.5)])
def test_the_real_loops_keep_the_trainer_busy(generate: float, sigma: float, least: float) -> None:
    engine = TimedEngine(generate, sigma=sigma)
    run, trainer, depths = simulate(engine=engine, train=1.0, versions=80)
    policy = run.policies[POLICY]
    assert fmean(trainer.idle[-30:]) < 0.03, "seconds a version, of one that takes 1 s"
    assert least <= depths[-1] == policy.gate.depth <= least + 1
    assert policy.pace.controller.why.startswith("the trainer waits")
    counts = policy.ledger.counts()
    assert counts["rejected"] <= (0.03 if sigma else 0.0) * counts["trained"], "rejection is at the limit, far from the depth"


def test_the_real_loops_follow_engines_that_become_slower() -> None:
    def at(version: int) -> None:
        if version == 40:
            engine.seconds = 3.0

    engine = TimedEngine(0.5)
    _, trainer, depths = simulate(engine=engine, train=1.0, versions=110, at=at)
    assert depths[39] == 1 and depths[-1] == 3
    assert fmean(trainer.idle[20:40]) < 0.03 and fmean(trainer.idle[-30:]) < 0.03


def test_a_fixed_lag_is_left_alone() -> None:
    run, trainer, depths = simulate(engine=TimedEngine(3.0), train=1.0, versions=20, **{"staleness": {"max_lag": 1}})
    assert set(depths) == {1} and run.policies[POLICY].pace is None and fmean(trainer.idle[-10:]) > 0.5


def test_slots_bound_unfinished_episodes_in_the_real_loops() -> None:
    most = 0

    class Counting(TimedEngine):
        running = 0

        async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
            nonlocal most
            self.running += 1
            most = max(most, self.running)
            try:
                return await super().generate(rollout, sampling)
            finally:
                self.running -= 1

    staleness = {"gate": "slots", "slots": 1.5, "max_lag": 4}
    run, _, _ = simulate(engine=Counting(1.0, sigma=1.0), train=1.0, versions=20, staleness=staleness)
    assert most == 24, "1.5 batches of 16 episodes"
    run.policies[POLICY].ledger.check()
