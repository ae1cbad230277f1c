"""Rewards for length and form, each against the formula of its paper."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
from test_rewards import decode, make_episode, make_sample

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, check_inputs, reward_functions
from headrace.records import Episode, Invalid, Rollout, Source
from headrace.score import RewardError, RewardFunction, RewardScorer, RewardSettings
from headrace.score.metric_log import MetricLog
from headrace.score.shaping import cosine_length, length_penalty, overlong, repetition_penalty, think_format
from headrace.settings import ConfigError


@pytest.mark.parametrize(("longest", "cache"), [(20, 4), (20, 20), (7, 3), (20_480, 4096)])
def test_overlong_is_equation_13_of_dapo(longest: int, cache: int) -> None:
    for length in range(longest + 5):
        if length <= longest - cache:
            expected = 0.0
        elif length <= longest:
            expected = ((longest - cache) - length) / cache
        else:
            expected = -1.0
        assert overlong(length, max_length=longest, buffer=cache) == expected
        if cache < longest:
            assert overlong(length, max_length=longest, buffer=cache / longest) == pytest.approx(expected)


def score(value, *, is_training: bool = True, **settings):
    """One episode whose completion has two of at most two tokens."""
    rewards = [(RewardFunction(lambda completion: value, name="exact"), 2.0)]
    scorer = RewardScorer(rewards, decode=decode, settings=RewardSettings(**settings), max_tokens=2)
    (episode,) = asyncio.run(scorer.score([make_episode()], is_training=is_training))
    return episode


def test_the_punishment_is_a_reward_of_its_own_with_its_own_weight() -> None:
    episode = score(0.5, overlong_buffer=2, overlong_penalty=0.25)
    assert episode.reward == 2 * 0.5 - 0.25
    assert episode.rollouts[0].rewards == {"exact": 0.5, "unshaped": 1.0, "overlong": -1.0}
    assert score(0.5).rollouts[0].rewards == {"exact": 0.5}
    assert episode.unshaped_reward == score(0.5).unshaped_reward == 1.0


def test_it_neither_shapes_evaluations_nor_judges_what_no_reward_judges() -> None:
    assert score(0.5, overlong_buffer=2, is_training=False).reward == 1.0
    assert isinstance(score(None, overlong_buffer=2).outcome, Invalid)


@pytest.mark.parametrize("parts", [[6], [3, 3]])
def test_over_turns_it_punishes_the_longest_answer_and_not_what_tools_say(parts: list[int]) -> None:
    rollout = Rollout.from_prompt([1], id="e0", group="g")
    for size in parts:  # of more than one part, it was interrupted
        rollout = rollout.demonstrate([5] * size, engine="x")
    fork = rollout.forked(2, id="e0.1").append([7] * 9, source=Source.PROMPT).demonstrate([5] * 4, engine="x")
    rollout = rollout.append([7] * 90).demonstrate([5] * 2, engine="x")
    settings = RewardSettings(overlong_buffer=5)
    scorer = RewardScorer([(RewardFunction(decode_length), 1.0)], decode=decode, settings=settings, max_tokens=10)
    episode = Episode(id="e0", group="g", task={"prompt": "ask"}, rollouts=(rollout, fork))
    (scored,) = asyncio.run(scorer.score([episode]))
    assert [each.rewards["overlong"] for each in scored.rollouts] == [pytest.approx(-0.2)] * 2


def test_a_function_of_its_name_is_refused() -> None:
    recipe = make_recipe({"reward": {"overlong_buffer": 2}})
    with pytest.raises(ConfigError, match="a reward function is named 'overlong' too"):
        reward_functions(recipe, UserInputs(reward=RewardFunction(decode_length, name="overlong")))
    with pytest.raises(ConfigError, match="a function is named 'unshaped'"):
        reward_functions(make_recipe({}), UserInputs(reward=RewardFunction(decode_length, name="unshaped")))


def test_without_the_punishment_a_function_of_its_name_keeps_its_weight() -> None:
    rewards = [(RewardFunction(decode_length, name="overlong"), 0.2)]
    assert RewardScorer(rewards, decode=decode, settings=RewardSettings()).weights == {"overlong": 0.2}
    shaped = RewardScorer(
        [(RewardFunction(decode_length, name="exact"), 2.0)], decode=decode, settings=RewardSettings(overlong_buffer=2)
    )
    assert shaped.weights == {"exact": 2.0, "overlong": 1.0, "unshaped": 0.0}


def decode_length(completion, answer="") -> float:
    return float(completion == answer)


def test_cosine_length_is_the_papers_formula() -> None:
    """Yeo et al.: CosFn(t, T, at the end, at the start) = end + (start - end) / 2 · (1 + cos(tπ / T))."""
    for length in (0, 1, 5, 9):
        for value, (start, end) in ((1.0, (2.0, 1.0)), (0.0, (-10.0, 0.0))):
            found = cosine_length(
                length, correct=lambda completion, v=value: v, completion="", max_length=10, right=(2, 1), wrong=(-10, 0)
            )
            assert found == pytest.approx(end + 0.5 * (start - end) * (1 + math.cos(length * math.pi / 10)))
    assert cosine_length(10, correct=lambda completion: 1.0, completion="", max_length=10, exceeded=-3.0) == -3.0
    assert cosine_length(3, correct=lambda completion: None, completion="", max_length=10) is None


def test_cosine_length_from_a_recipe(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def exact(prompt, completion, answer):\n    return float(completion == answer)\n")
    options = {"correct": f"{tmp_path}/mine.py:exact"}
    settings = {"functions": "headrace.score:cosine_length", "options": {"cosine_length": options}}
    rows = UserInputs(tasks=[{"prompt": "x", "answer": "a"}])
    with pytest.raises(ConfigError, match=r"takes 'max_length', which .* set reward.options.cosine_length.max_length"):
        check_inputs(make_recipe({"reward": settings}), rows)
    options["max_length"] = 2
    recipe = make_recipe({"reward": settings})
    check_inputs(recipe, rows)
    ((reward, _),) = reward_functions(recipe, rows)
    right, wrong = (make_sample(completion, answer="a") for completion in "ab")  # of one token each
    assert asyncio.run(reward.score([right, wrong], attempts=1)) == pytest.approx([0.75, -0.75])


async def waiting(completion) -> float:
    return 1.0


def test_cosine_length_gives_its_judge_what_a_reward_gets_and_names_what_it_cannot_give() -> None:
    seen = {}

    def judge(completion, finish_reason, prompt_ids, trainer_state, log_metric, completion_ids, completion_length, answer):
        seen.update(locals())
        log_metric("judged", 1)
        return 1.0

    def score(function) -> list:
        reward = RewardFunction(RewardFunction(cosine_length), options={"correct": function, "max_length": 9})
        sample = dataclasses.replace(make_sample("done", answer="a"), finish_reason="stop", prompt_ids=[3])
        return asyncio.run(reward.score([sample], attempts=1, log=log))

    log = MetricLog()
    assert 0.5 < score(judge)[0] < 1.0 and log.take() == {"judged": [1.0, 1]}
    expected = {"finish_reason": "stop", "prompt_ids": [3], "completion_ids": [4], "completion_length": 1, "answer": "a"}
    assert seen.items() >= expected.items() and seen["trainer_state"].max_steps == 0
    with pytest.raises(RewardError, match="takes max_length, solution, which the row does not have"):
        score(lambda completion, max_length, solution, level=1: 1.0)
    assert score(lambda completion, **row: float(row.keys() == {"prompt", "answer", "completion_ids"}))[0] > 0.5


@pytest.mark.parametrize("function", [lambda completions: [1.0], waiting])
def test_cosine_length_takes_a_plain_function_of_one_sample(function) -> None:
    with pytest.raises(RewardError, match="must be a plain function"):
        cosine_length(1, correct=function, max_length=2, completion="")


@pytest.mark.parametrize(
    ("ids", "options", "expected"),
    [
        ([1, 2, 3, 4], {"ngram": 2}, 0.0),
        ([5, 5, 5, 5, 5], {"ngram": 2}, -0.75),
        ([1, 2, 3, 1, 2, 3], {"penalty": 2.0}, -0.5),
        ([1, 2], {}, 0.0),
        ([], {}, 0.0),
    ],
)
def test_repetition_penalty_is_the_share_of_repeated_n_grams(ids: list[int], options: dict, expected: float) -> None:
    assert repetition_penalty(ids, len(ids), **options) == expected


def test_length_penalty_is_linear_beyond_what_is_free() -> None:
    assert [length_penalty(length, per_token=0.5, free=3) for length in (0, 3, 4, 8)] == [0.0, 0.0, -0.5, -2.5]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>\nwhy\n</think>\nanswer", 1.0),
        ("<think>why\nanswer", 0.0),
        ("so <think>why</think> answer", 0.0),
        ("<think>why</think> and <think>more</think>", 0.0),
    ],
)
def test_think_format(completion: str, expected: float) -> None:
    assert think_format(completion) == expected
