"""The soak of tools/soak.py, for less than a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_short_soak_finds_nothing() -> None:
    tool = Path(__file__).parents[2] / "tools" / "soak.py"
    done = subprocess.run([sys.executable, tool, "--minutes=0.6", "--every=8"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no process, socket or shared memory is left" in done.stdout
