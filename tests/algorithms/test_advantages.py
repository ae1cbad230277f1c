"""Advantages against the formulas written out."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.algorithms import advantages, batch_advantages, gae, normalised, token_rewards
from headrace.bench.stubs import answer

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


@pytest.mark.parametrize("size", [0.1, 1.0, 37.3, -1e6, 3e20])
def test_rounding_of_a_float32_reward_is_no_advantage(size: float) -> None:
    """One of eight equal siblings is off by one or two float32 ulps; a difference that is none is still seen."""
    reward = np.float32(size)
    after = np.nextafter(reward, np.float32(np.inf))
    for off in (after, np.nextafter(after, np.float32(np.inf))):
        for made in (advantages([float(reward)] * 7 + [float(off)], kind="group"), normalised([reward, off])):
            np.testing.assert_allclose(made, 0.0, atol=1e-3)
    assert np.abs(advantages([size] * 7 + [size * 1.001], kind="group")).max() > 2


@given(rewards, st.sampled_from([0.5, 4.0]), st.sampled_from([-2.0, 8.0]))
@quick
def test_group_advantages_do_not_depend_on_the_rewards_scale_or_zero(values: list[float], scale: float, shift: float) -> None:
    moved = [scale * value + shift for value in values]
    np.testing.assert_allclose(advantages(moved, kind="group"), advantages(values, kind="group"), atol=1e-5)


def test_an_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"train.advantage = 'gruop': must be group, group_mean or leave_one_out"):
        advantages([0, 1], kind="gruop")


# Over a version's groups, and per token

groups = st.lists(rewards, min_size=1, max_size=4)


@given(values=groups)
@quick
def test_global_advantages_are_scaled_over_all_groups(values: list[list[float]]) -> None:
    flat = [value for group in values for value in group]
    mean, spread = sum(flat) / len(flat), statistics.pstdev(flat)
    made = batch_advantages(values, kind="global")
    assert [len(group) for group in made] == [len(group) for group in values]
    for group, got in zip(values, made, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, [(value - mean) / spread if spread else 0.0 for value in group], atol=1e-5)


@given(values=groups, kind=st.sampled_from(["group", "group_mean", "leave_one_out", "reward", "gae", "distill"]))
@quick
def test_other_advantages_look_at_one_group_or_none(values: list[list[float]], kind: str) -> None:
    for group, got in zip(values, batch_advantages(values, kind=kind), strict=True):
        if kind in ("gae", "distill"):
            assert not got.any()
        else:
            np.testing.assert_allclose(got, group if kind == "reward" else naive(group, kind), atol=1e-5)


def test_nothing_has_no_advantages() -> None:
    assert batch_advantages([], kind="global") == [] and len(normalised(np.zeros(0))) == 0


steps = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=0, max_size=12)


@given(steps, st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.0, 0.95, 0.0]))
@quick
def test_gae_is_the_sum_written_out(taken: list[tuple[float, float]], discount: float, trace: float) -> None:
    """Every later error, discounted as often as it is later."""
    given_rewards, values = [reward for reward, _ in taken], [value for _, value in taken]
    after = [*values[1:], 0.0]
    errors = [r + discount * later - v for r, later, v in zip(given_rewards, after, values, strict=False)]
    expected = [
        sum((discount * trace) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]
    made, returns = gae(np.array(given_rewards), np.array(values), discount=discount, trace=trace)
    np.testing.assert_allclose(made, expected, atol=1e-5)
    np.testing.assert_allclose(returns, np.array(expected) + np.array(values), atol=1e-5)


def test_gae_by_hand() -> None:
    made, returns = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.9]), discount=1.0, trace=1.0)
    np.testing.assert_allclose(made, [0.5, 0.8, 0.1], atol=1e-6)  # without decay: what came less what was expected
    np.testing.assert_allclose(returns, [1.0, 1.0, 1.0], atol=1e-6)
    made, _ = gae(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.9]), discount=1.0, trace=0.0)
    np.testing.assert_allclose(made, [-0.3, 0.7, 0.1], atol=1e-6)  # one step ahead


def test_rewards_fall_on_the_trained_token_they_followed_from() -> None:
    """Tokens 10 to 19 are trained, but for 13 and 19; a step reward on the prompt followed from none of them."""
    whole = answer(0)
    mask = whole.loss_mask.copy()
    mask[[13, 19]] = False
    rollout = whole.replace(loss_mask=mask, step_rewards=((3, 5.0), (10, 0.5), (13, 0.25), (14, 2.0), (19, 4.0)))
    expected = np.zeros(20)
    expected[[10, 12, 14, 18]] = [0.5, 0.25, 2.0, 4.0 + 7.0]
    np.testing.assert_allclose(token_rewards(rollout, 7.0), expected)
    assert not token_rewards(whole.replace(loss_mask=np.zeros(20, dtype=bool)), 7.0).any()
