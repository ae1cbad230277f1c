"""The tasks of examples/turns_gpu.py: what a dialogue is worth."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest
from templates import tokenizer_of
from test_turns import check_trained, client_of

from headrace.envs import run_episode
from headrace.records import FinishReason, Scored

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "turns_gpu.py"))


def play(name: str, task: dict, says: list[str]) -> tuple[float, int]:
    """The reward, and how many answers it took."""
    client, engine = client_of(tokenizer_of("qwen2_5"))
    engine.says = [(f"{text}<|im_end|>", FinishReason.STOP) for text in says]
    episode = asyncio.run(run_episode(EXAMPLE[name](), {"prompt": [{"role": "user", "content": "go"}], **task}, client))
    check_trained(episode.rollouts, engine)
    assert isinstance(episode.outcome, Scored)
    return episode.outcome.reward, len(episode.rollouts[0].calls)


@pytest.mark.parametrize(
    ("says", "reward", "turns"),
    [
        (["7"], 1.0, 1),
        (["15", "8", "It is 7."], 0.8, 3),
        (["15", "20", "16", "17", "18", "19"], 0.05, 6),  # one of six guesses was possible
        (["no", "no", "no", "no", "no", "7"], 0.5, 6),
        (["99999"] * 6, 0.0, 6),
    ],
)
def test_a_guess(says: list[str], reward: float, turns: int) -> None:
    assert play("Guess", {"number": 7}, says) == (pytest.approx(reward), turns)


@pytest.mark.parametrize(
    ("says", "reward", "turns"),
    [
        (["20 + 15", "35 * 12", "Answer: 420"], 1.0, 3),
        (["20 + 15", "35 * 12", "Answer: 42"], 0.5, 3),
        (["20 + 15", "35 * 13", "20 + 15", "35 * 12"], 0.25, 4),  # the last may only answer
        (["20 + 15 + 1", "__import__('os')", "20 + 15", "Answer: 35"], 0.25, 4),
        (["Answer: 420"], 1.0, 1),
    ],
)
def test_a_calculation(says: list[str], reward: float, turns: int) -> None:
    assert play("Calculate", {"steps": [35, 420]}, says) == (pytest.approx(reward), turns)


@pytest.mark.long
def test_it_runs(tmp_path: Path) -> None:
    run = EXAMPLE["main"](["guess", "--model=builtin:tiny", "--steps=1", "--batch=16", f"--run-dir={tmp_path}"])
    assert run.summary["accounting"]["trained"] == 16
