"""`staleness.rejected = "wait"` through the real loops, on a virtual clock: nothing is too old, dropped or stuck."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st
from strategies import quick, seeds
from stubbed import make_roles
from test_auto_run import TimedTrainer

from headrace.bench.loads import finished
from headrace.bench.stubs import InstantEngine, StubTrainer, drive, make_run
from headrace.bench.virtual_time import run_virtually
from headrace.config import make_recipe
from headrace.observe import Observer
from headrace.run import POLICY, Run
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.partial import Interrupt
    from headrace.records import Batch, Rollout, Sampling, WeightUpdate
    from headrace.run import PolicyState, StartedBatch


class OldestEngine(InstantEngine):
    """A rollout takes as long as `seconds` says, and has the version of its beginning; now and then one fails."""

    def __init__(self, seconds: Callable[[str], float], *, chance: random.Random, failing: float = 0.0) -> None:
        super().__init__()
        self._seconds, self._chance, self._failing, self._loading = seconds, chance, failing, asyncio.Lock()

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        began = {"version": self._version, "lineage": self._lineage}
        await asyncio.sleep(self._seconds(rollout.group))
        if self._chance.random() < self._failing:
            raise RuntimeError("a fault")
        return finished(rollout, [10], sampling=sampling, **began)

    async def load(self, update: WeightUpdate, **given: Interrupt) -> None:
        async with self._loading:  # one after the other, as a trainer sends them
            await asyncio.sleep(self._chance.choice([0, 0, 2]))
            await super().load(update, **given)


class InlineTrainer(StubTrainer):
    async def step(self, batch: Batch, *, learning_rate: float) -> Any:
        await asyncio.sleep(1)
        return await super().step(batch, learning_rate=learning_rate)


def simulate(
    engine: OldestEngine,
    *,
    versions: int,
    is_inline: bool = False,
    rewards: tuple[float | None, ...] = (0.0, 1.0, 1.0, None),
    **settings: Any,
) -> tuple[PolicyState, list]:
    """(the policy at the end, of each version (when it was trained, the lags and the numbers of its groups))."""
    where = {"orchestrate": "inline" if is_inline else "local"}
    recipe = make_recipe({"steps": versions, "deadline": 1e6, "sync": {"canary_limit": 1e9}, **where, **settings})
    chance, trained = random.Random(0), []

    def reward(completion: str, **_: object) -> float | None:
        return chance.choice(rewards)

    def on_trained(policy: PolicyState, started: StartedBatch) -> None:
        lags = [started.version - group.oldest_version for group in started.groups]
        trained.append((asyncio.get_running_loop().time(), lags, [group.number for group in started.groups]))

    async def nothing(*_: object) -> None: ...

    async def main() -> PolicyState:
        lineage = Lineage.new()
        trainer = InlineTrainer(lineage) if is_inline else TimedTrainer(lineage, 1.0)
        roles = make_roles(recipe, engine, trainer, reward=reward, prompts=["0", "1", "2"])
        how: Any = {"versions": versions, "after_version": nothing, "on_trained": on_trained}
        run = make_run(Run, recipe, roles, lineage, Observer(), **how)
        await drive(run, on_end=nothing)
        return run.policies[POLICY]

    return run_virtually(main()), trained


schedules = st.fixed_dictionaries(
    {
        "lag": st.sampled_from([0.5, 1, 2, 3]),
        "limit": st.sampled_from([None, 2, 3]),
        "batch": st.integers(1, 4),
        "parts": st.integers(1, 4),
        "kind": st.sampled_from(["auto", "stream", "reserved"]),
        "failing": st.sampled_from([0.0, 0.4]),
        "max_tied": st.sampled_from([0, 1]),
        "rule": st.sampled_from(["oldest", "first", "in_flight"]),
        "slow": st.floats(0, 0.3),
        "is_inline": st.booleans(),
        "seed": seeds,
    }
)


def run_schedule(given: dict[str, Any], rejected: str) -> tuple[int, int]:
    """(the most that the lag of a trained group exceeds `max_lag`, groups rejected)."""
    chance, lag = random.Random(given["seed"]), given["lag"]

    def seconds(group: str) -> float:
        return chance.expovariate(1) * (20 if chance.random() < given["slow"] else 1)

    staleness = {"max_lag": lag, "reject": given["rule"], "rejected": rejected}
    if given["limit"]:
        lag = 1 if given["is_inline"] else given["limit"]
        staleness |= {"max_lag": "auto", "max_lag_limit": given["limit"]}
    parts = min(given["parts"], given["batch"])
    bounds: dict[str, Any] = {"kind": given["kind"], "depth": 1 if given["kind"] == "reserved" else 0}
    policy, trained = simulate(
        OldestEngine(seconds, chance=chance, failing=given["failing"]),
        versions=12,
        is_inline=given["is_inline"],
        staleness=staleness,
        buffer=bounds,
        filter={"max_tied": given["max_tied"]},
        train={"batch": 2 * given["batch"], "group_size": 2, "stream_parts": parts},
    )
    policy.ledger.check()
    assert len(trained) == 12
    return max(max(lags) for _, lags, _ in trained) - -int(-lag // 1), policy.ledger.counts()["rejected"]


@given(schedules)
@quick
def test_under_no_schedule_is_a_group_too_old_or_dropped(given: dict[str, Any]) -> None:
    excess, num_rejected = run_schedule(given, "wait")
    assert excess <= 0 and not num_rejected


def test_the_same_schedules_would_reject() -> None:
    plain = {"limit": None, "batch": 2, "parts": 1, "kind": "auto", "failing": 0.0}
    plain |= {"max_tied": 1, "rule": "oldest", "is_inline": False}
    found = [run_schedule({**plain, "lag": 1, "slow": 0.1, "seed": seed}, "refill") for seed in range(5)]
    assert all(num_rejected for _, num_rejected in found)


@pytest.mark.parametrize(("rejected", "parts"), [("wait", 1), ("wait", 2), ("refill", 1)])
def test_the_trainer_goes_on_for_as_long_as_a_slow_group_allows(rejected: str, parts: int) -> None:
    """Group 0 takes 100 s and may be trained at version 3: three batches overtake it, the fourth waits for it."""

    def seconds(group: str) -> float:
        return 100.0 if group == "g0" else 0.5 + int(group[1:])

    policy, trained = simulate(
        OldestEngine(seconds, chance=random.Random(0)),
        versions=8,
        rewards=(0.0, 1.0),
        train={"batch": 4, "group_size": 2, "stream_parts": parts},
        staleness={"max_lag": 3, "rejected": rejected},
    )
    quick_ones, num_rejected = [when for when, _, _ in trained if when < 100], policy.ledger.counts()["rejected"]
    if rejected == "refill":
        assert len(quick_ones) > 3
        return
    assert len(quick_ones) == 3 and not num_rejected and 0 in trained[3][2] and max(trained[3][1]) == 3
