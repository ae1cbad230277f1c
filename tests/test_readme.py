"""The README's commands are run, and what it shows is what they print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the tracked files with the same .venv, so that what commands leave behind is not left in the repository."""
    target = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if not (ROOT / ".venv" / ".ready").exists():
        pytest.skip("the README's commands use .venv; `make test` sets it up")
    (target / ".venv").symlink_to(ROOT / ".venv")
    return target


def shape(line: str) -> str:
    """A line with its numbers taken out: times and shares differ from run to run, the rest must not."""
    line = re.sub(r"bound by \w+", "bound by #", line)  # engine and trainer are nearly equal there
    return " ".join(re.sub(r"[\d.,]+", "#", line).split())


def run(command: list[str], checkout: Path, cache: Path) -> str:
    environment = {**os.environ, "HEADRACE_CACHE": str(cache), "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_every_command_runs_and_prints_what_is_shown(checkout, tmp_path) -> None:
    shown_after = ""
    num_commands = 0
    for language, text in blocks():
        if language == "bash":
            for command in text.strip().splitlines():
                shown_after = run(["bash", "-c", command], checkout, tmp_path)
                num_commands += 1
        elif language == "python":
            shown_after = run([".venv/bin/python", "-c", text], checkout, tmp_path)
            first, last, checkpoint = shown_after.strip().splitlines()[-1].split()
            assert float(last) > float(first) + 0.5 and (checkout / checkpoint / "config.json").exists()
        elif language == "text":
            printed = {shape(line) for line in shown_after.splitlines()}
            missing = [line for line in text.strip().splitlines() if shape(line) not in printed]
            assert not missing, f"the README shows what is not printed: {missing}"
    assert num_commands >= 6
    solved = float(re.search(r"-> ([\d.]+)% solved", run_summary(checkout))[1])
    assert solved >= 95


def run_summary(checkout: Path) -> str:
    """The held-out line of the quickstart that was run above, made again from its summary."""
    import json

    folder = next((checkout / "runs").glob("quickstart-*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["seconds"]["rl"] <= 90 * 3, "three times the goal, on a busy machine"
    assert 0.2 <= summary["success_before"] <= 0.4 and summary["greedy_before"] <= 0.6
    return f"{summary['success_before']:.1%} -> {summary['success_after']:.1%} solved"
