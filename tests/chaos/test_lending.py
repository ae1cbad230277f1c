"""Real runs in which the trainer's device is lent: an engine there joins, is recalled, and is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from faults import command_of, family
from helpers import books_close, small_run

from headrace.observe.inspect import read_rollouts
from headrace.records import FinishReason
from headrace.run import lending

SLOW_ENGINES: dict[str, Any] = {
    "model": {"context": 128, "hidden_size": 64},
    "sampling": {"max_tokens": 64, "min_tokens": 32},
    "engine": {"slots": 4, "lend": True},
    "train": {"batch": 16, "group_size": 4},
    "observe": {"keep_rollouts_every": 1},
    "checkpoint": {"every": 4, "keep": 1},
    "orchestrate": "local",
    "held_out": None,
}


class Eager(lending.LendingRule):
    """Lends whenever that saves anything, whatever trials show: on a loaded machine they may show anything."""

    def observe(self, **seen: Any) -> bool:
        has_ended = super().observe(**seen)
        self.is_on = True
        return has_ended


class KillOnce:
    """Kills the lent engine at one version."""

    def __init__(self, version: int) -> None:
        self._version = version

    def on_step(self, state: Any) -> None:
        if state.version == self._version:
            pid = next(pid for pid in family(os.getpid()) if command_of(pid).endswith("headrace.launch.child engine-lent"))
            os.kill(pid, signal.SIGKILL)


def check_accounting(summary: dict[str, Any], *, trained: int) -> None:
    counts = summary["accounting"]
    assert summary["status"] == "finished" and books_close(summary) and (counts["trained"], counts["failed"]) == (trained, 0)


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="engines share the trainer's only core, so nothing is lent")
def test_a_lent_engine_hands_its_rollouts_on_and_may_be_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(lending, "LendingRule", Eager)
    result = small_run(tmp_path / "run", preset="verl", steps=10, callbacks=[KillOnce(6)], **SLOW_ENGINES)
    summary, found = result.summary, result.summary["lending"]
    check_accounting(summary, trained=10 * 16)
    assert summary["restarts"].keys() <= {"engine-lent"} and not summary["engines_given_up"]
    assert found["times"] >= 1 and found["tokens"] > 0 and 0 < found["share"] < 1
    rollouts = [rollout for step in range(1, 11) for rollout in read_rollouts(tmp_path / "run", step)[1]]
    lent = [rollout for rollout in rollouts if any(call.engine == "engine-lent" for call in rollout.calls)]
    moved = [
        (first, then)
        for rollout in lent
        for first, then in zip(rollout.calls, rollout.calls[1:], strict=False)
        if first.engine == "engine-lent" and first.finish_reason is FinishReason.ABORT
    ]
    assert lent and moved and all(first.stop == then.start for first, then in moved), "no token is lost or sampled twice"
    resumed = small_run(tmp_path / "run", preset="verl", steps=12, **SLOW_ENGINES)
    check_accounting(resumed.summary, trained=12 * 16)
