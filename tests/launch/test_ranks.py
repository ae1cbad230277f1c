"""Runs whose trainer has two ranks, in processes."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from helpers import mismatches, small_run

from headrace.observe.sinks import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "chaos"))
from faults import Running, again, is_alive, start, wait_until

TWO = ("--train.parallel.shard=2", "--device=cpu")  # where there is a GPU, each rank would need one
pytestmark = pytest.mark.long


def check(run: Running, output: str) -> None:
    """Every version was trained once, and engines ran what the ranks trained."""
    assert run.process.returncode == 0, output
    rows, counts = read_metrics(run.folder / "metrics.jsonl"), run.summary["accounting"]
    assert run.summary["status"] == "finished" and counts["failed"] == 0
    assert [row["version"] for row in rows] == list(range(1, run.summary["steps"] + 1))
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert not run.leftovers() and not run.roles()


def test_a_run_of_two_ranks_resumes_with_one_and_with_two_again(tmp_path):
    """Also over another payload and transport, which may change too."""
    settings = {"observe": {"keep_rollouts_every": 1}, "engine": {"count": 2}}

    def leg(steps: int, shard: int, **changes):
        return small_run(
            tmp_path / "run",
            orchestrate="local",
            device="cpu",
            steps=steps,
            train={"parallel": {"shard": shard}},
            **settings,
            **changes,
        )

    first = leg(3, 2)
    names = {path.name for path in (first.folder / "logs").iterdir()}
    assert names >= {"trainer-0.log", "trainer-1.log", "engine-0.log", "engine-1.log"} and "trainer.log" not in names
    leg(5, 1)
    last = leg(8, 2, sync={"payload": "delta", "transport": "http"})
    rows = read_metrics(last.folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, 9)) and last.summary["status"] == "finished"
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert rows[-1]["sync_bytes"] < rows[0]["sync_bytes"] <= 1.05 * rows[0]["sync_full_bytes"]


def test_a_killed_rank_is_named_and_all_start_again_from_the_checkpoint(tmp_path):
    run = start(tmp_path, *TWO, "--heartbeat=10")
    run.wait_for_version(6)
    engine, other = run.role("engine-0"), run.role("trainer-0")
    run.hit("trainer-1", signal.SIGKILL)
    assert wait_until(lambda: not is_alive(other)), "it would wait for the lost one"
    run.wait_for_version(9)
    assert run.role("engine-0") == engine
    output = run.finish()
    check(run, output)
    assert "trainer-1" in output and "killed by SIGKILL" in output and "logs/trainer-1.log" in output
    assert "started again from version 4 (1 of 2)" in output or "started again from version 8 (1 of 2)" in output
    assert run.summary["restarts"] == {"trainer-0": 1, "trainer-1": 1}, "and no engine"


def test_a_stopped_rank_without_restarts_ends_the_run_by_name_and_one_rank_resumes_it(tmp_path):
    run = start(tmp_path, *TWO, "--train.restarts=0", "--heartbeat=3", "--steps=12")
    run.wait_for_version(6)
    run.hit("trainer-0", signal.SIGSTOP)
    output = run.finish()
    assert run.process.returncode == 1 and not run.leftovers() and not run.roles()
    assert "trainer-0" in output and "has not answered for" in output and "stopped by SIGSTOP" in output
    resumed = again(run, "--train.parallel.shard=1", "--train.restarts=2")
    output = resumed.finish()
    check(resumed, output)
    assert "resumed    version 4 of 12" in output or "resumed    version 8 of 12" in output
