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


def find(pattern: str, output: str) -> tuple[str, ...]:
    match = re.search(pattern, output, re.MULTILINE)
    assert match, f"{pattern!r} is not in the output:\n{output}"
    return match.groups()


def check_accounting(output: str) -> dict[str, int]:
    submitted, terms = find(r"^submitted (\d+) = (.+)$", output)
    places = {term.rpartition(" ")[0]: int(term.rpartition(" ")[2]) for term in terms.split(" + ")}
    assert places.keys() == {"trained", "rejected", "unused", "buffered", "in flight"}
    assert int(submitted) == sum(places.values())
    assert places["buffered"] == places["in flight"] == 0, "the run has ended"
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
    assert {name for name in imported if name.partition(".")[0] == "headrace"} == {"headrace.records"}


@pytest.mark.long
def test_it_learns_from_rollouts_older_than_the_weights_they_train():
    output = run_example(steps=40, max_lag=1)
    assert check_accounting(output)["trained"] % 40 == 0
    mean, largest = find(r"lag: mean (\d+\.\d+) max (\d+)", output)
    assert 0 < float(mean) <= 1 and int(largest) == 1
    before, after = map(float, find(r"success: (\d\.\d+) -> (\d\.\d+)$", output))
    assert after >= before + 0.1


@pytest.mark.long
def test_without_lag_it_is_synchronous():
    output = run_example(steps=3, max_lag=0)
    places = check_accounting(output)
    assert places["rejected"] == places["unused"] == 0
    assert find(r"lag: mean (\S+) max (\d+)", output) == ("0.00", "0")
