"""A vLLM server on a host that joins: processes that share no folder with the launcher and reach it over TCP alone."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from pathlib import Path

import pytest
from faults import start, wait_until
from helpers import books_close, mismatches
from test_hosts import TOKEN, free_port, other_host
from test_vllm_processes import servers
from vllm_server import MISSING, VARIABLES, vllm_python

import headrace
from headrace.leftovers import sweep
from headrace.observe.sinks import read_metrics
from headrace.sync import shared_folder

pytestmark = pytest.mark.long

REWARD = """
import time
from pathlib import Path

def reward(completion):
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return len(set(completion)) / 48
"""
"""Waits while the test holds the run: on two cores a busy one would keep a server from coming up for minutes."""


@pytest.mark.skipif(vllm_python() is None, reason=MISSING)
def test_a_server_of_a_host_that_joins_catches_up_trains_and_leaves(tmp_path, monkeypatch):
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python(), "HEADRACE_TEST_RUN": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    port, output = free_port(), tmp_path / "output"
    with contextlib.ExitStack() as stack:
        (tmp_path / "waiting.py").write_text(REWARD)
        rewards = f'--reward.functions=["{tmp_path / "waiting.py"}:reward"]'
        how = ("--engine.kind=vllm", "--steps=100000", f"--cluster.listen=127.0.0.1:{port}")
        run = start(tmp_path, *how, rewards, output=output)
        stack.callback(run.process.kill)
        run.wait_for_version(1)
        (tmp_path / "hold").touch()
        host = other_host(tmp_path / "host", port)
        stack.callback(host.kill)

        def says(words: str) -> None:
            assert wait_until(lambda: words in output.read_text(), seconds=240), output.read_text()

        says("engine-1 joined on")
        joined_at = int(re.search(r"engine-1 joined on .* at version (\d+)", output.read_text())[1])
        assert joined_at > 0, "it caught up before it got work"
        assert len(servers(run)) == 4, "of each engine, a keeper and a server"
        assert len(list(shared_folder().glob(f"headrace-{host.pid}-*-joined/*-servers/*"))) == 1, "one file of weights there"
        (tmp_path / "hold").unlink()
        run.wait_for_version(run.version + 4)
        held = read_metrics(run.folder / "metrics.jsonl")[-1]["held/engine-1"]
        assert held > joined_at

        host.send_signal(signal.SIGTERM)
        says("engine-1 on")
        assert host.wait(60) == 0 and "the run has let this host go" in (tmp_path / "host" / "output").read_text()
        assert wait_until(lambda: len(servers(run)) == 2), "its server has ended with it"
        assert not list(shared_folder().glob(f"headrace-{host.pid}-*"))
        run.wait_for_version(run.version + 1)
        run.process.terminate()
        assert run.process.wait(120) == 0 or "interrupted" in output.read_text(), output.read_text()

    rows = read_metrics(run.folder / "metrics.jsonl")
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert run.summary["restarts"] == {} and run.summary["engines_given_up"] == []
    assert books_close(run.summary)
    assert wait_until(lambda: not servers(run)) and not run.leftovers()


FAKE = f"""#!{sys.executable}
import sys
if "-c" in sys.argv:
    print("/nowhere/vllm")
    sys.exit()
sys.path[:0] = {[str(Path(__file__).parents[1] / "engine"), str(Path(headrace.__file__).parents[1])]}
from aiohttp import web
from fake_vllm import Fake
fake = Fake(candidates=((50, -0.9327), (51, -9999.0)))
web.run_app(fake.app(), path=sys.argv[sys.argv.index("--uds") + 1])
"""
CHANCE = """
import random

def reward(completion):
    return random.random()
"""


def test_a_host_that_vanishes_leaves_neither_its_server_nor_weights(tmp_path, monkeypatch):
    python, rewards, output, port = tmp_path / "python", tmp_path / "chance.py", tmp_path / "output", free_port()
    python.write_text(FAKE)
    python.chmod(0o755)
    rewards.write_text(CHANCE)
    for name, value in {"HEADRACE_VLLM_PYTHON": str(python), "HEADRACE_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_TEST_RUN", str(tmp_path))
    with contextlib.ExitStack() as stack:
        sizes = ("--model.context=64", "--sampling.max_tokens=8", "--sampling.min_tokens=0", "--sync.canary_limit=1e9")
        how = ("--engine.kind=vllm", "--steps=100000", f"--cluster.listen=127.0.0.1:{port}")
        run = start(tmp_path, *how, *sizes, f'--reward.functions=["{rewards}:reward"]', output=output)
        stack.callback(run.process.kill)
        host = other_host(tmp_path / "host", port)
        stack.callback(host.kill)
        assert wait_until(lambda: "engine-1 joined on" in output.read_text(), seconds=240), output.read_text()
        assert len(servers(run)) == 4
        run.wait_for_version(run.version + 3)
        host.kill()
        assert wait_until(lambda: "goes on with 1 of 2 engines" in output.read_text(), seconds=240), output.read_text()
        run.wait_for_version(run.version + 3)
        assert wait_until(lambda: len(servers(run)) == 2)
        assert wait_until(lambda: not list(shared_folder().glob(f"headrace-{host.pid}-*-joined/*")))
        run.process.terminate()
        assert run.process.wait(120) == 0 or "interrupted" in output.read_text(), output.read_text()
    assert run.summary["engines_given_up"] == ["engine-1"]
    assert books_close(run.summary)
    sweep(shared_folder())  # as the next run does
    assert wait_until(lambda: not servers(run)) and not list(shared_folder().glob(f"headrace-{host.pid}-*"))
