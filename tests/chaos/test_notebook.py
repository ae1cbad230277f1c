"""A run inside somebody else's event loop, as in a notebook: it has a thread, and interrupts are passed on to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from faults import RECIPE, Running, is_alive, wait_until

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import asyncio, sys
import headrace

async def main():
    headrace.train(recipe=sys.argv[1], run_dir=sys.argv[2], steps=400, heartbeat=300.0)

try:
    asyncio.run(main())
except KeyboardInterrupt as stopped:
    print("interrupted:", stopped)
    sys.exit(130)
"""


def start(tmp_path: Path) -> Running:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.toml"), str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    return Running(process, tmp_path / "run", command)


@pytest.mark.long
@pytest.mark.parametrize("version", [0, 3])
def test_an_interrupt_ends_it_whenever_it_comes(tmp_path, version):
    run = start(tmp_path)
    assert wait_until(lambda: len(run.roles()) == 2)
    if version:
        run.wait_for_version(version)
    roles = run.roles()
    run.process.send_signal(signal.SIGINT)
    output = run.finish()
    assert run.process.returncode == 130 and "saved" in output, output
    assert run.summary["status"] == "interrupted" and run.summary["version"] < 100
    assert not any(map(is_alive, roles)) and not run.leftovers()


@pytest.mark.long
def test_a_second_one_ends_it_at_once(tmp_path):
    assert start(tmp_path).is_ended_by_the_second_signal()
