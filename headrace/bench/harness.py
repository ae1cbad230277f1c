"""The harness of every benchmark: parts that yield rows, contestants that take turns, a table, a JSON file and goals."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from headrace.bench.child import PeerFailed
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    Part = Callable[[], Iterable[list["Row"]]]
    """Measures, and yields rows as soon as it has some."""

_NOT_JUDGED = ", not judged"
_MANY = 8  # peers in a table
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    goal: str = ""
    """`≥ number`, `≤ number` or `number to number`; empty for none."""
    bound: float | None = None
    """The physical or computed limit, if there is one."""
    peers: dict[str, float] = field(default_factory=dict)
    """The same figure of peers, measured in the same run."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """How it came about, as (seconds, value), for `tools/pictures.py`; not in the table."""


def say(line: str) -> None:
    """Print progress while a benchmark runs."""
    print(line, flush=True)


def default_device() -> str:
    """`cuda` if there is a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_parts(bench: str, parts: Mapping[str, Part], *, quick: bool, json_file: Path | None, only: str | None = None) -> int:
    """Measure each part, or those that `only` names, and print the table; returns 1 if a part failed or a goal is missed.

    A part that fails does not stop the others. Rows are printed and written to `json_file` as they come, so an interrupted
    command keeps what it has measured. `quick` judges no goal.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    rows: list[Row] = []
    has_failed = False
    commit = subprocess.getoutput("git rev-parse --short HEAD 2>/dev/null")  # empty if not run from a checkout
    try:
        for name in choose(bench, parts, only):
            started = time.perf_counter()
            say(f"{name}: started")
            try:
                for found in parts[name]():
                    for row in found:
                        others = "".join(f", {peer} {value:.4g}" for peer, value in row.peers.items())
                        say(f"{row.name}: {row.value:.4g} {row.unit}{others}")
                        rows.append(replace(row, goal=f"{row.goal}{_NOT_JUDGED}") if quick and row.goal else row)
                    if json_file is not None:
                        write(bench, rows, json_file, commit=commit)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  (what fails in one part may work in another)
                traceback.print_exc()
                has_failed = True
                say(f"{name}: failed: {one_line(error)}")
            say(f"{name}: {time.perf_counter() - started:.1f} s")
    finally:
        show(bench, rows)
        lines = missed(rows)
        for line in lines:
            say(f"missed: {line}")
    return 1 if has_failed or lines else 0


def choose(bench: str, parts: Mapping[str, Part], only: str | None) -> list[str]:
    """The parts to measure, in the order of `parts`."""
    if only is None:
        return list(parts)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in parts:
            raise ConfigError(f"--only = {only}: `headrace bench {bench}` has no part {name!r} here; it has {', '.join(parts)}")
    return [name for name in parts if name in wanted]


def take_turns(
    contestants: Mapping[str, Callable[[int], T]],
    turns: int,
    *,
    warmups: int = 0,
    may_raise: type[Exception] = PeerFailed,
) -> dict[str, list[T]]:
    """Call the contestants in turn with the turn's number; returns what each returned, without the warm-up turns.

    Interleaving spreads a busy moment of the machine over all of them. A contestant that raises `may_raise` is dropped.
    """
    seen: dict[str, list[T]] = {name: [] for name in contestants}
    for turn in range(warmups + turns):
        for name in list(seen):
            try:
                found = contestants[name](turn)
            except may_raise as error:
                del seen[name]
                say(f"{error if isinstance(error, PeerFailed) else f'{name}: {one_line(error)}'}; it is absent from the table")
                continue
            if turn >= warmups:
                seen[name].append(found)
    return seen


def one_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def show(bench: str, rows: Sequence[Row]) -> None:
    """Print the table, with columns for bounds and peers if any row has them."""
    has_bound = any(row.bound is not None for row in rows)
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    peers = peers if len(peers) <= _MANY else []  # the JSON file has them
    table = Table(title=f"headrace bench {bench}", title_justify="left")
    for name in ("name", "value", "unit", "goal", *(["bound"] if has_bound else []), *peers):
        table.add_column(name, justify="left" if name in ("name", "unit", "goal") else "right")
    for row in rows:
        bound = ["" if row.bound is None else f"{row.bound:.4g}"] if has_bound else []
        others = [f"{row.peers[peer]:.4g}" if peer in row.peers else "" for peer in peers]
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.goal, *bound, *others)
    Console(width=110 + 16 * len(peers)).print(table)


def missed(rows: Sequence[Row]) -> list[str]:
    """A line for each row that misses its goal."""
    lines = []
    for row in rows:
        if not row.goal or row.goal.endswith(_NOT_JUDGED):
            continue
        first, *_, last = row.goal.split()
        least = -math.inf if first == "≤" else float(last if first == "≥" else first)
        most = math.inf if first == "≥" else float(last)
        if not least <= row.value <= most:  # NaN misses every goal
            lines.append(f"{row.name}: {row.value:.4g} {row.unit}, goal {row.goal}")
    return lines


def write(bench: str, rows: Sequence[Row], path: Path, *, commit: str) -> None:
    """Write the rows as JSON, with the machine and the commit they were measured on."""
    torch = sys.modules.get("torch")  # not imported just for this
    gpu = f", {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""
    host = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}{gpu}"
    shown = [{name: value for name, value in asdict(row).items() if name != "curve" or value} for row in rows]
    content = {"bench": bench, "host": host, "commit": commit, "rows": shown}
    path.write_text(json.dumps(content, indent=2) + "\n")
