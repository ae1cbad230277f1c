"""The walls of the house: which room may know which, and what nobody may do."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import typing
from pathlib import Path

from headrace.algorithms.corrections import CORRECTIONS
from headrace.algorithms.losses import LOSSES
from headrace.algorithms.traits import ADVANTAGES, CORRECTIONS_WITH_TRAITS, LOSSES_WITH_TRAITS
from headrace.buffer.kinds import POLICIES
from headrace.config import Recipe
from headrace.engine.settings import KINDS
from headrace.partial import Interrupt
from headrace.sync.table import PAYLOADS, TRANSPORTS

PACKAGE = Path(__file__).parents[1] / "headrace"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
VENDORS = {"vllm", "ray", "wandb", "tensorboard", "datasets", "pyarrow", "peft", "trl", "reasoning_gym", "math_verify", "mcp"}
VENDORS |= {"bitsandbytes", "gymnasium", "openenv", "verifiers"}


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
    """`from headrace.sync import X` and never `from headrace.sync.memory import X`, but inside the room itself."""
    inside = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for module in imports(path, at_run_time=False):
            parts = module.split(".")
            if parts[0] == "headrace" and len(parts) > 2 and parts[1] in ROOMS and parts[1] != room:
                inside.append(f"{path.relative_to(PACKAGE)}: {module}")
    assert not inside


ALSO_OWNED_BY = {
    "train.loss": "algorithms",
    "algorithm": "algorithms",
    "train.advantage": "algorithms",
    "train.scale_rewards": "algorithms",
    "train.loss_mean": "run",
    "train.kl_estimator": "algorithms",
    "staleness.correct": "algorithms",
}
"""Choices that a setting of one room names and another room implements."""
TORCHS_OWN = ("device", "model.dtype")
"""Settings whose values are torch's words, which any room may use."""
NOBODYS = {"auto", "none"}


def literals(hint: object) -> set[str]:
    """The texts that a setting may have, where it may have only some."""
    if typing.get_origin(hint) is tuple:
        return literals(typing.get_args(hint)[0])
    return set(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else set()


def choices(section: type, prefix: str = "") -> dict[str, tuple[set[str], set[str]]]:
    """Every setting that is a choice: (its names, the rooms that may spell them)."""
    found = {}
    for name, hint in typing.get_type_hints(section).items():
        key = prefix + name
        if dataclasses.is_dataclass(hint):
            found |= choices(hint, f"{key}.")
        elif key not in TORCHS_OWN and (names := literals(hint) - NOBODYS):
            found[key] = (names, {section.__module__.split(".")[1], ALSO_OWNED_BY.get(key, "")})
    return found


ALL_CHOICES = choices(Recipe) | {"train.loss": (set(LOSSES), {"trainer", "algorithms"})}
STILL_SPELLED = {
    "bench/partial.py: partial.interrupt",  # the name of the row that the others are compared with
    "bench/sync.py: sync.transport",  # the rows that it compares
}
"""`file: setting` of each place that spells another room's choice because it cannot ask yet."""


def texts_of(*nodes: ast.expr | None) -> list[str]:
    """The literal texts among expressions, and in tuples, lists and sets of them."""
    parts = [part for node in nodes for part in (node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node])]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def spelled(tree: ast.AST, *, tables: bool) -> list[set[str]]:
    """The texts that code compares with and, all together, the keys of a dict that has no others: a table of choices."""
    found: list[set[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            is_search = isinstance(node.ops[0], ast.In | ast.NotIn)  # `"completion" in names` asks about names
            found += [{text} for text in texts_of(*([] if is_search else [node.left]), *node.comparators)]
        elif isinstance(node, ast.MatchValue):
            found += [{text} for text in texts_of(node.value)]
        elif isinstance(node, ast.Dict) and tables and len(texts := texts_of(*node.keys)) == len(node.keys) > 1:
            found.append(set(texts))
    return found


def test_no_room_spells_the_choices_of_another() -> None:
    """A choice says of itself what others must know (`buffer_policy(recipe).takes_turns`); nobody else compares its name."""
    wrong = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for texts in spelled(ast.parse(path.read_text()), tables=room != "bench"):  # a benchmark's rows have their names
            settings = {key: owners for key, (names, owners) in ALL_CHOICES.items() if texts <= names}
            if settings and not any(room in owners for owners in settings.values()):
                wrong.add(f"{path.relative_to(PACKAGE)}: {' or '.join(settings)}")
    assert wrong == STILL_SPELLED


def test_settings_name_every_choice_there_is() -> None:
    assert ALL_CHOICES["buffer.kind"][0] == set(POLICIES)
    assert ALL_CHOICES["engine.kind"][0] == set(KINDS)
    assert ALL_CHOICES["sync.transport"][0] == set(TRANSPORTS)
    assert ALL_CHOICES["sync.payload"][0] == set(PAYLOADS)
    assert ALL_CHOICES["partial.interrupt"][0] == set(Interrupt)
    assert ALL_CHOICES["staleness.correct"][0] == set(CORRECTIONS) >= set(CORRECTIONS_WITH_TRAITS)
    assert ALL_CHOICES["train.advantage"][0] == set(ADVANTAGES)
    assert set(LOSSES_WITH_TRAITS) <= set(LOSSES)


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
