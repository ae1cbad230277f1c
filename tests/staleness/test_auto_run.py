"""`max_lag = "auto"` through the real loops, with engines and a trainer that take a given time on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
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

    def __init__(self, seconds: float, *, sigma: float = 0.0, device: SharedDevice | None = None) -> None:
        super().__init__(tokens=3)
        self.seconds, self._sigma, self._random, self._device = seconds, sigma, random.Random(0), device

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        seconds = self.seconds * self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)
        await (asyncio.sleep(seconds) if self._device is None else self._device.work("engine", seconds))
        return await super().generate(rollout, sampling)


class TimedTrainer(StubTrainer):
    """Takes one part after the other, as a trainer in another process does, and `seconds` for a version; `idle` before each."""

    def __init__(self, lineage: Lineage, seconds: float, device: SharedDevice | None = None, *, travel: float = 0.0) -> None:
        """`travel`: seconds until it has what it is sent."""
        super().__init__(lineage, is_inline=False)
        self.seconds, self._device, self.idle, self.lags = seconds, device, list[float](), list[int]()
        self._travel = travel
        self._last: asyncio.Future[Any] | None = None
        self._free_at = 0.0

    def step(self, batch: Batch, *, learning_rate: float) -> Any:
        self._last = asyncio.ensure_future(self._after(self._last, batch, super().step(batch, learning_rate=learning_rate)))
        return self._last

    async def _after(self, before: Any, batch: Batch, step: Any) -> Any:
        await asyncio.sleep(self._travel)
        if before is not None:
            await before
        now = asyncio.get_running_loop().time()
        seconds = self.seconds * len(batch.rollouts) / 16
        self.lags.append(max(batch.version - int(rollout.versions.max()) for rollout in batch.rollouts))
        self.idle += [0.0] * (batch.version + 1 - len(self.idle))
        self.idle[-1] += now - self._free_at
        await (asyncio.sleep(seconds) if self._device is None else self._device.work("trainer", seconds))
        self._free_at = asyncio.get_running_loop().time()
        return await step

    def publish(self, version: int, **arguments: Any) -> Any:
        async def published(after: Any) -> Any:
            await after
            return await super(TimedTrainer, self).publish(version, **arguments)

        return asyncio.ensure_future(published(self._last)) if self._last else super().publish(version, **arguments)


class SharedDevice:
    """Engine and trainer each go at half speed while both work, and rollouts share what the engine has: side by side gains
    nothing."""

    def __init__(self) -> None:
        self._working = Counter[str]()

    async def work(self, role: str, seconds: float) -> None:
        self._working[role] += 1
        while seconds > 1e-9:
            await asyncio.sleep(0.05)
            rollouts = self._working[role] if role == "engine" else 1
            seconds -= 0.05 / (rollouts * sum(count > 0 for count in self._working.values()))
        self._working[role] -= 1


def simulate(
    *,
    engine: TimedEngine,
    train: float,
    versions: int,
    at: Any = None,
    reward: Any = None,
    device: SharedDevice | None = None,
    parts: int = 1,
    travel: float = 0.0,
    **settings: Any,
) -> tuple:
    """(the run, its trainer, the gate's depth after each version); `at(policy, trainer)` may change how long things take."""
    recipe = make_recipe(
        {
            **{"steps": 10_000, "deadline": 1e6, "sampling": {"max_tokens": 4}, "engine": {"slots": 128}},
            **{"train": {"batch": 16, "group_size": 2, "stream_parts": parts}, "sync": {"canary_limit": 1e9}, **settings},
        }
    )
    prompts = [str(number) for number in range(7)]
    depths: list[float] = []

    async def after_version(policy: PolicyState) -> None:
        depths.append(policy.gate.depth)
        if at is not None:
            at(policy, trainer)

    async def nothing() -> None:
        """Nothing to look at."""

    lineage = Lineage.new()
    trainer = TimedTrainer(lineage, train, device, travel=travel)

    async def main() -> tuple:
        how = {"reward": reward or constant, "prompts": prompts, "shares_device": device is not None}
        roles = make_roles(recipe, engine, trainer, **how)
        run = make_run(Run, recipe, roles, lineage, Observer(), versions=versions, after_version=after_version)
        await drive(run, on_end=nothing)
        return run, trainer, depths

    return run_virtually(main())


def constant(completion: str, **_: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("generate", "sigma", "parts", "least", "most"),
    [
        (0.3, 0.0, 1, 1.0, 2.0),
        (2.5, 0.0, 1, 3.0, 4.0),
        (1.0, 1.0, 1, 1.5, 2.5),
        (0.3, 0.0, 4, 0.25, 0.75),
        (2.5, 0.0, 4, 2.5, 2.75),
        (1.0, 1.0, 4, 1.25, 1.75),
    ],
)
def test_the_real_loops_keep_the_trainer_busy(generate: float, sigma: float, parts: int, least: float, most: float) -> None:
    engine = TimedEngine(generate, sigma=sigma)
    run, trainer, depths = simulate(engine=engine, train=1.0, versions=80, parts=parts)
    policy = run.policies[POLICY]
    assert fmean(trainer.idle[-30:]) < 0.03, "seconds a version, of one that takes 1 s"
    assert least <= depths[-1] == policy.gate.depth <= most
    assert policy.pace.controller.why.startswith("the trainer waits")
    counts = policy.ledger.counts()
    assert counts["rejected"] <= (0.03 if sigma else 0.0) * counts["trained"], "rejection is at the limit, far from the depth"


@pytest.mark.parametrize("parts", [1, 4])
def test_what_is_ready_while_the_trainer_works_is_there_when_it_needs_it(parts: int) -> None:
    """Were a part sent once the one before is trained, the trainer would wait 0.1 s for it, several times a version."""
    _, trainer, depths = simulate(engine=TimedEngine(0.3), train=1.0, versions=80, parts=parts, travel=0.1)
    assert fmean(trainer.idle[-30:]) < 0.01 and depths[-1] <= 2.0


def test_the_real_loops_follow_engines_that_become_slower() -> None:
    def at(policy: PolicyState, _: TimedTrainer) -> None:
        if policy.version == 40:
            engine.seconds = 3.0

    engine = TimedEngine(0.5)
    _, trainer, depths = simulate(engine=engine, train=1.0, versions=110, at=at)
    assert depths[39] == 1 and depths[-1] == 3
    assert fmean(trainer.idle[20:40]) < 0.03 and fmean(trainer.idle[-30:]) < 0.03


@pytest.mark.parametrize("is_on_trial", [False, True])
def test_the_real_loops_follow_a_trainer_that_becomes_slower(is_on_trial: bool) -> None:
    """Also while a lower depth is on trial, which is not what makes versions longer then."""
    lags = list[float]()

    def at(policy: PolicyState, trainer: TimedTrainer) -> None:
        trial = policy.pace.controller._trial
        if policy.version >= 40 and trainer.seconds == 1 and (trial is not None and not trial.is_raise) == is_on_trial:
            trainer.seconds = 3.0
            lags.append(policy.gate.depth)

    _, trainer, depths = simulate(engine=TimedEngine(2.0, sigma=0.5), train=1.0, versions=110, at=at)
    assert lags[0] > 2.5 and 1 <= depths[-1] <= 1.5 and fmean(trainer.idle[-30:]) < 0.03 * 3.0


async def slow(completion: str, **_: object) -> float:
    await asyncio.sleep(2.0)
    return 1.0


def test_the_real_loops_go_as_far_ahead_as_a_slow_reward_asks_for() -> None:
    """A group takes 2.5 s, four fifths of them in the reward, and half a batch more is in flight just after one is taken."""
    run, trainer, depths = simulate(engine=TimedEngine(0.5), train=1.0, versions=60, reward=slow)
    assert depths[-1] == 3 and fmean(trainer.idle[-30:]) < 0.03
    assert run.policies[POLICY].pace.controller.why.startswith("the trainer waits 0.0%")
    one_less = {"staleness": {"max_lag": 2}}
    assert fmean(simulate(engine=TimedEngine(0.5), train=1.0, versions=60, reward=slow, **one_less)[1].idle[-30:]) > 0.1


def test_the_real_loops_take_turns_on_a_shared_device() -> None:
    device = SharedDevice()
    run, trainer, depths = simulate(engine=TimedEngine(1 / 16, device=device), train=1.0, versions=40, device=device)
    assert set(depths[-25:]) == {0.0} and set(trainer.lags[-25:]) == {0} and max(trainer.lags) > 0
    assert run.policies[POLICY].pace.controller.why.startswith("side by side gains less than 3% on a shared device")


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
