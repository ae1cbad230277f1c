"""Whole runs whose rewards log, are shaped and are called in processes."""

from __future__ import annotations

import json

import pytest
from helpers import small_run

from headrace.records import frames
from headrace.score import SandboxUnavailable, run_code

CODE = [{"prompt": str(number), "tests": [f"assert add({number}, 1) == {number + 1}"]} for number in range(4)]

REWARDS = """
import os

def mine(prompt, completion, completion_length, finish_reason, trainer_state, log_metric):
    log_metric("length", completion_length)
    log_metric("process", os.getpid())
    assert finish_reason in ("stop", "length") and trainer_state.max_steps == 6 and 0 <= trainer_state.global_step < 7
    return 1.0 / (1 + len(completion))
"""


@pytest.mark.long
@pytest.mark.parametrize("orchestrate", ["inline", "local"])
def test_a_run_with_all_of_it(tmp_path, orchestrate: str) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    reward = {"functions": f"{tmp_path}/mine.py:mine", "processes": 2, "overlong_buffer": 2, "overlong_penalty": 0.5}
    run = small_run(tmp_path / "run", reward=reward, orchestrate=orchestrate)
    assert run.summary["status"] == "finished"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "logged/length" in row]
    assert logged and all(row["logged/length"] > 0 for row in logged)
    (kept,) = (tmp_path / "run" / "rollouts").glob("step-6.wire")
    assert b"overlong" in kept.read_bytes() and next(frames.read_frames(kept.open("rb")))


@pytest.mark.parametrize("orchestrate", ["inline", pytest.param("local", marks=pytest.mark.long)])
def test_a_run_whose_reward_is_code_that_runs(tmp_path, orchestrate: str) -> None:
    """An untrained model writes no program: every completion is scored 0, none fails."""
    try:
        run_code("")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    reward = {"functions": "headrace.score:code_tests", "workers": 2, "options": {"code_tests": {"seconds": 5}}}
    small = {"train": {"batch": 4, "group_size": 2}, "tasks": CODE, "held_out": None, "steps": 1, "engine": {"slots": 4}}
    run = small_run(tmp_path / "run", reward=reward, orchestrate=orchestrate, **small)
    assert run.summary["status"] == "finished"
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (row["reward"], row["failed"], row["logged/code/passed"], row["logged/code/failed"]) == (0, 0, 0, 1)
