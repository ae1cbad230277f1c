"""A benchmark in parts: one that fails takes no other with it, and what was measured is on disk at every moment."""

from __future__ import annotations

import json

import pytest

from headrace.bench.parts import choose, run_parts
from headrace.bench.table import Row
from headrace.settings import ConfigError


def test_a_part_that_fails_keeps_its_rows_and_the_others_go_on(tmp_path, capsys):
    file = tmp_path / "out.json"

    def names() -> list[str]:
        return [row["name"] for row in json.loads(file.read_text())["rows"]]

    def broken():
        yield [Row("before", 1.0, "s")]
        raise RuntimeError("it broke\nhere")

    def sound():
        assert names() == ["before"]  # written before this part began
        yield [Row("after", 2.0, "s", goal="≤ 3")]
        assert names() == ["before", "after"]

    parts = {"broken": broken, "sound": sound}
    assert run_parts("x", parts, only=None, quick=False, json_file=file, seconds=60) == 1
    assert names() == ["before", "after"] and "broken: failed: RuntimeError: it broke\n" in capsys.readouterr().out
    slow = {"slow": lambda: [[Row("slow", 4.0, "s", goal="≤ 3")]]}
    assert run_parts("x", slow, only=None, quick=True, json_file=file, seconds=60) == 0
    assert json.loads(file.read_text())["rows"][0]["goal"] == "≤ 3, not judged"
    assert run_parts("x", slow, only=None, quick=False, json_file=None, seconds=60) == 1
    assert "missed: slow: 4 s, goal ≤ 3" in capsys.readouterr().out


def test_no_part_begins_late_and_the_line_says_how_to_measure_it(capsys):
    parts = {"first": lambda: [[Row("a", 1.0, "s")]], "second": lambda: pytest.fail("begun")}
    assert run_parts("x", parts, only=None, quick=True, json_file=None, seconds=-1) == 1
    said = capsys.readouterr().out
    assert "first: left out" in said and "--only=second measures it alone" in said


def test_parts_are_asked_for_by_name():
    parts = {"a": list, "b": list, "c": list}
    assert choose("x", parts, None) == ["a", "b", "c"] and choose("x", parts, "c, a") == ["a", "c"]
    with pytest.raises(ConfigError, match=r"--only = a,d: `headrace bench x` has no part 'd' here; it has a, b, c"):
        choose("x", parts, "a,d")
