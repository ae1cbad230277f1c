"""Gymnasium's environments, made by the real package, as turns."""

from __future__ import annotations

import asyncio
import json
import string
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from helpers import small_run
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.algorithms.advantage_estimators import token_rewards
from headrace.engine.request import append_call
from headrace.envs import EnvironmentSettings, GymnasiumEnvironment, check_environment, run_episode
from headrace.envs.steps import paid
from headrace.records import Call, Episode, FinishReason, InfraAbort, Rollout, Sampling
from headrace.settings import ConfigError

gymnasium = pytest.importorskip("gymnasium")
END, STOP = "<|im_end|>", FinishReason.STOP


class Guess(gymnasium.Env):
    """Higher or lower, a tenth for each guess, one for the number; it ends after `limit` guesses."""

    observation_space = gymnasium.spaces.Text(64, charset=string.printable)
    action_space = gymnasium.spaces.Text(64, charset=string.printable)
    threads: ClassVar[set[str]] = set()
    open: ClassVar[int] = 0

    def __init__(self, limit: int = 4) -> None:
        self.limit, self.count = limit, 0
        Guess.open += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int((options or {}).get("secret", self.np_random.integers(0, 10)))
        self.threads.add(threading.current_thread().name)
        return "Guess a digit.", {}

    def step(self, action):
        self.threads.add(threading.current_thread().name)
        self.count += 1
        if action == "break":
            raise OSError("the game broke")
        guess = int(action) if action.isdigit() else -1
        is_right = guess == self.secret
        reply = "right" if is_right else "higher" if guess < self.secret else "lower"
        return reply, 1.0 if is_right else 0.1, is_right, self.count >= self.limit, {}

    def close(self):
        Guess.open -= 1


gymnasium.register("headrace-test/Guess-v0", entry_point=Guess)
TASK = {"prompt": [{"role": "user", "content": "Play."}], "options": {"secret": 7}}


def play(says: list[str], task=TASK, *, reasons=(), template="qwen2_5", **options):
    client, engine = client_of(tokenizer_of(template))
    reasons = [*reasons, *[STOP] * (len(says) - len(reasons))]
    engine.says = [(f"{text}{END if reason is STOP else ''}", reason) for text, reason in zip(says, reasons, strict=True)]
    environment = GymnasiumEnvironment("headrace-test/Guess-v0", **options)
    episode = asyncio.run(run_episode(environment, task, client))
    return episode, client, engine


def test_observations_are_messages_and_answers_are_actions() -> None:
    episode, client, engine = play(["3", " 9\n", "7"])
    (rollout,) = episode.rollouts
    said = [(message["role"], message["content"].strip()) for message in client.messages(rollout)]
    turns = [("user", "Play.\n\nGuess a digit."), ("assistant", "3"), ("user", "higher"), ("assistant", "9")]
    assert said[-6:] == [*turns, ("user", "lower"), ("assistant", "7")]
    check_trained(episode.rollouts, engine)
    assert rollout.rewards == {"environment": pytest.approx(1.2)} and rollout.step_rewards == ()
    assert episode.outcome is None  # reward functions may add theirs
    assert Guess.open == 0 and Guess.threads == {"gymnasium"}


def test_step_rewards_are_on_the_tokens_that_earned_them() -> None:
    episode, _, _ = play(["3", "9", "7"], step_rewards=True)
    (rollout,) = episode.rollouts
    rewards = token_rewards(rollout, rollout.rewards["environment"])
    ends = [call.stop - 1 for call in rollout.calls]
    assert rewards[ends].tolist() == pytest.approx([0.1, 0.1, 1.0]) and rewards.sum() == pytest.approx(1.2)


def test_each_rollout_of_a_forked_episode_gets_the_whole_reward_once() -> None:
    episode, _, engine = play([f"<think>\nhm\n</think>\n\n{guess}" for guess in (3, 9, 7)], template="qwen3", step_rewards=True)
    assert len(episode.rollouts) > 1
    check_trained(episode.rollouts, engine)
    for rollout in episode.rollouts:
        assert token_rewards(rollout, rollout.rewards["environment"]).sum() == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("says", "options", "calls"), [(["1"] * 4, {}, 4), (["1"] * 2, {"make": {"limit": 2}}, 2), (["1"] * 3, {"max_turns": 3}, 3)]
)
def test_an_episode_ends_when_it_is_truncated(says, options, calls) -> None:
    episode, _, _ = play(says, **options)
    assert len(episode.rollouts[0].calls) == calls
    assert episode.rollouts[0].rewards["environment"] == pytest.approx(0.1 * calls)


def test_an_episode_ends_after_its_seconds_and_keeps_what_it_earned() -> None:
    class Slow(Guess):
        def step(self, action):
            time.sleep(0.2)
            return super().step(action)

    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(f"1{END}", STOP)] * 4
    episode = asyncio.run(run_episode(GymnasiumEnvironment(Slow, max_seconds=0.3), TASK, client))
    (rollout,) = episode.rollouts
    assert len(rollout.calls) == 2 and rollout.rewards["environment"] == pytest.approx(0.2) and episode.outcome is None


def test_a_cut_answer_is_no_action() -> None:
    episode, _, _ = play(["3", "7"], reasons=[STOP, FinishReason.LENGTH])
    assert episode.rollouts[0].rewards == {"environment": pytest.approx(0.1)}
    assert episode.rollouts[0].finish_reason is FinishReason.LENGTH


def test_a_step_that_raises_costs_the_episode_and_closes_the_environment() -> None:
    episode, _, _ = play(["break"])
    assert isinstance(episode.outcome, InfraAbort) and "the game broke" in episode.outcome.reason
    assert Guess.open == 0


def test_siblings_start_alike_and_groups_do_not() -> None:
    def secret(group: str, task: dict) -> int:
        seen = []

        class Watched(Guess):
            def step(self, action):
                seen.append(self.secret)
                return super().step(action)

        client, engine = client_of(tokenizer_of("qwen2_5"))
        client.group, engine.says = group, [(f"1{END}", STOP)]
        asyncio.run(run_episode(GymnasiumEnvironment(Watched, max_turns=1), task, client))
        return seen[0]

    task = {"prompt": "Play. "}
    assert secret("g1", task) == secret("g1", task)
    assert len({secret(f"g{number}", task) for number in range(8)}) > 1
    assert len({secret(f"g{number}", {**task, "seed": 3}) for number in range(8)}) == 1


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"environment.options.id = 'NoSuch-v0'"):
        GymnasiumEnvironment("NoSuch-v0")
    for name, value in (("max_turns", 0), ("max_seconds", "1")):
        with pytest.raises(ConfigError, match=rf"environment.options.{name} = {value!r}"):
            GymnasiumEnvironment("headrace-test/Guess-v0", **{name: value})
    client, _ = client_of(tokenizer_of("qwen2_5"))
    with pytest.raises(ConfigError, match="ndarray, not text"):
        asyncio.run(run_episode(GymnasiumEnvironment("CartPole-v1"), TASK, client))


def test_a_run_trains_on_what_the_environment_pays(tmp_path) -> None:
    """No reward function; with one, both count."""
    tasks = [{"prompt": f"{number}", "options": {"secret": number}} for number in range(8)]
    environment = GymnasiumEnvironment(Guess, make={"limit": 2}, max_turns=2)
    how = {"tasks": tasks, "environment": environment, "model": {"context": 64}}
    run = small_run(tmp_path / "own", **how, held_out=tasks[:2], reward=None, steps=2)
    rows = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/environment" in row]
    assert run.summary["steps"] == 2 and trained
    assert all(row["reward"] == pytest.approx(row["reward/environment"]) for row in trained)

    def half(prompt, completion, **_):
        return 0.5

    both = small_run(tmp_path / "both", **how, held_out=None, reward=half, steps=1)
    assert both.summary["steps"] == 1
    rows = [json.loads(line) for line in (tmp_path / "both" / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if "reward/half" in row)
    assert row["reward"] == pytest.approx(0.5 + row["reward/environment"])


def test_what_the_turns_are_paid_adds_up_to_the_outcome_on_the_last_token_alone() -> None:
    """The last answer was truncated and is no action: with the outcome, which counts there, it gets nothing."""
    sampled = {"sampling": Sampling(max_tokens=2), "finish_reason": FinishReason.STOP}
    rollout = Rollout.from_prompt([1], id="r").replace(episode="e", group="g")
    for start in (1, 3):
        call = Call(start=start, stop=start + 2, engine="e", started=0.0, finished=1.0, **sampled)
        arrays = {"token_ids": np.ones(2, np.int32), "logprobs": np.zeros(2, np.float32), "versions": np.zeros(2, np.int32)}
        rollout = append_call(rollout, call, **arrays, policy="p", lineage="l")
    episode = Episode(id="e", group="g", task={}, rollouts=(rollout,))
    (found,) = paid(episode, [("r", 2, 3.0)], step_rewards=True).rollouts
    assert found.step_rewards == ((2, 3.0), (4, -3.0)) and sum(found.rewards.values()) == 3.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "headrace-test/Gues-v0"}, "environment.options.id = 'headrace-test/Gues-v0'"),
        (
            {"id": "headrace-test/Guess-v0", "max_turnz": 3},
            r"options.max_turnz: .*did you mean environment.options.max_turns\?",
        ),
        ({"id": "headrace-test/Guess-v0", "max_turns": 0}, "environment.options.max_turns"),
        ({"max_turns": 3}, "missing a required argument: 'id'"),
    ],
)
def test_a_recipe_with_wrong_options_is_refused_before_a_run(options: dict, problem: str) -> None:
    named = {"name": "headrace.envs:GymnasiumEnvironment"}
    check_environment(EnvironmentSettings(**named, options={"id": "headrace-test/Guess-v0", "step_rewards": True}))
    with pytest.raises(ConfigError, match=problem):
        check_environment(EnvironmentSettings(**named, options=options))
