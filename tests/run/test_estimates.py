"""The figures of an evaluation, against what counting every subset gives and against simulated models whose truth is known."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from headrace.run.estimates import Estimate, TaskScore, differences, estimate, majority_at, pass_at, sizes

RIGHT = [True, False, True, False, False]
ANSWERS = ["7", "8", "7", "8", None]


def subsets(k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(len(RIGHT)), k))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(k: int) -> None:
    expected = np.mean([any(RIGHT[index] for index in chosen) for chosen in subsets(k)])
    assert pass_at(k, samples=5, right=2) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_maj_at_k_is_the_share_of_subsets_whose_majority_is_right(k: int) -> None:
    def share(chosen: tuple[int, ...]) -> float:
        votes = Counter(ANSWERS[index] for index in chosen if ANSWERS[index] is not None)
        most = [answer for answer, count in votes.items() if count == max(votes.values())]
        return most.count("7") / max(len(most), 1)

    expected = np.mean([share(chosen) for chosen in subsets(k)])
    assert majority_at(k, answers=ANSWERS, right=RIGHT) == pytest.approx(expected)


def test_a_majority_of_many_samples_is_estimated_from_random_subsets() -> None:
    """60 % of 20 samples agree on the right answer, the rest on a wrong one: a vote of 5 is right in 70 % of subsets."""
    right = [True] * 12 + [False] * 8
    found = majority_at(5, answers=["right" if each else "wrong" for each in right], right=right)
    exact = np.mean([sum(chosen) > 2 for chosen in itertools.combinations(right, 5)])
    assert exact == pytest.approx(0.70, abs=0.01) and found == pytest.approx(exact, abs=0.06)
    assert majority_at(5, answers=[None] * 20, right=right) == 0, "nobody voted"


def test_a_task_gives_what_its_judged_samples_support() -> None:
    task = TaskScore("tasks", "id", rewards=(1.0, 0.5, None, 0.0), answers=("a", "b", None, "b"), greedy=1.0)
    assert task.values(success_at=1.0) == {
        **{"success": 1 / 3, "held_out_reward": 0.5, "greedy": 1.0, "pass@1": pytest.approx(1 / 3)},
        **{"pass@2": pytest.approx(2 / 3), "maj@2": pytest.approx(1 / 3)},
    }
    alone = TaskScore("tasks", "id", rewards=(1.0,), answers=(None,), greedy=None)
    assert alone.values(success_at=1.0) == {"success": 1.0, "held_out_reward": 1.0}
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("name", "samples", "rate"), [("success", 1, 0.5), ("success", 1, 0.02), ("pass@4", 8, 0.3), ("maj@4", 4, 0.6)]
)
def test_intervals_hold_the_truth_as_often_as_they_promise(name: str, samples: int, rate: float) -> None:
    """Tasks of different difficulty, whose samples are alike: 600 evaluations of 50 tasks, and the truth from 2,000 tasks."""
    draws = np.random.default_rng(0)

    def values(num_tasks: int) -> list[float]:
        found = []
        for chance in draws.beta(2 * rate, 2 * (1 - rate), size=num_tasks):
            right = draws.random(samples) < chance
            answers = tuple("right" if each else "wrong" for each in right)
            found.append(TaskScore("", "", tuple(map(float, right)), answers, None).values(success_at=1.0)[name])
        return found

    pool = np.array(values(2_000))
    intervals = [estimate(name, draws.choice(pool, 50)) for _ in range(600)]
    covered = np.mean([each.low <= pool.mean() <= each.high for each in intervals])
    assert 0.92 <= covered <= 0.985
    assert all(0 <= each.low <= each.value <= each.high <= 1 for each in intervals)


def test_paired_differences_hold_the_truth_and_are_narrower() -> None:
    """Two models on the same tasks, the second a tenth better on each: what makes a task hard cancels."""
    draws, covered, widths = np.random.default_rng(0), 0, []
    for _ in range(400):
        chances = draws.beta(0.5, 0.5, size=60) * 0.9
        first, second = ([{"success": value} for value in draws.binomial(8, p) / 8] for p in (chances, chances + 0.1))
        difference = differences(second, first)["success"]
        covered += difference.low <= 0.1 <= difference.high
        alone = estimate("success", [each["success"] for each in first])
        widths.append((difference.high - difference.low) / (alone.high - alone.low))
    assert 0.92 <= covered / 400 <= 0.98 and np.mean(widths) < 0.6
    assert differences([{"success": 1.0}], [{"greedy": 1.0}]) == {}


def test_all_right_is_no_certainty_and_a_mean_reward_has_no_bounds() -> None:
    sure = estimate("success", [1.0] * 20)
    assert sure.value == sure.high == 1 and 0.8 < sure.low < 0.85
    assert estimate("held_out_reward", [-3.0, -1.0]) == Estimate(
        -2.0, pytest.approx(-3.96, abs=0.01), pytest.approx(-0.04, abs=0.01)
    )
