"""Advantages against the formulas written out."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.algorithms import (
    ADVANTAGES,
    advantages,
    batch_advantages,
    gae,
    normalised,
    sum_of_normalised,
    token_rewards,
    turn_advantages,
    turn_gae,
    turns_of,
)
from headrace.bench.loads import finished
from headrace.bench.stubs import answer
from headrace.records import Episode, FinishReason, Rollout, Scored

rewards = st.lists(st.integers(-8, 8).map(lambda number: number / 4), min_size=2, max_size=9)


BASELINES = ("group", "leave_one_out", "global", "reward")
SCALES = ("group", "batch", "none")


def naive(values: list[float], every: list[float], baseline: str, scale: str) -> list[float]:
    spread = {"group": statistics.pstdev(values), "batch": statistics.pstdev(every), "none": 1.0}[scale]
    others = [(sum(values) - value) / (len(values) - 1) for value in values]
    mean = {
        "group": [sum(values) / len(values)] * len(values),
        "leave_one_out": others,
        "global": [sum(every) / len(every)] * len(values),
        "reward": [0.0] * len(values),
    }[baseline]
    return [(value - base) / spread if spread else 0.0 for value, base in zip(values, mean, strict=True)]


def of_group(values: list[float], baseline: str = "group", scale: str = "group") -> np.ndarray:
    return advantages(values, values, baseline=baseline, scale=scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
@given(values=st.lists(rewards, min_size=1, max_size=4))
@quick
def test_advantages_are_the_formula(baseline: str, scale: str, values: list[list[float]]) -> None:
    every = [value for group in values for value in group]
    made = batch_advantages(values, baseline=baseline, scale=scale)
    assert [len(group) for group in made] == [len(group) for group in values]
    for group, got in zip(values, made, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, naive(group, every, baseline, scale), atol=1e-5)


def test_by_hand() -> None:
    assert of_group([0, 1]).tolist() == [-1, 1]
    assert of_group([0, 0, 0, 1], scale="none").tolist() == [-0.25, -0.25, -0.25, 0.75]
    np.testing.assert_allclose(of_group([0, 0, 3], "leave_one_out", "none"), [-1.5, -1.5, 3])
    first, second = batch_advantages([[0, 4], [2, 2]], baseline="group", scale="batch")  # TRL's scale_rewards = "batch"
    np.testing.assert_allclose(first, [-np.sqrt(2), np.sqrt(2)], rtol=1e-6)
    assert not second.any()


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "global"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -1e6])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_siblings_that_did_equally_well_have_no_advantage(baseline: str, scale: str, value: float, count: int) -> None:
    """Rounding of the mean must not be divided by itself."""
    np.testing.assert_allclose(of_group([value] * count, baseline, scale), np.zeros(count), atol=1e-9)


@pytest.mark.parametrize("size", [0.1, 1.0, 37.3, -1e6, 3e20])
def test_rounding_of_a_float32_reward_is_no_advantage(size: float) -> None:
    """One of eight equal siblings is off by one or two float32 ulps; a difference that is none is still seen."""
    reward = np.float32(size)
    after = np.nextafter(reward, np.float32(np.inf))
    for off in (after, np.nextafter(after, np.float32(np.inf))):
        for made in (of_group([float(reward)] * 7 + [float(off)]), normalised([reward, off])):
            np.testing.assert_allclose(made, 0.0, atol=1e-3)
    assert np.abs(of_group([size] * 7 + [size * 1.001])).max() > 2


@given(rewards, st.sampled_from([0.5, 4.0]), st.sampled_from([-2.0, 8.0]))
@quick
def test_group_advantages_do_not_depend_on_the_rewards_scale_or_zero(values: list[float], scale: float, shift: float) -> None:
    np.testing.assert_allclose(of_group([scale * value + shift for value in values]), of_group(values), atol=1e-5)


@pytest.mark.parametrize("baseline", ["gae", "distill"])
def test_advantages_of_tokens_are_left_to_later(baseline: str) -> None:
    (made,) = batch_advantages([[0.0, 1.0]], baseline=baseline, scale=ADVANTAGES[baseline].scales[0])
    assert made.tolist() == [0, 0]


def test_nothing_has_no_advantages() -> None:
    assert batch_advantages([], baseline="global", scale="batch") == [] and len(normalised(np.zeros(0))) == 0


def test_each_reward_is_normalised_by_itself_before_the_sum() -> None:
    """GDPO: (1, 0) and (0, 1) earn the same in sum; normalised one by one, the rarer success counts for more."""
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 10.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0}]
    a, b = np.array([3.0, -1, -1, -1]) / np.sqrt(3), np.array([-1.0, 2, -1]) / np.sqrt(2)
    expected = [a[0] + 2 * b[0], a[1] + 2 * b[1], a[2] + 2 * b[2], a[3]]  # the last has no b, which adds nothing
    np.testing.assert_allclose(sum_of_normalised(parts, weights={"b": 2.0}), expected, rtol=1e-6)
    assert not sum_of_normalised([{"a": 1.0}, {"a": 1.0}], weights={}).any()


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


# Turns


def sampled(rollout: Rollout, count: int) -> Rollout:
    return finished(rollout, np.ones(count), logprobs=0.0, reason=FinishReason.STOP)


def conversation(turns: list[tuple[int, int, float, float]], id: str) -> Rollout:
    """Of (tokens sampled, tokens of a tool, a reward within the turn, one on the tool's reply)."""
    rollout, steps = Rollout.from_prompt([1, 2], id=id, group="g"), []
    for count, tool, within, after in turns:
        rollout = sampled(rollout, count)
        steps.append((len(rollout) - 1, within))
        rollout = rollout.append([3] * tool)
        steps.append((len(rollout) - 1, after))
    return rollout.replace(step_rewards=tuple(steps))


def by_turn(rollout: Rollout) -> list[list[int]]:
    """The places of each turn's tokens, one token after another."""
    turns: list[list[int]] = []
    for place, source in enumerate(rollout.source):
        if source == 1 and (place == 0 or rollout.source[place - 1] != 1):
            turns.append([])
        if source == 1:
            turns[-1].append(place)
    return turns


def worth(rollout: Rollout, reward: float, discount: float) -> list[float]:
    """Of each turn: all step rewards that fell from it on, and the episode's."""
    turns, result = by_turn(rollout), []
    for now in range(len(turns)):
        total = 0.0
        for later in range(now, len(turns)):
            end = turns[later + 1][0] if later + 1 < len(turns) else len(rollout)
            own = sum(value for place, value in rollout.step_rewards if turns[later][0] <= place < end)
            total += discount ** (later - now) * (own + (reward if later == len(turns) - 1 else 0.0))
        result.append(total)
    return result


quarter = st.integers(-8, 8).map(lambda number: number / 4)
talk = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), quarter, quarter), min_size=1, max_size=4)
group_of_talks = st.lists(st.tuples(talk, quarter), min_size=2, max_size=5)


def episodes_of(group: list) -> list[Episode]:
    return [
        Episode(id=f"e{n}", group="g", task={}, rollouts=(conversation(turns, f"r{n}"),), outcome=Scored(reward))
        for n, (turns, reward) in enumerate(group)
    ]


@given(group_of_talks, st.sampled_from([1.0, 0.5]), st.sampled_from(["group", "none"]))
@quick
def test_turns_are_compared_with_the_siblings_same_turn(group: list, discount: float, scale: str) -> None:
    siblings, outcomes = episodes_of(group), [reward for _, reward in group]
    made = turn_advantages(siblings, outcomes, scale=scale, discount=discount)
    all_worth = [worth(episode.rollouts[0], reward, discount) for episode, reward in zip(siblings, outcomes, strict=True)]
    for index, (episode, got) in enumerate(zip(siblings, made, strict=True)):
        (rollout,) = episode.rollouts
        expected = np.zeros(len(rollout))
        for turn, places in enumerate(by_turn(rollout)):
            same = [each[min(turn, len(each) - 1)] for each in all_worth]
            mean, spread = statistics.fmean(same), statistics.pstdev(same) if scale == "group" else 1.0
            expected[places] = (all_worth[index][turn] - mean) / spread if spread > 1e-9 else 0.0
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=1e-4)


@given(group_of_talks)
@quick
def test_without_step_rewards_a_turn_is_worth_what_its_episode_is(group: list) -> None:
    outcomes = [reward for _, reward in group]
    siblings = [e.replace(rollouts=(e.rollouts[0].replace(step_rewards=()),)) for e in episodes_of(group)]
    made = turn_advantages(siblings, outcomes, scale="group", discount=1.0)
    for episode, got, one in zip(siblings, made, of_group(outcomes), strict=True):
        np.testing.assert_allclose(got, np.where(episode.rollouts[0].loss_mask, one, 0), atol=1e-6)


def test_turns_by_hand() -> None:
    """The second sibling earns 1 in its first turn and the same 2 in the end; the third never gets to a second turn."""
    talks = [[(1, 1, 0.0, 0.0), (2, 0, 0.0, 0.0)], [(1, 1, 0.0, 1.0), (2, 0, 0.0, 0.0)], [(1, 0, 0.0, 0.0)]]
    siblings = episodes_of([(talks[0], 2.0), (talks[1], 2.0), (talks[2], 0.0)])
    first, second, third = turn_advantages(siblings, [2.0, 2.0, 0.0], scale="none", discount=1.0)
    np.testing.assert_allclose(first, [0, 0, 1 / 3, 0, 2 / 3, 2 / 3], atol=1e-6)  # 2 of (2, 3, 0), then 2 of (2, 2, 0)
    np.testing.assert_allclose(second, [0, 0, 4 / 3, 0, 2 / 3, 2 / 3], atol=1e-6)
    np.testing.assert_allclose(third, [0, 0, -5 / 3], atol=1e-6)


def test_a_turn_that_was_interrupted_is_one_turn_and_what_is_not_trained_gets_nothing() -> None:
    rollout = sampled(sampled(Rollout.from_prompt([1], id="r", group="g"), 2), 1).append([3])
    rollout = sampled(rollout, 2)
    assert turns_of(rollout).tolist() == [-1, 0, 0, 0, -1, 1, 1]
    masked = rollout.replace(loss_mask=np.array([False] * 5 + [True] * 2), step_rewards=((1, 9.0),))
    siblings = [Episode(id=str(n), group="g", task={}, rollouts=(each,)) for n, each in enumerate((masked, rollout))]
    fork, whole = turn_advantages(siblings, [1.0, 0.0], scale="none", discount=1.0)
    assert fork.tolist() == [0] * 5 + [0.5] * 2 and whole.tolist() == [0, -0.5, -0.5, -0.5, 0, -0.5, -0.5]
    nothing = rollout.replace(loss_mask=np.zeros(7, bool))
    made = turn_advantages(
        [siblings[0].replace(rollouts=(nothing, rollout)), siblings[1]], [1.0, 0.0], scale="none", discount=1.0
    )
    assert [each.any() for each in made] == [False, True, True]


@given(
    st.lists(st.tuples(st.integers(1, 3), quarter, quarter), max_size=5),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.8]),
)
@quick
def test_gae_over_turns_takes_a_turn_for_one_action(taken: list, discount: float, trace: float) -> None:
    """The slow version: `gae` of one action for each turn, given to all its tokens."""
    made, returns = gae(
        np.array([count * reward for count, reward, _ in taken]),
        np.array([value for *_, value in taken]),
        discount=discount,
        trace=trace,
    )
    turns = [2 * number for number, (count, *_) in enumerate(taken) for _ in range(count)]  # turns may lack trained tokens
    own = [reward for count, reward, _ in taken for _ in range(count)]
    values = [value if place == 0 else 99.0 for count, _, value in taken for place in range(count)]  # only the first counts
    found = turn_gae(np.array(own), np.array(values), np.array(turns, dtype=np.int64), discount=discount, trace=trace)
    for got, expected in zip(found, (made, returns), strict=True):
        spread_out = [expected[number] for number, (count, *_) in enumerate(taken) for _ in range(count)]
        np.testing.assert_allclose(got, spread_out, atol=1e-4)
        assert got.dtype == np.float32
