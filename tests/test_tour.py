"""The tour in docs/tour.md is true: its names exist, an inline run takes its way, and it is short enough to be read."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from helpers import small_run

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(headrace/[^`]+)` \| ([^|]+) \|")
MOST_LINES = 2300


def chapters() -> list[list[tuple[str, str]]]:
    """(file, name) of each row, by chapter."""
    found: list[list[tuple[str, str]]] = []
    for line in (ROOT / "docs" / "tour.md").read_text().splitlines():
        if line.startswith("## "):
            found.append([])
        elif row := ROW.match(line):
            found[-1] += [(row[1], name) for name in re.findall(r"`([^`]+)`", row[2])]
    return found


def definitions(file: str) -> dict[str, tuple[int, int, bool]]:
    """By qualified name: the first line, how many there are to read, and whether it is a function. Of a class those are its
    own lines, without its methods."""
    found = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                lines = (child.end_lineno or first) - first + 1
                if is_class := isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
                    lines -= sum(size for name, (_, size, _) in found.items() if name.startswith(f"{prefix}{child.name}."))
                found[f"{prefix}{child.name}"] = (first, lines, not is_class)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def test_every_name_exists_and_the_tour_is_short() -> None:
    stops = [stop for chapter in chapters() for stop in chapter]
    assert len(chapters()) == 10 and len(stops) > 80
    known = {file: definitions(file) for file, _ in stops}
    missing = [stop for stop in stops if stop[1] not in known[stop[0]]]
    assert not missing
    assert sum(known[file][name][1] for file, name in set(stops)) <= MOST_LINES


def test_an_inline_run_takes_the_tour(tmp_path: Path) -> None:
    entered: dict[tuple[str, int], int] = {}

    def note(frame, event, _) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT / "headrace")):
            if (code.co_name, Path(code.co_filename).name) == ("feed", "loops.py") and not entered:
                entered[("", 0)] = 0
            if entered:
                entered.setdefault((code.co_filename, code.co_firstlineno), len(entered))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        small_run(tmp_path / "run", steps=2, held_out=None)
    finally:
        sys.setprofile(before)
    order = []
    for chapter in chapters()[1:]:
        places = []
        for file, name in chapter:
            first, _, is_function = definitions(file)[name]
            assert is_function and (str(ROOT / file), first) in entered, f"{file}: {name} is not entered"
            places.append(entered[(str(ROOT / file), first)])
        order.append(max(places))  # a loop is entered early, and does its part when its turn comes
    assert order == sorted(order)
