"""How errors are told: short tracebacks in Python, and a command that can be typed."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
from helpers import small_run

import headrace
from headrace.errors import command
from headrace.score import RewardError


def files(error: BaseException) -> list[str]:
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_mistake_of_the_caller_is_shown_where_the_call_is() -> None:
    with pytest.raises(headrace.ConfigError) as caught:
        headrace.train(model="builtin:tiny", train={"batch": 65})
    assert files(caught.value) == ["test_errors.py", "__init__.py"]
    assert "Traceback" not in "".join(traceback.format_exception(caught.value)).partition("Traceback")[2]  # no other error


def test_what_the_callers_own_code_raised_is_shown_from_there_on(tmp_path) -> None:
    def broken(prompt, completion, **row) -> float:
        return row["gold"]

    with pytest.raises(RewardError) as caught:
        small_run(tmp_path / "run", reward=broken, held_out=None)
    assert files(caught.value) == ["test_errors.py", "helpers.py", "__init__.py"]
    assert isinstance(caught.value.__cause__, KeyError) and files(caught.value.__cause__) == ["test_errors.py"]
    assert any("launcher.log" in note for note in caught.value.__notes__)


def test_an_error_that_is_not_ours_keeps_every_frame(monkeypatch) -> None:
    def broken(*_) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headrace.launch.launcher.Launcher.launch", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        headrace.train(model="builtin:tiny")
    assert files(caught.value) == ["test_errors.py", "__init__.py", "launcher.py", "launcher.py", "test_errors.py"]


def test_the_command_is_named_so_that_it_can_be_typed(tmp_path, monkeypatch) -> None:
    script, python = tmp_path / "with space" / "headrace", tmp_path / "with space" / "python"
    script.parent.mkdir()
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command() == f"'{python}' -m headrace"
    script.touch(mode=0o755)
    assert command() == f"'{script}'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert command() == "headrace"
