"""The walls of the house: which room may know which, and what nobody may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "headrace"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
VENDORS = {"vllm", "ray", "wandb", "tensorboard", "datasets", "pyarrow", "peft", "trl", "reasoning_gym"}


def imports(path: Path, *, at_run_time: bool) -> set[str]:
    """Modules a file imports; those under `if TYPE_CHECKING` only where asked for."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if at_run_time and id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def rooms_used(room: str) -> set[str]:
    used = set()
    for path in (PACKAGE / room).rglob("*.py"):
        for module in imports(path, at_run_time=True):
            parts = module.split(".")
            if parts[0] == "headrace" and len(parts) > 1 and parts[1] in ROOMS:
                used.add(parts[1])
    return used - {room}


def test_only_orchestrate_knows_more_than_two_rooms() -> None:
    """But for `bench`, which measures the house from outside: it may know every room, and no room may know it."""
    known = {room: rooms_used(room) for room in ROOMS}
    inner = {room: used for room, used in known.items() if room not in ("orchestrate", "bench")}
    too_many = {room: used for room, used in inner.items() if len(used - {"observe"}) > 2}
    assert not too_many
    assert all("orchestrate" not in used for used in inner.values())
    assert all("bench" not in used for used in known.values())


def test_rooms_do_not_know_each_other_in_circles() -> None:
    known = {room: rooms_used(room) for room in ROOMS}
    for room in ROOMS:
        reached, todo = set(), [room]
        while todo:
            for other in known[todo.pop()] - reached:
                reached.add(other)
                todo.append(other)
        assert room not in reached, f"{room} reaches itself"


def test_vendors_are_imported_where_they_are_needed_and_nowhere_else() -> None:
    for path in PACKAGE.rglob("*.py"):
        top_level = {
            alias.name.split(".")[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not top_level & VENDORS, path


def test_a_file_fits_in_the_head() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 700, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno <= 70, f"{path}: {node.name}"


def test_the_loops_say_what_they_wait_for() -> None:
    tree = ast.parse((PACKAGE / "orchestrate" / "loops.py").read_text())
    loops = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.AsyncFunctionDef)}
    for name in ("feed", "generate", "score", "train"):
        assert "Waits for" in loops[name] and ("oken by" in loops[name]), name


def test_importing_the_package_is_light() -> None:
    script = "import sys, headrace; sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
