"""Environments of verifiers 0.1, run by the real package. It cannot be installed beside 0.4: see docs/adapters.md."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers import small_run
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import LoadedVerifiersEnvironment, run_episode
from headrace.records import FinishReason, InfraAbort, Scored, Source
from headrace.settings import ConfigError

pytest.importorskip("verifiers.envs.environment")
END, STOP = "<|im_end|>", FinishReason.STOP


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "verifiers_plugins"))


def play(kind: str, says: list[str], row: int = 0):
    made = LoadedVerifiersEnvironment("headrace-classic", kind=kind)
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(f"{text}{END}", STOP) for text in says]
    episode = asyncio.run(run_episode(made, made.rows()[row], client))
    assert not [name for name in os.environ if name.startswith("HEADRACE_EPISODE")]
    return episode, client, engine


def test_one_turn() -> None:
    for says, reward in (("7", 1.5), ("9", 0.5), ("It is not 7 at all.", 0.0)):
        episode, client, engine = play("single", [says], row=1)
        text = client.encoder.tokenizer.decode(episode.rollouts[0].token_ids.tolist())
        assert episode.outcome == Scored(reward) and "Be brief." in text and "Say 7." in text
        check_trained(episode.rollouts, engine)


def test_several_turns() -> None:
    episode, _, engine = play("dialogue", ["3", "9", "12"])
    assert episode.outcome == Scored(1.5) and [len(rollout.calls) for rollout in episode.rollouts] == [3]
    check_trained(episode.rollouts, engine)


def test_tools() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 7}}\n</tool_call>'
    episode, client, engine = play("tools", [call, "12"])
    (rollout,) = episode.rollouts
    reply = rollout.token_ids[rollout.source == Source.TOOL].tolist()
    assert episode.outcome == Scored(1.5) and client.encoder.tokenizer.decode(reply).strip() == "12"
    check_trained(episode.rollouts, engine)


def test_a_failure_costs_the_episode_and_mistakes_are_named() -> None:
    episode, *_ = play("single", [])  # the engine raises
    assert isinstance(episode.outcome, InfraAbort)
    with pytest.raises(ConfigError, match="no-such-environment"):
        LoadedVerifiersEnvironment("no-such-environment")
    with pytest.raises(ConfigError, match="nothing"):
        LoadedVerifiersEnvironment("headrace-classic", nothing=1)


def test_it_is_trained(tmp_path: Path) -> None:
    made = LoadedVerifiersEnvironment("headrace-classic", kind="dialogue")
    model = {"path": "builtin:tiny", "hidden_size": 32, "num_heads": 1, "num_layers": 1, "context": 128}
    result = small_run(tmp_path, model=model, reward=None, tasks=made.rows(), held_out=None, environment=made, steps=1)
    counted = result.summary["accounting"]
    assert (counted["trained"], counted["failed"]) == (16, 0) and result.summary["reward_last"] > 0
