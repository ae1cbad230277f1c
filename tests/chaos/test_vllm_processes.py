"""vLLM servers of a run killed with everything they hold. Each test starts the command a user starts."""

from __future__ import annotations

import os
import signal

import pytest
from faults import RECIPE, Running, command_of, is_alive, start, wait_until
from vllm_server import MISSING, VARIABLES, vllm_python

from headrace.observe.observer import read_metrics

pytestmark = pytest.mark.skipif(vllm_python() is None, reason=MISSING)

VLLM = ("--engine.kind=vllm", "--heartbeat=30", "--steps=6")


def servers(run: Running) -> list[int]:
    """Every process of the run's servers, their keepers among them."""
    own = f"{run.folder.parent}"
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in everyone if "vllm.entrypoints.cli.main serve" in command_of(pid) and own in environment_of(pid)]


def environment_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python(), "HEADRACE_TEST_RUN": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return lambda *overrides: start(tmp_path, *VLLM, *overrides)


def test_a_killed_server_is_started_again_and_the_run_loses_nothing(begin):
    assert "[engine]" in RECIPE
    run = begin()
    run.wait_for_version(2, seconds=120)
    first = servers(run)
    assert len(first) == 2, "a keeper and a server"
    os.kill(max(first), signal.SIGKILL)
    output = run.finish(seconds=180)
    assert run.process.returncode == 0, output
    assert "engine-0 failed" in output and "started again (1 of 3)" in output and "engine-0.vllm.log" in output
    summary, rows = run.summary, read_metrics(run.folder / "metrics.jsonl")
    assert summary["status"] == "finished" and [row["version"] for row in rows] == list(range(1, 7))
    assert max(row["train/mismatch_max"] for row in rows) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert wait_until(lambda: not servers(run)) and not any(map(is_alive, first)) and not run.leftovers()


def test_a_killed_launcher_leaves_no_server(begin):
    run = begin("--steps=1000")
    run.wait_for_version(1, seconds=120)
    assert servers(run) and run.leftovers()
    run.process.kill()
    run.finish()
    assert wait_until(lambda: not servers(run), seconds=30) and wait_until(lambda: not run.leftovers(), seconds=5)
