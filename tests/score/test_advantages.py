"""Advantages against the formulas written out."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick

from headrace.score import advantages

rewards = st.lists(st.integers(-8, 8).map(lambda number: number / 4), min_size=2, max_size=9)


def naive(values: list[float], kind: str) -> list[float]:
    mean = sum(values) / len(values)
    if kind == "group":
        spread = statistics.pstdev(values)
        return [(value - mean) / spread if spread else 0.0 for value in values]
    if kind == "group_mean":
        return [value - mean for value in values]
    return [value - (sum(values) - value) / (len(values) - 1) for value in values]


@pytest.mark.parametrize("kind", ["group", "group_mean", "leave_one_out"])
@given(values=rewards)
@quick
def test_advantages_are_the_formula(kind: str, values: list[float]) -> None:
    made = advantages(values, kind=kind)
    assert made.dtype == np.float32 and made.shape == (len(values),)
    np.testing.assert_allclose(made, naive(values, kind), atol=1e-5)


def test_by_hand() -> None:
    assert advantages([0, 1], kind="group").tolist() == [-1, 1]
    assert advantages([0, 0, 0, 1], kind="group_mean").tolist() == [-0.25, -0.25, -0.25, 0.75]
    np.testing.assert_allclose(advantages([0, 0, 3], kind="leave_one_out"), [-1.5, -1.5, 3])


@pytest.mark.parametrize("kind", ["group", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_siblings_that_did_equally_well_have_no_advantage(kind: str, value: float, count: int) -> None:
    """Rounding of the mean must not be divided by itself."""
    np.testing.assert_allclose(advantages([value] * count, kind=kind), np.zeros(count), atol=1e-9)


@given(rewards, st.sampled_from([0.5, 4.0]), st.sampled_from([-2.0, 8.0]))
@quick
def test_group_advantages_do_not_depend_on_the_rewards_scale_or_zero(values: list[float], scale: float, shift: float) -> None:
    moved = [scale * value + shift for value in values]
    np.testing.assert_allclose(advantages(moved, kind="group"), advantages(values, kind="group"), atol=1e-5)


def test_an_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"train.advantage = 'gruop': must be group, group_mean or leave_one_out"):
        advantages([0, 1], kind="gruop")
