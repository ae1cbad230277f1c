"""Environments of verifiers, run by the real package: single-turn, over turns, and with tools."""

from __future__ import annotations

import asyncio
import json
import os
from importlib import import_module
from pathlib import Path

import pytest
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import VerifiersEnvironment, run_episode
from headrace.records import FinishReason, InfraAbort, Scored, Source
from headrace.settings import ConfigError

pytest.importorskip("verifiers.v1")
END, STOP = "<|im_end|>", FinishReason.STOP
PLUGINS = str(Path(__file__).parent / "verifiers_plugins")


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLUGINS, os.environ.get("PYTHONPATH", "")]))


def environment(taskset="headrace_guess", **settings) -> VerifiersEnvironment:
    agent = {"harness": {"id": "headrace_guess"}, "runtime": {"type": "subprocess"}}
    return VerifiersEnvironment(taskset, agent=agent, **settings)


def play(made: VerifiersEnvironment, says: list[str], row: int = 0):
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(f"{text}{END}", STOP) for text in says]
    return asyncio.run(run_episode(made, made.rows()[row], client)), client, engine


def test_one_turn() -> None:
    made = environment()
    assert [row["prompt"] for row in made.rows()] == ["Say 12.", "Say 7."]
    for says, outcome in (("It is 7.", Scored(1.5)), ("It is 9.", Scored(0.5))):
        episode, client, engine = play(made, [says], row=1)
        (rollout,) = episode.rollouts
        assert episode.outcome == outcome and rollout.rewards["brief"] == 0.5
        text = client.encoder.tokenizer.decode(rollout.token_ids.tolist())
        assert "Be brief." in text and "Say 7." in text
        check_trained(episode.rollouts, engine)
    assert not [name for name in os.environ if name.startswith("HEADRACE_EPISODE")]


def test_several_turns() -> None:
    episode, _, engine = play(environment(id="headrace_dialogue"), ["3", "9", "12"])
    assert episode.outcome == Scored(1.5) and len(episode.rollouts) == 1
    assert len(episode.rollouts[0].calls) == 3
    check_trained(episode.rollouts, engine)


def test_tools() -> None:
    made = environment({"id": "headrace_guess", "task": {"has_tools": True}})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 7}}\n</tool_call>'
    episode, client, engine = play(made, [call, "It is 12."])
    assert episode.outcome == Scored(1.5)
    (rollout,) = episode.rollouts
    reply = rollout.token_ids[rollout.source == Source.TOOL].tolist()
    assert client.encoder.tokenizer.decode(reply).strip() == "12"
    check_trained(episode.rollouts, engine)


async def test_episodes_at_once_keep_apart() -> None:
    made = environment()

    async def one(number: int):
        client, engine = client_of(tokenizer_of("qwen2_5"), seed=number)
        engine.says = [(f"{['12', 'no'][number % 2]}{END}", STOP)]
        return await run_episode(made, made.rows()[0], client), engine

    for number, (episode, engine) in enumerate(await asyncio.gather(*(one(number) for number in range(4)))):
        assert episode.outcome == Scored([1.5, 0.5][number % 2])
        check_trained(episode.rollouts, engine)


def test_the_example_learns(tmp_path, monkeypatch) -> None:
    """Each step takes two seconds of verifiers: enough of them to see it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    run = import_module("verifiers_environment").main(run_dir=tmp_path / "run", steps=16, quiet=True)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 16 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3
    counted = run.summary["accounting"]
    assert (counted["trained"], counted["failed"]) == (16 * 48, 0)


def test_a_failure_costs_the_episode_and_mistakes_are_named() -> None:
    made = environment()
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = []  # the engine raises
    episode = asyncio.run(run_episode(made, made.rows()[0], client))
    assert isinstance(episode.outcome, InfraAbort)
    with pytest.raises(ConfigError, match="no_such_taskset"):
        VerifiersEnvironment("no_such_taskset")
    with pytest.raises(ConfigError, match="idx = 9 of a task"):
        asyncio.run(run_episode(made, {"prompt": "", "idx": 9}, client))
