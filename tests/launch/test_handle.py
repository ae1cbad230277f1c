"""`headrace.start`: a run in the background, and the handle that the caller has of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL, TASKS, length_reward, same_weights, small_run

import headrace
from headrace.launch import RunHandle, RunKilled
from headrace.settings import ConfigError

MODES = ["inline", pytest.param("local", marks=pytest.mark.long)]


def start(folder: Path, **changes: Any) -> RunHandle:
    settings: dict[str, Any] = {**SMALL, "tasks": TASKS, "reward": length_reward, "steps": 6, "quiet": True, **changes}
    return headrace.start(run_dir=folder, **settings)


class Holds:
    """Lets the run past a version once the test says so."""

    def __init__(self, version: int) -> None:
        self.version, self.reached, self.go_on = version, threading.Event(), threading.Event()

    def on_step(self, state: Any) -> None:
        if state.version == self.version:
            self.reached.set()
            assert self.go_on.wait(60)


def test_it_takes_the_arguments_of_train_and_ends_with_its_result(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        rows = list(run)
    result = run.result()
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6] and run.version == 6 and run.metrics == rows[-1]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == written and list(run) == rows, "another loop has them all again"
    assert not run.is_running and run.wait(0) and result.summary["status"] == "finished"
    assert same_weights(result.checkpoint, small_run(tmp_path / "train", held_out=None).checkpoint)


class Slow:
    """Gives a loop over the rows time to see what an evaluation has written."""

    def on_evaluate(self, state: Any, evaluation: Any) -> None:
        time.sleep(0.2)


def test_an_evaluation_joins_the_row_of_its_version(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 4, "held_out": TASKS[:4], "evaluate": {"every": 2, "limit": 4}, "callbacks": [Slow]}
    with start(tmp_path / "run", **how) as run:
        found = list(run)
    assert [row["version"] for row in found] == [1, 2, 3, 4] and run.version == 4
    assert all("reward" in row for row in found), "no row comes before its version is trained"
    assert {"reward", "success"} <= run.metrics.keys()
    assert ["success" in row for row in list(run)] == [False, True, False, True]


def test_a_handle_ends_sft_at_once(tmp_path: Path, cache_folder: Path) -> None:
    said = threading.Event()
    rows = [{"prompt": "1", "answer": "2"}]

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        said.set()
        return row

    sft = {"steps": 1_000_000, "batch": 4, "tasks": {"source": rows, "map": slow}}
    run = start(tmp_path / "run", steps=0, sft=sft)
    assert said.wait(60)
    run.kill()
    assert run.wait(60)
    with pytest.raises(RunKilled):
        run.result()


@pytest.mark.parametrize("mode", MODES)
def test_it_is_stopped_and_changed_from_outside(tmp_path: Path, mode: str) -> None:
    holds = Holds(2)
    run = start(tmp_path / "run", orchestrate=mode, steps=1000, callbacks=[holds])
    assert holds.reached.wait(100) and run.is_running and not run.wait(0)
    with pytest.raises(TimeoutError, match="has not ended within 0 seconds"):
        run.result(0)
    run.change("train.learning_rate", 5e-4)
    with pytest.raises(ConfigError, match=r"train.batch = 8: it cannot change while the run goes on"):
        run.change("train.batch", 8)
    holds.go_on.set()
    for row in run:
        if row["train/learning_rate"] == 5e-4:
            break
    run.stop()
    result = run.result()
    assert (result.summary["status"], result.summary["stopped_by"]) == ("stopped", "handle.stop")
    (change,) = result.summary["changes"]
    assert (change["key"], change["by"]) == ("train.learning_rate", "handle.change") and change["version"] >= 2
    assert result.checkpoint is not None and result.checkpoint.endswith(f"step-{result.summary['version']}")
    version = result.summary["version"]
    (again,) = list(start(tmp_path / "run", orchestrate=mode, steps=version + 1))
    assert again["train/learning_rate"] == 5e-4


def test_what_the_run_raises_is_raised_by_result_and_by_a_loop(tmp_path: Path) -> None:
    class Fails:
        def on_step(self, state: Any) -> None:
            raise KeyError("mine")

    run = start(tmp_path / "run", callbacks=[Fails()])
    with pytest.raises(RuntimeError, match=r"Fails.on_step raised KeyError"):
        list(run)
    with pytest.raises(RuntimeError, match=r"Fails.on_step raised KeyError"):
        run.result()
    with pytest.raises(ConfigError, match="stepps is not a setting"):
        start(tmp_path / "other", stepps=3)


def test_a_killed_run_says_so_and_is_resumed(tmp_path: Path) -> None:
    holds = Holds(4)
    run = start(tmp_path / "run", callbacks=[holds])
    assert holds.reached.wait(60)
    run.kill()
    holds.go_on.set()
    with pytest.raises(RunKilled, match="resumes from its last checkpoint"):
        run.result()
    assert [row["version"] for row in start(tmp_path / "run")] == [4, 5, 6]


def test_a_block_that_raises_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), start(tmp_path / "run", steps=100_000) as run:
        next(iter(run))
        1 / 0  # noqa: B018
    assert run.result().summary["status"] == "stopped"


PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
from helpers import SMALL, TASKS
import headrace
def mine(prompt, completion, **_):  # only this script has it
    return 1.0 / (1 + len(completion))
if __name__ == "__main__":
    settings = {{**SMALL, "orchestrate": {mode!r}, "steps": 100_000, "checkpoint": {{"every": 1000}}, "quiet": True}}
    run = headrace.start(run_dir={folder!r}, tasks=TASKS, reward=mine, **settings)
    next(iter(run))
    {end}
"""


@pytest.mark.long
@pytest.mark.parametrize(("mode", "end", "code"), [("inline", "1 / 0", 1), ("local", "pass", 0)])
def test_a_program_that_ends_without_waiting_saves_its_run_and_leaves_nothing(
    tmp_path: Path, mode: str, end: str, code: int
) -> None:
    folder = tmp_path / "run"
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), mode=mode, folder=str(folder), end=end)
    (tmp_path / "program.py").write_text(program)
    how: dict[str, Any] = {"env": {**os.environ, "STARTED_FOR": str(folder)}, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, str(tmp_path / "program.py")], timeout=300, **how)
    assert ended.returncode == code, ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1) and "headrace" not in ended.stderr.replace(str(tmp_path), "")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "stopped" and (folder / "checkpoints" / f"step-{summary['version']}").is_dir()
    assert not [place for place in Path("/proc").glob("[0-9]*/environ") if str(folder).encode() in environment(place)]


def environment(place: Path) -> bytes:
    try:
        return place.read_bytes()
    except OSError:  # it has ended
        return b""
