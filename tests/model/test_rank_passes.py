"""Passes of several ranks: equally many, nearly equally long, and every rollout in one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from siblings import sibling

from headrace.model import PassCost, members_of, num_rows, plan_rank_passes

if TYPE_CHECKING:
    from headrace.records import Rollout

COST = PassCost(row=100.0, pair=0.03)  # as of an 8B model with rollouts eighteen times as long


def rollouts(groups: list[list[int]]) -> list[Rollout]:
    return [
        sibling(list(range(6, 12)), [length], group=str(group), index=index)
        for group, lengths in enumerate(groups)
        for index, length in enumerate(lengths)
    ]


def spread(plans: list, lengths: list[int]) -> float:
    """Time lost to waiting, pass by pass, as a share of the work."""
    costs = [[sum(COST(unit, lengths) for unit in each) for each in plan] for plan in plans]
    return sum(map(max, zip(*costs, strict=True))) * len(costs) / sum(map(sum, costs)) - 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), max_size=6),
    st.integers(1, 5),
    st.integers(20, 100),
    st.booleans(),
)
def test_every_rollout_is_in_one_pass_and_passes_keep_the_budget(
    groups: list[list[int]], count: int, budget: int, share: bool
) -> None:
    items = rollouts(groups)
    lengths = [len(item) for item in items]
    plans = plan_rank_passes(items, budget=budget, count=count, cost=COST, share=share)
    assert len(plans) == count and len({len(plan) for plan in plans}) == 1
    assert sorted(member for plan in plans for units in plan for member in members_of(units)) == list(range(len(items)))
    for units in (units for plan in plans for units in plan):
        assert sum(num_rows(unit, lengths) for unit in units) <= budget or len(members_of(units)) == 1
        assert not any(unit.prefix for unit in units) or share


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_long_tail_is_spread_evenly(count: int) -> None:
    random = np.random.default_rng(count)
    groups = [[int(min(each, 900)) + 1 for each in random.lognormal(4.5, 1.0, size=8)] for _ in range(32)]
    items = rollouts(groups)
    lengths = [len(item) for item in items]
    plans = plan_rank_passes(items, budget=1000, count=count, cost=COST)
    assert spread(plans, lengths) < 0.05
    one = plan_rank_passes(items, budget=1000, count=1, cost=COST)
    assert len(plans[0]) <= -(-len(one[0]) // count) + 1, "few more passes than one rank has"
