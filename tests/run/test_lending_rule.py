"""When the trainer's device is lent, decided on synthetic rates."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.config import make_recipe
from headrace.run.lending import Lending, LendingRule


def run_versions(rule: LendingRule, count: int, *, lent: float, alone: float = 100.0) -> list[bool]:
    """Versions of 10 s, in which engines sample `lent` tokens a second with lending; whether each was lent."""
    choices = []
    for _ in range(count):
        choices.append(rule.is_on)
        rule.observe(seconds=10.0, tokens=int(10 * (lent if rule.is_on else alone)))
    return choices


def make_rule(**took: float) -> LendingRule:
    rule = LendingRule(groups_per_batch=8, slots=16)
    rule.took(**took)
    run_versions(rule, 4, lent=100.0)
    return rule


def test_a_gain_is_kept_and_tried_again_after_pauses_that_double():
    rule = LendingRule(groups_per_batch=8, slots=16)
    choices = run_versions(rule, 5 + 5 + 16 + 5 + 32 + 5, lent=120.0)
    assert choices == [False] * 5 + [True] * 21 + [False] * 5 + [True] * 32 + [False] * 5
    assert rule.is_on and rule.gain == pytest.approx(0.2)


@pytest.mark.parametrize("lent", [100.0, 80.0])
def test_what_gains_nothing_is_stopped_and_tried_again_later(lent):
    rule = LendingRule(groups_per_batch=8, slots=16)
    choices = run_versions(rule, 5 + 5 + 16 + 5, lent=lent)
    assert choices == [False] * 5 + [True] * 5 + [False] * 16 + [True] * 5
    assert not rule.is_on and "nothing is lent" in rule.why


def test_lending_starts_when_it_begins_to_gain():
    rule = LendingRule(groups_per_batch=8, slots=16)
    run_versions(rule, 10, lent=90.0)
    assert not rule.is_on
    run_versions(rule, 21, lent=130.0)
    assert rule.is_on and rule.gain == pytest.approx(0.3)


def test_what_is_saved_follows_from_the_wait_and_from_what_joining_costs():
    rule = make_rule(joining=1.0, recalling=0.5)  # a version takes 10 s: 8 missing groups, 10 s
    assert rule.saves(missing=8, calls=32, num_engines=1) == pytest.approx((10 - 1) / 2 - 0.5), "a second engine halves it"
    assert rule.saves(missing=8, calls=80, num_engines=4) == pytest.approx((10 - 1) / 5 - 0.5)
    assert rule.saves(missing=1, calls=32, num_engines=1) < 0, "1.25 s are over before it has paid"
    assert rule.saves(missing=0, calls=32, num_engines=1) < 0
    assert rule.saves(missing=8, calls=16, num_engines=1) < 0, "no call waits for a slot"
    half = rule.saves(missing=8, calls=24, num_engines=1)
    assert half == pytest.approx((10 - 1) / 3 - 0.5), "half of its slots would be used"


class Spare:
    """A `Lender` that takes a turn of the event loop to join."""

    def __init__(self, *, can_lend: bool = True) -> None:
        self.is_lent, self._can_lend, self.tokens = False, can_lend, (30, 100)

    async def lend(self) -> bool:
        await asyncio.sleep(0)
        self.is_lent = self._can_lend
        return self._can_lend

    async def recall(self) -> None:
        self.is_lent = False

    def num_sampled(self) -> tuple[int, int]:
        return self.tokens


def test_a_batch_that_is_ready_while_the_engine_joins_takes_the_device_back():
    async def check() -> None:
        spare, changes = Spare(), []
        lending = Lending(make_recipe({}), spare, on_change=lambda: changes.append(spare.is_lent))
        lending.trainer_is_idle()
        joining = asyncio.ensure_future(lending.lend())
        await asyncio.sleep(0)
        await lending.recall()
        await joining
        assert not spare.is_lent and lending.summary()["times"] == 1
        await lending.lend()
        assert not spare.is_lent, "the trainer is at work"
        spare.tokens = (33, 110)
        assert lending.summary()["share"] == pytest.approx(0.3) and lending.trained()["lend/tokens"] == pytest.approx(0.3)

    asyncio.run(check())


def test_an_engine_that_is_lost_is_not_lent():
    async def check() -> None:
        spare = Spare(can_lend=False)
        lending = Lending(make_recipe({}), spare, on_change=lambda: pytest.fail("there is no engine more"))
        lending.trainer_is_idle()
        await lending.lend()
        await lending.recall()
        assert lending.summary()["times"] == lending.summary()["seconds"] == 0

    asyncio.run(check())


def test_times_are_counted_from_when_the_trainer_first_waits_to_the_end(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    async def check() -> None:
        lending = Lending(make_recipe({}), Spare(), on_change=lambda: None)
        clock[0] = 100.0  # the evaluation before RL has ended
        lending.trainer_is_idle()
        await lending.lend()
        clock[0] = 104.0
        await lending.recall()
        clock[0] = 110.0
        assert lending.trained()["lend/time"] == pytest.approx(0.4)
        assert lending.rule._period == 10.0
        lending.trainer_is_idle()
        await lending.lend()
        clock[0] = 115.0
        assert lending.summary()["seconds"] == pytest.approx(4 + 5), "it is still lent"

    asyncio.run(check())
