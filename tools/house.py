"""Size of the package, and how much of it a prompt crosses.

    python tools/house.py             lines and files per room, attributes of `Run`
    python tools/house.py --path      also runs three steps of the quickstart and counts what a prompt crosses

Lines are those of `.py` files, docstrings and comments included. A prompt crosses every file with a function that any process
enters between the start of the loops and the third trained version. Of these files all lines count, except blank ones and those
of functions that were not entered.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "headrace"

HOOK = """
import os, sys, threading, time
def _install():
    package, out, flag = os.environ["HOUSE_PACKAGE"], os.environ["HOUSE_OUT"], os.environ["HOUSE_FLAG"]
    seen, state = set(), {"on": False, "next": 0.0}
    def hook(frame, event, arg):
        if event != "call":
            return
        code = frame.f_code
        if not state["on"]:
            if code.co_name == "feed" and code.co_filename.endswith("loops.py"):
                open(flag, "w").close()
            now = time.monotonic()
            if now < state["next"] and code.co_name != "feed":
                return
            state["next"] = now + 0.02
            if not os.path.exists(flag):
                return
            state["on"] = True
        if code in seen or not code.co_filename.startswith(package) or os.path.exists(flag + ".over"):
            return
        seen.add(code)
        with open(out, "a") as file:
            file.write(f"{code.co_filename}\\t{code.co_firstlineno}\\n")
    threading.setprofile(hook)
    sys.setprofile(hook)
if os.environ.get("HOUSE_OUT"):
    _install()
"""


def rooms() -> dict[str, tuple[int, int]]:
    """Lines and files of each room; files outside a room count as (top)."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        size = sizes[parts[0] if len(parts) > 1 else "(top)"]
        size[0] += len(path.read_text().splitlines())
        size[1] += 1
    return {room: (lines, files) for room, (lines, files) in sorted(sizes.items())}


def run_attributes() -> int:
    """How many attributes `Run` sets on itself."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == "Run":
                return len(_attributes(node))
    raise SystemExit("no class Run")


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            found.add(item.attr)
    return found


def path_of_a_prompt() -> dict[Path, int]:
    """By file: the lines that a prompt crosses."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "sitecustomize.py").write_text(HOOK)
        out = Path(place) / "entered"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([place, str(ROOT)]),
            "HOUSE_PACKAGE": str(PACKAGE),
            "HOUSE_OUT": str(out),
            "HOUSE_FLAG": str(Path(place) / "loops-have-started"),
        }
        _train_three_versions(Path(place), environment)
        entered: dict[Path, set[int]] = defaultdict(set)
        for row in out.read_text().splitlines():
            file, _, line = row.partition("\t")
            entered[Path(file)].add(int(line))
    return {file: len(_lines(file, starts)) for file, starts in sorted(entered.items())}


def _train_three_versions(place: Path, environment: dict[str, str]) -> None:
    """Run the quickstart without evaluations or checkpoints, and stop it after the third version."""
    settings = [
        "--steps=100",
        "--sft.steps=20",
        "--evaluate.every=0",
        "--checkpoint.every=100",
        f"--run-dir={place / 'run'}",
    ]
    command = [sys.executable, "-m", "headrace", "train", "recipes/quickstart.toml", *settings]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        metrics = place / "run" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            time.sleep(0.05)
        Path(environment["HOUSE_FLAG"] + ".over").touch()
        process.send_signal(signal.SIGINT)


def _lines(file: Path, starts: set[int]) -> set[int]:
    """The lines of a file that are neither blank nor in a function that was not entered."""
    source = file.read_text()
    lines = {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first not in starts:
                lines -= set(range(first, (node.end_lineno or first) + 1))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="store_true", help="run the quickstart and count what a prompt crosses")
    options = parser.parse_args()
    sizes = rooms()
    for room, (lines, files) in sizes.items():
        print(f"{room:12} {lines:6} lines {files:4} files")
    whole = {name: sum(size[at] for size in sizes.values()) for at, name in enumerate(("lines", "files"))}
    print(f"{'all':12} {whole['lines']:6} lines {whole['files']:4} files")
    lines, files = whole["lines"] - sizes["bench"][0], whole["files"] - sizes["bench"][1]
    print(f"{'without bench':12}{lines:6} lines {files:4} files (goal: 27000 lines)")
    print(f"Run has {run_attributes()} attributes (goal: 20)")
    if options.path:
        crossed = path_of_a_prompt()
        for file, count in crossed.items():
            print(f"  {count:5} {file.relative_to(ROOT)}")
        print(f"a prompt crosses {len(crossed)} files and {sum(crossed.values())} lines (goal: 5500 lines)")


if __name__ == "__main__":
    main()
