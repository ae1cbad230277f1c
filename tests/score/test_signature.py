"""What a reward function may ask for by the names of its parameters, and how its own settings differ from the run's."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
from test_rewards import decode, make_episode, make_sample

import headrace
from headrace.config import make_recipe, parse_recipe
from headrace.launch.inputs import UserInputs, check_inputs, fingerprint_inputs, reward_functions
from headrace.records import Call, FinishReason, Rollout, Sampling
from headrace.score import RewardError, RewardFunction, RewardScorer, RewardSettings, RewardWorkers, TrainerState
from headrace.score.rewards import Failure
from headrace.score.signature import Sample, Turn
from headrace.settings import ConfigError


def results(function, samples: list[Sample], **how) -> list:
    return asyncio.run(RewardFunction(function).score(samples, **{"attempts": 1, **how}))


def make_scorer(*functions, workers=None, **settings) -> RewardScorer:
    state = TrainerState(max_steps=50, seed=9)
    rewards = [(RewardFunction(function), 1.0) for function in functions]
    return RewardScorer(rewards, decode=decode, settings=RewardSettings(**settings), workers=workers, state=state)


def at_version(number: int, version: int):
    """An episode whose completion was sampled by that version, and truncated."""
    episode = make_episode(number)
    call = Call(start=1, stop=3, engine="x", sampling=Sampling(), finish_reason=FinishReason.LENGTH, started=0.0, finished=1.0)
    versions = np.array([-1, max(version - 1, 0), version])
    changes = {"versions": versions, "calls": (call,), "finish_reason": FinishReason.LENGTH}
    return episode.replace(rollouts=(episode.rollouts[0].replace(**changes),))


# What a reward may ask for


def test_the_per_sample_form_gets_single_values() -> None:
    seen = []

    def single(completion, prompt_ids, completion_ids, completion_length, finish_reason, trainer_state) -> float:
        seen.append((prompt_ids, completion_ids, completion_length, finish_reason, trainer_state))
        return 1.0

    asyncio.run(make_scorer(single).score([make_episode(4), at_version(5, version=3)]))
    assert seen == [
        ([4], [54, 60], 2, "stop", TrainerState(global_step=0, max_steps=50, seed=9)),
        ([5], [55, 60], 2, "length", TrainerState(global_step=3, max_steps=50, seed=9)),
    ]
    assert type(seen[0][3]) is str


def test_the_batch_form_gets_lists() -> None:
    seen = []

    def batch(prompt_ids, completion_ids, completion_lengths, finish_reasons, **columns) -> list[float]:
        seen.append((prompt_ids, completion_ids, completion_lengths, finish_reasons, sorted(columns)))
        return [1.0] * len(prompt_ids)

    asyncio.run(make_scorer(batch).score([make_episode(4), at_version(5, version=3)]))
    columns = ["completions", "n", "prompts"]
    assert seen == [([[4], [5]], [[54, 60], [55, 60]], [2, 2], ["stop", "length"], columns)]


def episode_of_turns():
    """Prompt, an answer, a tool's reply, an answer cut at its length; and a fork that went on from the first answer."""
    first, last = answered(make_episode(4).rollouts[0].append([7, 8]), FinishReason.LENGTH), make_episode(4)
    fork = answered(first.forked(2, id="fork"), FinishReason.STOP)
    return last.replace(rollouts=(first.replace(step_rewards=((2, 0.25), (4, 0.5), (6, 1.0))), fork))


def answered(rollout: Rollout, reason: FinishReason) -> Rollout:
    start, times = len(rollout), {"started": 0.0, "finished": 1.0}
    call = Call(start=start, stop=start + 2, engine="x", sampling=Sampling(), finish_reason=reason, **times)
    arrays = {"token_ids": np.array([70, 71], np.int32), "logprobs": np.zeros(2, np.float32)}
    return rollout.extend(call, **arrays, versions=np.zeros(2, np.int32), policy="policy", lineage="")


TURNS = [
    Turn("prompt", "text of [4]"),
    Turn("sampled", "text of [54, 60]", finish_reason="stop", reward=0.25),
    Turn("tool", "text of [7, 8]", reward=0.5),
    Turn("sampled", "text of [70, 71]", finish_reason="length", reward=1.0),
    Turn("sampled", "text of [70, 71]", rollout=1, finish_reason="stop"),
]


def test_a_reward_sees_the_whole_episode_and_its_turns_as_text() -> None:
    seen, whole = [], episode_of_turns()

    def single(episode) -> float:
        seen.append(episode)
        return sum(value for rollout in episode.rollouts for _, value in rollout.step_rewards)

    def single_turns(turns, completion) -> float:
        seen.append(turns)
        return float(len(turns))

    def batch(episodes, turns, completions) -> list[float]:
        seen.append((episodes, turns))
        return [1.0] * len(episodes)

    (scored,) = asyncio.run(make_scorer(single, single_turns, batch).score([whole]))
    assert seen == [whole, TURNS, ([whole], [TURNS])]
    assert scored.rollouts[0].rewards == {"single": 1.75, "single_turns": 5.0, "batch": 1.0}


def test_turns_are_decoded_only_where_a_reward_asks_for_them() -> None:
    decoded = []

    def noted(rollout: Rollout) -> str:
        decoded.append(rollout.completion_ids)
        return ""

    scorer = RewardScorer([(RewardFunction(lambda completion: 1.0), 1.0)], decode=noted, settings=RewardSettings())
    asyncio.run(scorer.score([episode_of_turns()]))
    assert decoded == [[60 - 6, 70, 71]]  # the last rollout's completion, once


def test_a_reward_of_trl_that_takes_only_token_ids_is_a_batch_form() -> None:
    """`trl.rewards.get_soft_overlong_punishment` and others are such objects."""
    assert results(lambda completion_ids, **kwargs: [len(ids) for ids in completion_ids], [make_sample()] * 2) == [1, 1]


def test_samples_of_several_versions_are_batched_by_version_if_the_reward_takes_the_state() -> None:
    """So that what a reward gives does not depend on which samples happened to finish together."""
    calls = []

    def annealed(completions, n, trainer_state) -> list[float]:
        calls.append((n, trainer_state.global_step))
        return [trainer_state.global_step / trainer_state.max_steps] * len(n)

    episodes = [at_version(number, version=version) for number, version in enumerate((1, 2, 1, 2, 3))]
    judged = asyncio.run(make_scorer(annealed).score(episodes))
    assert calls == [([0, 2], 1), ([1, 3], 2), ([4], 3)]
    assert [episode.reward for episode in judged] == [0.02, 0.04, 0.02, 0.04, 0.06]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda completions, finish_reason: [], "takes completions of a batch and finish_reason of one sample; write finish_r"),
        (lambda completion, completion_lengths: 1, "takes completion_lengths of a batch and completion of one sample"),
        (lambda trainer_state, log_metric: 1, r"takes \(log_metric, trainer_state\); write f\(prompt, completion"),
    ],
)
def test_a_mixture_of_both_forms_is_refused(function, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        RewardFunction(function)


def test_a_column_with_the_name_of_what_a_reward_asks_for_is_refused_and_otherwise_passed_on() -> None:
    rows, recipe = [{"prompt": "x", "finish_reason": "a column"}], headrace.Recipe()
    with pytest.raises(ConfigError, match=r"asks for 'finish_reason' of the policy's answer, but row 0 of tasks has a column"):
        check_inputs(recipe, UserInputs(tasks=rows, reward=lambda completion, finish_reason: 1.0))
    check_inputs(recipe, UserInputs(tasks=rows, reward=lambda completion, **row: 1.0))
    sample = Sample(row={**rows[0]}, completion="", completion_ids=[], finish_reason="stop")
    assert results(lambda completion, **row: float(row["finish_reason"] == "a column"), [sample]) == [1.0]


# Metrics


@pytest.mark.parametrize("is_threaded", [False, True])
def test_metrics_are_added_up_from_all_calls_but_those_of_evaluations(is_threaded: bool) -> None:
    def plain(completion, n, log_metric) -> float:
        log_metric("n", n)
        return 1.0

    async def waiting(completions, n, log_metric) -> list[float]:
        log_metric("batch", np.float32(len(n)))
        return [1.0] * len(n)

    workers = RewardWorkers(timeout=10) if is_threaded else None
    scorer = make_scorer(plain, waiting, workers=workers)
    episodes = [make_episode(number) for number in (1, 2, 6)]
    asyncio.run(scorer.score(episodes))
    asyncio.run(scorer.score(episodes[:1]))
    asyncio.run(scorer.score(episodes, is_training=False))
    assert scorer.take_logged() == {"n": [10.0, 4], "batch": [4.0, 2]}
    assert scorer.take_logged() == {}
    if workers is not None:
        workers.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_what_is_no_number_cannot_be_logged(value) -> None:
    (failure,) = results(lambda completion, log_metric: log_metric("mine", value), [make_sample()])
    assert isinstance(failure, Failure) and "raised" in failure.reason


# Settings of one function


def test_a_function_has_its_own_timeout_and_attempts() -> None:
    over, calls = threading.Event(), []

    @headrace.reward(name="slow", timeout=0.1, attempts=3)
    def slow(completion) -> float:
        calls.append(completion)
        if completion == "hangs":
            over.wait(60)
        raise OSError

    workers = RewardWorkers(timeout=60)
    late, failed = results(slow, [make_sample("hangs"), make_sample("fails")], workers=workers)
    over.set()
    workers.close()
    assert late.reason == "reward 'slow' gave no answer within its own timeout = 0.1 s"
    assert "OSError" in failed.reason and calls.count("fails") == 3


def test_weights_of_functions_are_used_unless_the_recipe_has_some() -> None:
    @headrace.reward(weight=0.25)
    def light(completion) -> float:
        return 1.0

    def full(completion) -> float:
        return 1.0

    given = UserInputs(tasks=[{"prompt": "x"}], reward=[headrace.reward(light, name="another"), full])
    assert [weight for _, weight in reward_functions(make_recipe({}), given)] == [0.25, 1.0]
    assert [weight for _, weight in reward_functions(make_recipe({"reward.weights": [2, 3]}), given)] == [2.0, 3.0]
    hashes = [
        fingerprint_inputs(make_recipe({}), UserInputs(tasks=[{"prompt": "x"}], reward=headrace.reward(full, weight=weight)))
        for weight in (None, 0.5, 0.75)
    ]
    assert len({found["reward[0]"][1] for found in hashes}) == 3, "another weight is another run"


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": math.inf}, "timeout=inf"),
        ({"timeout": "5"}, "timeout='5'"),
        ({"attempts": 0}, "attempts=0"),
        ({"attempts": 1.5}, "attempts=1.5"),
        ({"weight": math.nan}, "weight=nan"),
        ({"weight": True}, "weight=True"),
    ],
)
def test_a_wrong_setting_of_a_function_is_refused(own: dict, problem: str) -> None:
    with pytest.raises(RewardError, match=rf"headrace.reward\({problem}\): must be"):
        headrace.reward(decode, **own)


# The recipe


def scaled(completion, *, by: float = 1.0, least: float = 0.0) -> float:
    return max(least, by * len(completion))


def test_options_set_a_functions_parameters() -> None:
    recipe = make_recipe({"reward": {"options": {"scaled": {"by": 3}}}})
    ((reward, _),) = reward_functions(recipe, UserInputs(reward=scaled))
    assert asyncio.run(reward.score([make_sample("ab")], attempts=1)) == [6.0]
    assert recipe.hash != make_recipe({}).hash


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"options": {"scale": {}}}, r"reward.options.scale: there is no such reward function \(there are: scaled\)"),
        ({"options": {"scaled": {"bye": 1}}}, r"reward.options.scaled.bye: .* has no such option \(it has: by, least\)"),
        ({"options": {"scaled": {"completion": ""}}}, r"reward.options.scaled.completion: .* has no such option"),
        ({"options": {"scaled": 3}}, r"reward.options.scaled = 3: must be a table"),
        ({"weights": [1, 2]}, r"reward.weights = \[1.0, 2.0\]: there are 1 reward functions"),
        ({"processes": -1}, r"reward.processes = -1: must be ≥ 0"),
        ({"processes": 1.5}, r"reward.processes = 1.5: must be a whole number"),
        ({"overlong_buffer": -1}, r"reward.overlong_buffer = -1.0: must be ≥ 0"),
        ({"overlong_buffer": 257}, r"reward.overlong_buffer = 257: is longer than a completion, sampling.max_tokens = 256"),
        ({"overlong_penalty": -1}, r"reward.overlong_penalty = -1.0: must be ≥ 0"),
        ({"overlong_penalty": math.inf}, r"reward.overlong_penalty = inf: must be"),
        ({"functions": 3}, r"reward.functions = 3: must be a list of text"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_loaded(settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        reward_functions(make_recipe({"reward": settings}), UserInputs(reward=scaled))


def test_one_name_stands_for_a_list_of_one(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def exact(completion):\n    return 1.0\n")
    name = f"{tmp_path}/mine.py:exact"
    recipe = parse_recipe(f"[reward]\nfunctions = '{name}'\n", name="r.toml")
    assert recipe.reward.functions == (name,) and recipe == make_recipe({"reward": {"functions": [name]}})
    for given in (UserInputs(), UserInputs(reward=name)):
        ((reward, weight),) = reward_functions(recipe, given)
        assert (reward.name, reward.reference, weight) == ("exact", name, 1.0)


def test_the_section_may_stand_beside_functions_in_python(tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("headrace.launch.launch", lambda recipe, inputs, how: seen.append((recipe.reward, inputs.reward)))
    headrace.train(reward={"functions": scaled, "timeout": 5, "workers": 4})
    headrace.train(reward={"functions": ["a:b", scaled]})
    headrace.train(reward={"functions": ["a:b"], "attempts": 1})
    headrace.train(reward="a:b", reward_weights=[2])
    assert seen == [
        (RewardSettings(timeout=5.0, workers=4), scaled),
        (RewardSettings(), ["a:b", scaled]),
        (RewardSettings(functions=("a:b",), attempts=1), None),
        (RewardSettings(weights=(2.0,)), "a:b"),
    ]
