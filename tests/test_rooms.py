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


HALLS = ("run", "launch", "plan", "bench")
"""Rooms that put others together; no other room may know them, nor more than two of its like."""


def test_few_rooms_know_more_than_two_others() -> None:
    known = {room: rooms_used(room) - {"records", "observe"} for room in ROOMS}
    too_many = {room: used for room, used in known.items() if room not in (*HALLS, "config") and len(used) > 2}
    assert not too_many
    assert all("bench" not in used for used in known.values())


def test_imports_go_through_front_doors() -> None:
    """`from headrace.sync import X` and never `from headrace.sync.shared import X`, but inside the room itself."""
    inside = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for module in imports(path, at_run_time=False):
            parts = module.split(".")
            if parts[0] == "headrace" and len(parts) > 2 and parts[1] in ROOMS and parts[1] != room:
                inside.append(f"{path.relative_to(PACKAGE)}: {module}")
    assert not inside


def test_importing_a_front_door_imports_no_torch() -> None:
    rooms = ", ".join(f"headrace.{room}" for room in ROOMS)
    script = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_rooms_do_not_know_each_other_in_circles() -> None:
    known = {room: set() if room == "config" else rooms_used(room) for room in ROOMS}  # it composes their settings
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
    tree = ast.parse((PACKAGE / "run" / "loops.py").read_text())
    loops = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.AsyncFunctionDef)}
    for name in ("feed", "generate", "score", "train"):
        assert "Waits for" in loops[name] and ("oken by" in loops[name]), name


def test_importing_the_package_is_light() -> None:
    script = "import sys, headrace; sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
