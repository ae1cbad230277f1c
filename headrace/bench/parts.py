"""A benchmark in parts. Each part may be asked for alone, may fail without the others, and has its figures on disk before
the next begins: a command that is cut off leaves what it had measured.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from headrace.bench.table import Row, report, unjudged, write
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    Part = Callable[[], Iterable[list[Row]]]
    """Measures, and gives rows as soon as it has some."""


def say(line: str) -> None:
    """Tell whoever watches how far it is."""
    print(line, flush=True)


def run_parts(
    bench: str, parts: Mapping[str, Part], *, only: str | None, quick: bool, json_file: Path | None, seconds: float
) -> int:
    """Status 1 if a part failed or a goal is missed; `--quick` judges no goal. No part begins after `seconds`."""
    rows: list[Row] = []
    failed: list[str] = []
    chosen = choose(bench, parts, only)
    started = time.perf_counter()
    try:
        for name in chosen:
            began = time.perf_counter()
            if began - started > seconds:
                failed.append(name)
                say(f"{name}: left out, for {began - started:.0f} s have passed; --only={name} measures it alone")
                continue
            say(f"{name}: begins")
            try:
                for found in parts[name]():
                    rows += found
                    if json_file is not None:
                        write(bench, unjudged(rows) if quick else rows, json_file)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  (what one part cannot do, another may)
                traceback.print_exc()
                failed.append(name)
                say(f"{name}: failed: {type(error).__name__}: {_first_line(error)}")
            say(f"{name}: {time.perf_counter() - began:.1f} s")
    finally:
        status = report(bench, rows, json_file=json_file, quick=quick)
    return 1 if failed else status


def choose(bench: str, parts: Mapping[str, Part], only: str | None) -> list[str]:
    """The parts to measure, in the order they are always measured in."""
    if only is None:
        return list(parts)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    for name in wanted:
        if name not in parts:
            raise ConfigError(f"--only = {only}: `headrace bench {bench}` has no part {name!r} here; it has {', '.join(parts)}")
    return [name for name in parts if name in wanted]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
