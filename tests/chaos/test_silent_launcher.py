"""A launcher that falls silent while its streams stay open, as when its host vanishes: here it is stopped (SIGSTOP)."""

from __future__ import annotations

import signal

import pytest
from faults import is_alive, start, wait_until
from safetensors import safe_open


@pytest.mark.long
def test_its_processes_end_by_themselves_and_the_trainer_saves_first(tmp_path):
    run = start(tmp_path, "--heartbeat=4", "--steps=100000", "--checkpoint.every=100000")
    run.wait_for_version(5)
    roles = run.roles()
    assert len(roles) == 2 and run.leftovers()
    run.process.send_signal(signal.SIGSTOP)
    try:
        assert wait_until(lambda: not any(map(is_alive, roles)), seconds=60), "they wait for the launcher for ever"
        (rescued,) = (run.folder / "checkpoints").glob("rescued-*")
        assert int(rescued.name.removeprefix("rescued-")) >= 5 and (rescued / "config.json").exists()
        with safe_open(rescued / "model.safetensors", framework="pt") as weights:
            assert list(weights.keys())
        assert not list((run.folder / "checkpoints").glob(".*")) and not run.leftovers()
        for name in ("engine-0", "trainer"):
            assert "heard nothing from the launcher for 12 s" in (run.folder / "logs" / f"{name}.log").read_text()
    finally:
        run.process.send_signal(signal.SIGCONT)
    output = run.finish()
    assert run.process.returncode == 1 and not run.leftovers() and not run.roles()
    assert "trainer failed: LauncherSilent: heard nothing" in output and str(rescued) in output, output


@pytest.mark.long
def test_launcher_stopped_for_a_moment_goes_on(tmp_path):
    run = start(tmp_path, "--heartbeat=4", "--steps=30")
    run.wait_for_version(3)
    roles = run.roles()
    run.process.send_signal(signal.SIGSTOP)
    assert not wait_until(lambda: not all(map(is_alive, roles)), seconds=6)
    run.process.send_signal(signal.SIGCONT)
    output = run.finish()
    assert run.process.returncode == 0 and "started again" not in output and not run.leftovers(), output
