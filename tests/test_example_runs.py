"""The examples run, fit on a screen or two, and learn what they claim to."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def main_of(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


@pytest.mark.parametrize("name", ["calculator", "guess_the_number", "verifiers_environment"])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 80


def test_guessing_runs_over_turns(tmp_path: Path) -> None:
    small = {"train": {"batch": 20, "group_size": 2}, "evaluate": {"limit": 2}, "steps": 1, "quiet": True}
    result = main_of("guess_the_number")(run_dir=tmp_path / "run", **small)
    (row,) = metrics(result.folder)
    assert 1 < row["turns/mean"] <= 3 and row["turns/forked"] == 0
    assert result.samples[0].environment == "GuessTheNumber"


@pytest.mark.long
def test_guessing_is_learned(tmp_path: Path) -> None:
    result = main_of("guess_the_number")(run_dir=tmp_path / "run", steps=40, quiet=True)
    rows = metrics(result.folder)
    first, last = (sum(row["reward"] for row in some) / 5 for some in (rows[:5], rows[-5:]))
    assert first < 0.08 and last > 0.18
    assert rows[-1]["turns/mean"] < rows[0]["turns/mean"]


@pytest.mark.long
def test_the_calculator_is_learned(tmp_path: Path) -> None:
    result = main_of("calculator")(run_dir=tmp_path / "run", quiet=True)
    rows, summary = metrics(result.folder), result.summary
    first, last = (sum(row["reward"] for row in some) / 3 for some in (rows[:3], rows[-3:]))
    assert first < 0.4 and last > first + 0.25
    assert summary["success_before"] < 0.35 and summary["success_after"] > summary["success_before"] + 0.3
    assert rows[0]["turns/mean"] < 1.7 < rows[-1]["turns/mean"], "it calls the tool"
