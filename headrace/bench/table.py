"""Rows of figures: printed for people, written for machines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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


def show(bench: str, rows: Sequence[Row]) -> None:
    table = Table(title=f"headrace bench {bench}", title_justify="left")
    for name in ("name", "value", "unit", "goal"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for row in rows:
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.goal)
    Console(width=110).print(table)


def write(bench: str, rows: Sequence[Row], path: Path) -> None:
    content = {"bench": bench, "host": host(), "commit": commit(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def host() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """Of the checkout this runs from, or nothing outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
