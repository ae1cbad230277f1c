"""Rows of figures: printed for people, written for machines."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_NOT_JUDGED = ", not judged"


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    goal: str = ""
    bound: float | None = None
    """The physical or computed limit, where there is one."""
    peers: dict[str, float] = field(default_factory=dict)
    """The same figure of others, measured in the same run."""


def report(bench: str, rows: Sequence[Row], *, json_file: Path | None, quick: bool = False) -> int:
    """Print the table, write the JSON, judge the goals; status 1 if one is missed. `quick` judges none, and says so."""
    rows = unjudged(rows) if quick else rows
    show(bench, rows)
    if json_file is not None:
        write(bench, rows, json_file)
    lines = missed(rows)
    for line in lines:
        print(f"missed: {line}", flush=True)
    return 1 if lines else 0


def unjudged(rows: Sequence[Row]) -> list[Row]:
    """The same figures, each goal said to be no measure of them."""
    return [replace(row, goal=f"{row.goal}{_NOT_JUDGED}" if row.goal else "") for row in rows]


def show(bench: str, rows: Sequence[Row]) -> None:
    """Bounds and peers have columns where some row has them."""
    has_bound = any(row.bound is not None for row in rows)
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    table = Table(title=f"headrace bench {bench}", title_justify="left")
    for name in ("name", "value", "unit", "goal", *(["bound"] if has_bound else []), *peers):
        table.add_column(name, justify="left" if name in ("name", "unit", "goal") else "right")
    for row in rows:
        bound = ["" if row.bound is None else f"{row.bound:.4g}"] if has_bound else []
        others = [f"{row.peers[peer]:.4g}" if peer in row.peers else "" for peer in peers]
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.goal, *bound, *others)
    Console(width=110 + 16 * len(peers)).print(table)


def missed(rows: Sequence[Row]) -> list[str]:
    """A line for each row whose goal, written `≥ number`, `≤ number` or `number to number`, it does not meet."""
    lines = []
    for row in rows:
        if not row.goal or row.goal.endswith(_NOT_JUDGED):
            continue
        first, *_, last = row.goal.split()
        least = -math.inf if first == "≤" else float(last if first == "≥" else first)
        most = math.inf if first == "≥" else float(last)
        if not least <= row.value <= most:  # a figure that is not a number meets nothing
            lines.append(f"{row.name}: {row.value:.4g} {row.unit}, goal {row.goal}")
    return lines


def write(bench: str, rows: Sequence[Row], path: Path) -> None:
    content = {"bench": bench, "host": host(), "commit": commit(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def host() -> str:
    """The machine, with its GPU where the benchmark has used torch."""
    torch = sys.modules.get("torch")
    gpu = f", {torch.cuda.get_device_name()}" if torch is not None and torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}{gpu}"


def commit() -> str:
    """Of the checkout this runs from, or nothing outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
