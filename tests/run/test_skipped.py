"""Gradients that are not finite: the step is skipped and counted, its rollouts are kept, and too many end the run."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import same_weights, small_run
from safetensors.torch import load_file

from headrace.cli import main
from headrace.observe.inspect import kept_files, read_rollouts
from headrace.observe.sinks import read_metrics
from headrace.run.batches import StartedBatch
from headrace.run.metrics import NotFiniteGradient, SkippedSteps

LOSS = """
import time
from pathlib import Path
from headrace.algorithms.losses import grpo

LOST = {lost}
SWITCH = Path({switch!r})
SLOW = {slow}
calls = []

def now_and_then(tokens):
    "Not a number in the calls that are named, while the switch is there; one call is one optimizer step."
    calls.append(1)
    time.sleep(SLOW)
    losses, seen = grpo(tokens, clip_low=0.2, clip_high=0.28)
    return losses * (float("nan") if len(calls) in LOST and SWITCH.exists() else 1.0), seen
"""


@pytest.fixture
def losing(tmp_path):
    """A run's settings with a loss that is not finite in these steps, and the file without which it always is."""
    switch = tmp_path / "switch"
    switch.touch()

    def settings(lost: set[int], *, slow: float = 0.0, **train) -> dict:
        (tmp_path / "loss.py").write_text(LOSS.format(lost=lost, switch=str(switch), slow=slow))
        train |= {"loss": f"{tmp_path / 'loss.py'}:now_and_then", "stream_parts": 1}  # one call is one step
        return {"train": train, "held_out": None}

    return settings, switch


def test_steps_skipped_now_and_then_are_counted_shown_and_kept(tmp_path, losing, capsys):
    settings, _ = losing
    quiet = {"quiet": False, "observe": {"keep_rollouts_every": 0}}
    result = small_run(tmp_path / "run", steps=6, **settings({2, 3, 5}), **quiet)
    assert result.summary["status"] == "finished" and result.summary["skipped_steps"] == 3
    assert [row["train/skipped"] for row in read_metrics(result.folder / "metrics.jsonl")] == [0, 1, 1, 0, 1, 0]
    assert [path.name for path in kept_files(result.folder)] == ["step-2.wire", "step-3.wire", "step-5.wire"]
    assert len(read_rollouts(result.folder, 3)[1]) == 16
    said = capsys.readouterr().out
    assert "version 3: the gradient is not finite, the step skipped, 2 in a row; rollouts are in " in said
    assert "version 5: the gradient is not finite, the step skipped, 1 in a row" in said
    assert "skipped    3 optimizer steps" in said


def test_of_several_steps_the_rollouts_of_the_skipped_ones_are_kept(tmp_path, losing):
    """Two steps a version: the third of the run is the first of version 2. Across versions they count as one row."""
    settings, _ = losing
    with pytest.raises(NotFiniteGradient, match="3 optimizer steps in a row, the last of version 3"):
        small_run(tmp_path / "run", steps=6, **settings({3, 4, 5}, mini_batches=2), observe={"keep_rollouts_every": 0})
    folder = tmp_path / "run"
    assert [len(read_rollouts(folder, version)[1]) for version in (2, 3)] == [16, 8]
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 3


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_slow_disk_does_not_hold_up_the_event_loop(tmp_path, in_thread):
    """Unless there is only one thread: then the order of events is the same in every run."""
    threads: list[threading.Thread] = []
    said: list[str] = []

    def keep(version: int, rollouts: list[Any]):
        threads.append(threading.current_thread())
        return tmp_path / f"step-{version}.wire"

    observer: Any = SimpleNamespace(keep_rollouts=keep, screen=SimpleNamespace(say=said.append))
    batches: list[Any] = [SimpleNamespace(rollouts=[], is_last=True)]
    started = StartedBatch(version=1, groups=[], steps_before=0, batches=batches, answers=[{"skipped": 1.0}])
    asyncio.run(SkippedSteps(limit=3, observer=observer, in_thread=in_thread).check(started))
    assert [thread is threading.main_thread() for thread in threads] == [not in_thread]
    assert "version 2: the gradient is not finite" in said[0] and "step-2.wire" in said[0]


def test_zero_never_stops(tmp_path, losing):
    settings, _ = losing
    result = small_run(tmp_path / "run", steps=5, **settings({1, 2, 3, 4, 5}, max_skipped=0))
    assert result.summary["skipped_steps"] == 5 and result.summary["status"] == "finished"


@pytest.mark.parametrize("orchestrate", ["inline", pytest.param("local", marks=pytest.mark.long)])
def test_too_many_one_after_another_stop_the_run_which_resumes(tmp_path, losing, orchestrate, capsys):
    """In processes of their own the next batch has been sent when the third is seen to be lost: it is lost and counts too."""
    settings, switch = losing
    folder = tmp_path / "run"
    loss = settings({3, 4, 5, 6}, slow=0.2 if orchestrate == "local" else 0.0)
    common = {"steps": 8, "orchestrate": orchestrate, "checkpoint": {"every": 2, "keep": 10}, **loss}
    with pytest.raises(NotFiniteGradient) as caught:
        small_run(folder, **common)
    message = str(caught.value)
    file = folder / "rollouts" / "step-5.wire"
    assert "3 optimizer steps" in message and "the last of version 5" in message and str(file) in message and file.exists()
    summary = json.loads((folder / "summary.json").read_text())
    stopped = folder / "checkpoints" / f"step-{summary['version']}"
    assert summary["status"] == "failed" and 5 <= summary["version"] <= 6
    assert summary["skipped_steps"] == summary["version"] - 2, "the stop loses no count"
    assert same_weights(stopped, folder / "checkpoints" / "step-2")
    before, after = (load_file(path / "trainer" / "optimizer.safetensors") for path in (folder / "checkpoints/step-2", stopped))
    assert before and all(torch.equal(before[name], after[name]) for name in before), "moments and step counts too"
    with pytest.raises(SystemExit):
        main(["inspect", str(folder), "--step", "5"])
    assert "step 5: 16 rollouts" in capsys.readouterr().out
    switch.unlink()
    result = small_run(folder, **common)
    assert result.summary["status"] == "finished" and result.summary["accounting"]["trained"] == 8 * 16
    assert result.summary["skipped_steps"] == summary["skipped_steps"]
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, 9)) and np.isfinite(rows[-1]["train/loss"])
    assert not same_weights(result.checkpoint, stopped)
