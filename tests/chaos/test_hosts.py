"""A run whose engines are on other hosts: processes that share no folder with the launcher and reach it over TCP alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from faults import family, is_alive, start, wait_until
from helpers import books_close

from headrace.observe.sinks import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a token for this test, and no other"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def other_host(folder: Path, port: int, *more: str) -> subprocess.Popen[str]:
    """`headrace join` with folders of its own for everything."""
    folder.mkdir()
    places = {name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HEADRACE_CACHE")}
    command = [sys.executable, "-m", "headrace.cli", "join", f"tls://127.0.0.1:{port}", "--threads=1", "--device=cpu"]
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*command, f"--folder={folder / 'logs'}", *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **places, "HEADRACE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        )


@pytest.mark.long
def test_hosts_join_a_run_are_lost_and_leave(tmp_path, monkeypatch):
    """One host joins and is killed, its engine with it; another joins later, its engine is killed and restarted there, and it
    leaves as it is asked to."""
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    port, output = free_port(), tmp_path / "output"
    with contextlib.ExitStack() as stack:
        run = start(tmp_path, "--steps=100000", f"--cluster.listen=127.0.0.1:{port}", output=output)
        stack.callback(run.process.kill)
        first = other_host(tmp_path / "first", port)
        stack.callback(first.kill)

        def says(words: str, *, by: subprocess.Popen[str] | None = None) -> None:
            def is_said() -> bool:
                assert by is None or by.poll() is None, "the host has ended"
                return words in output.read_text()

            assert wait_until(is_said, seconds=240), output.read_text()

        def version_of(engine: str) -> int | None:
            rows = read_metrics(run.folder / "metrics.jsonl")
            return rows[-1].get(f"held/{engine}")

        says("engine-1 joined on", by=first)
        run.wait_for_version(run.version + 3)
        assert version_of("engine-1")
        [engine] = family(first.pid)
        first.kill()
        says("the run goes on with 1 of 2 engines")
        assert wait_until(lambda: not is_alive(engine)), "the engine of a host that is gone stays"
        run.wait_for_version(run.version + 3)
        assert version_of("engine-1") is None

        second = other_host(tmp_path / "second", port)
        stack.callback(second.kill)
        says("engine-2 joined on", by=second)
        joined_at = int(re.search(r"engine-2 joined on .* at version (\d+)", output.read_text())[1])
        assert joined_at > 0, "it caught up before it got work"
        run.wait_for_version(run.version + 3)
        os.kill(family(second.pid)[0], signal.SIGKILL)
        says("engine-2 is back")
        run.wait_for_version(run.version + 3)
        second.terminate()
        says("engine-2 on")
        assert second.wait(60) == 0 and "the run has let this host go" in (tmp_path / "second" / "output").read_text()
        run.wait_for_version(run.version + 2)
        run.process.terminate()
        assert run.process.wait(120) == 0 or "interrupted" in output.read_text(), output.read_text()

    summary = run.summary
    assert summary["restarts"] == {"engine-2": 1} and summary["engines_given_up"] == ["engine-1"]
    accounting = summary["accounting"]
    counted = sum(
        value if isinstance(value, int) else sum(value.values())
        for name, value in accounting.items()
        if name not in ("submitted", "evaluation")
    )
    assert counted == accounting["submitted"] > 0
    engines = {
        event["args"]["name"] for event in json.loads((run.folder / "trace.json").read_text()) if event["name"] == "thread_name"
    }
    assert {"engine-0", "engine-1", "engine-2"} <= engines
    assert not run.leftovers()


@pytest.mark.long
def test_a_launcher_that_has_neither_engine_nor_trainer_serves_hosts_that_do(tmp_path, monkeypatch):
    """The run starts when an engine and the trainer have joined; when its only engine is lost, it goes on with the next."""
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    port, output = free_port(), tmp_path / "output"
    with contextlib.ExitStack() as stack:
        settings = ("--engine.count=0", "--cluster.trainer_joins=true", f"--cluster.listen=127.0.0.1:{port}")
        run = start(tmp_path, "--steps=100000", *settings, output=output)
        stack.callback(run.process.kill)
        stack.callback(other_host(tmp_path / "trainer", port, "--role=trainer").kill)
        first = other_host(tmp_path / "first", port)
        stack.callback(first.kill)
        run.wait_for_version(2)
        assert "engine-0 joined on" in output.read_text() and not family(run.process.pid)
        first.kill()
        assert wait_until(lambda: "the run goes on with 0 of 1 engines" in output.read_text(), seconds=240), output.read_text()
        stack.callback(other_host(tmp_path / "second", port).kill)
        run.wait_for_version(run.version + 3)
        run.process.terminate()
        run.process.wait(120)
    assert run.summary["status"] == "interrupted" and run.summary["engines_given_up"] == ["engine-0"]
    assert books_close(run.summary)
    assert not run.leftovers()
