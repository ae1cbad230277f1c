"""Whole runs with agents: a function and a program, in training and evaluation; and the example."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import small_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "agent.py"
TASKS = [{"prompt": "0-9?", "secret": number} for number in range(8)]
CHATS = {"model": {"path": "builtin:tiny", "hidden_size": 32, "num_heads": 1, "num_layers": 1, "context": 96}, "reward": None}


def test_a_function_is_trained_and_evaluated_without_a_reward_function(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("agent_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = small_run(tmp_path, **CHATS, tasks=TASKS, held_out=TASKS[:2], environment=module.guess, steps=2)
    counted = result.summary["accounting"]
    assert (counted["trained"], counted["failed"]) == (32, 0) and counted["evaluation"] > 0
    assert result.summary["held_out"]["after"]["held_out_failed"] == 0 and result.summary["reward_first"] != 0


def test_an_external_program_is_trained(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(EXAMPLE.with_name("program.py")), "--steps=1", "--batch=16", f"--run-dir={tmp_path / 'run'}"]
    how = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **how)
    assert done.returncode == 0 and "trained 16 episodes" in done.stdout, done.stderr


@pytest.mark.long
def test_the_example_is_short_and_learns(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 80
    imported = {alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"argparse", "random", "openai", "headrace"}, "nothing of Headrace but its front door"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(EXAMPLE), "--steps", "40", "--run-dir", str(tmp_path / "run")]
    how = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"reward (\S+) -> (\S+)\n$", done.stdout).groups())
    assert last > first + 0.3
