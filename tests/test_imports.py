"""Functions by name: from modules, from files, and what is said when they are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def load(reference: str) -> object:
    return import_name(reference, setting="reward.functions")


def test_from_a_module() -> None:
    import posixpath

    assert load("posixpath:join") is posixpath.join


def test_from_a_file_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Thing: ...\nthing = Thing()\n")
    assert load(f"{file}:thing") is load(f"{file}:thing")
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "mine.py"
    other.write_text("thing = 'other'\n")
    assert load(f"{other}:thing") == "other"


def test_a_file_that_exits_on_import_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\ndef reward(completion): ...\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"script.py:reward': .* calls sys.exit\(0\) on import; put what is not to run"):
        load(f"{tmp_path / 'script.py'}:reward")


def test_a_module_is_found_from_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # so that what is put on sys.path is taken off again
    (tmp_path / "module_of_the_user.py").write_text("value = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load("module_of_the_user:value") == 3


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("just_a_name", "write module:name or file.py:name"),
        (":name", "write module:name"),
        ("module:", "write module:name"),
        ("no.such.module:name", "No module named 'no'"),
        ("no/such/file.py:name", "no/such/file.py: no such file"),
        ("posixpath:joyn", "posixpath has no 'joyn'"),
    ],
)
def test_what_is_not_there_is_refused_with_the_setting(reference: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(reference)
    assert str(caught.value).startswith(f"reward.functions = {reference!r}: ")
    assert problem in str(caught.value)


def test_a_file_that_failed_half_way_is_not_taken_for_loaded(tmp_path: Path) -> None:
    """As with Python's own import: the second attempt fails as the first did, or succeeds whole once the file is mended."""
    file = tmp_path / "broken.py"
    file.write_text("early = 1\nraise RuntimeError('half way')\nlate = 2\n")
    with pytest.raises(RuntimeError, match="half way"):
        load(f"{file}:late")
    with pytest.raises(RuntimeError, match="half way"):
        load(f"{file}:early")
    file.write_text("early = 1\nlate = 22\n")
    assert load(f"{file}:late") == 22
