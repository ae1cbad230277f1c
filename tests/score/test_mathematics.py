"""The reward `math_verify`, with the real package."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import pytest
from test_rewards import decode, make_episode, make_sample

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, reward_functions
from headrace.records import Invalid
from headrace.score import RewardError, RewardScorer, RewardSettings, RewardWorkers, math_verify


def named(**settings):
    recipe = make_recipe({"reward": {"functions": ["headrace.score:math_verify"], **settings}})
    ((reward, weight),) = reward_functions(recipe, UserInputs())
    assert (reward.name, weight) == ("math_verify", 1.0)
    return reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        (72, "So there are 72 of them.", 1.0),
        ("72", r"so \boxed{\frac{144}{2}}", 1.0),
        ("72", "71", 0.0),
        ("72", "", 0.0),
        (r"\frac{1}{2}", "The answer is 0.5", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        (r"\{1,2\}", r"$\{2,1\}$", 1.0),
        ("(1, 2)", r"$[1, 2]$", 0.0),
        ("", "72", None),
    ],
)
def test_answers_are_compared_by_what_they_mean(answer, completion, reward) -> None:
    assert math_verify(completion, answer) == reward


def test_a_recipe_names_it_and_it_runs_in_processes_though_none_are_asked_for() -> None:
    reward = named(options={"math_verify": {"seconds": 1}})
    samples = [
        make_sample("72", answer="72"),
        make_sample("7", answer="72"),
        make_sample(r"\boxed{9^{9^{9^{9}}}}", answer="72"),
    ]
    with contextlib.closing(RewardWorkers(timeout=60.0)) as workers:
        asyncio.run(reward.score(samples[:1], attempts=1, workers=workers))
        began = time.monotonic()
        assert asyncio.run(reward.score(samples, attempts=1, workers=workers)) == [1.0, 0.0, 0.0]
        assert 0.9 < time.monotonic() - began < 50  # the last was cut off, and its process lives on
        assert workers.processes is not None and workers.processes.num_calls == 4


def test_a_row_without_a_comparable_answer_is_not_judged() -> None:
    scorer = RewardScorer([(named(), 1.0)], decode=decode, settings=RewardSettings())
    (scored,) = asyncio.run(scorer.score([make_episode(answer="")]))
    assert isinstance(scored.outcome, Invalid)


def test_without_the_package_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match=r"pip install headrace\[math\]"):
        math_verify("72", "72")
    monkeypatch.undo()
    with pytest.raises(RewardError, match=r"seconds = 0.5: must be a whole number"):
        math_verify("72", "72", seconds=0.5)
