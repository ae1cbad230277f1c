"""A run on a slow disk: engines decode and the trainer trains while checkpoints are written.

`pytest tests/run/test_slow_disk.py -s` prints the figures that docs/orchestration.md shows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest
from helpers import small_run

from headrace.observe.sinks import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

SYNC_SECONDS = 0.2
STEP_SECONDS = 1.5
EVERY, STEPS = 4, 16

SLOW = f"""
import os, time
from headrace.algorithms.losses import grpo

fsync = os.fsync

def slow_disk(descriptor):
    time.sleep({SYNC_SECONDS})
    fsync(descriptor)

os.fsync = slow_disk  # in the trainer's process, which imports this file

def slow_step(tokens, **constants):
    time.sleep({STEP_SECONDS})
    return grpo(tokens, **constants)
"""


def overlap(events: list[dict[str, Any]], name: str, start: float, stop: float) -> float:
    """Seconds within [start, stop] that spans of this name cover."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]
    return sum(max(0.0, min(stop, last) - max(start, first)) for first, last in spans) / 1e6


@pytest.mark.long
def test_engines_decode_and_the_trainer_trains_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(SYNC_SECONDS), fsync(descriptor))[1])
    result = small_run(
        tmp_path / "run",
        orchestrate="local",
        steps=STEPS,
        held_out=None,
        staleness={"max_lag": 2},
        checkpoint={"every": EVERY, "keep": 2},
        train={"loss": f"{tmp_path / 'slow.py'}:slow_step"},
        observe={"trace": True},
    )
    rows = {row["version"]: row["seconds"] for row in read_metrics(result.folder / "metrics.jsonl")}
    after_saves = [rows[version] for version in range(EVERY + 1, STEPS + 1, EVERY)]
    after_save, step = map(statistics.median, (after_saves, [rows[version] for version in rows if version % EVERY != 1]))
    print(f"\na version {step:.3f} s, the one after a save {after_save:.3f} s: stall {after_save / step - 1:.1%} of a step")
    events = json.loads((result.folder / "trace.json").read_text())
    saves = [event for event in events if event["name"].startswith("checkpoint ")]
    assert len(saves) == STEPS // EVERY
    for event in saves[:-1]:  # no training follows the last
        start, stop = event["ts"], event["ts"] + event["dur"]
        seconds = (stop - start) / 1e6
        trained, decoded = (overlap(events, name, start, stop) for name in ("compute", "decode"))
        print(f"{event['name']}: {seconds:.2f} s; meanwhile the trainer computed {trained:.2f} s, the engine {decoded:.2f} s")
        assert seconds > 8 * SYNC_SECONDS and trained > 0.8 * seconds and decoded > 0
    assert min(after_saves) < 1.05 * step, "the least, because other processes may take the processor at any time"
