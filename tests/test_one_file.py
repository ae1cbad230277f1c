"""examples/one_file.py is documentation that runs: short, self-contained, truly asynchronous, and it learns."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "one_file.py"


def run_example(**options: int) -> str:
    """Run it as a user would, and return what it printed."""
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def find(pattern: str, output: str) -> re.Match[str]:
    match = re.search(pattern, output)
    assert match, f"{pattern!r} is not in the output:\n{output}"
    return match


def check_accounting(output: str) -> dict[str, int]:
    equation = find(r"^submitted (\d+) = (.+)$(?m:)".replace("$(?m:)", ""), output[output.index("submitted") :].splitlines()[0])
    places = {name: int(count) for name, count in re.findall(r"([a-z ]+?) (\d+)(?: \+ |$)", equation[2])}
    assert list(places) == ["trained", "rejected", "unused", "buffered", "in flight"]
    assert int(equation[1]) == sum(places.values())
    assert places["buffered"] == places["in flight"] == 0
    return places


def test_it_fits_in_the_head():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 300


def test_it_imports_nothing_of_ours_but_the_types():
    imported: set[str] = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            imported.update([node.module] if node.module != "headrace" else [f"headrace.{alias.name}" for alias in node.names])
    assert {name for name in imported if name.partition(".")[0] == "headrace"} == {"headrace.types"}
