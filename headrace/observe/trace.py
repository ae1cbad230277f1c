"""trace.json for Perfetto: a JSON array that is closed when the run ends; Perfetto can open it before."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from headrace.observe.timeline import BESIDE

if TYPE_CHECKING:
    from pathlib import Path

_THREADS = {"engine": 1, "trainer": 2, "scorer": 3, "engine: weights": 4, "trainer: weights": 5}
"""The track of each role, and of its threads that move weights."""
_SHORTEST = 50e-6
"""Seconds; shorter spans are counted in the budget but not shown."""


def _reopen(path: Path) -> None:
    """Make a closed or truncated array appendable: whole lines, each ending in a comma."""
    lines = path.read_text(encoding="utf-8").splitlines()
    whole = [line.rstrip(",") for line in lines[1:] if line.rstrip(",").endswith("}")]
    path.write_text("[\n" + "".join(f"{line},\n" for line in whole), encoding="utf-8")


class Trace:
    """Writes the spans of every role; a resumed run appends to its trace."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists() or path.stat().st_size == 0
        if not is_new:
            _reopen(path)
        self._file = path.open("a", encoding="utf-8")
        self._origin = time.time() - time.perf_counter()
        if is_new:
            self._file.write("[\n")
            for role, thread in _THREADS.items():
                self._event({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": role}})

    def span(self, role: str, state: str, start: float, stop: float) -> None:
        """One span, in `perf_counter` seconds."""
        if stop - start >= _SHORTEST and not state.startswith("wait"):
            at = round((self._origin + start) * 1e6, 1)
            track = _THREADS[f"{role}: weights" if state.startswith(BESIDE) else role]
            name = state.removeprefix(BESIDE)
            self._event({"name": name, "ph": "X", "pid": 1, "tid": track, "ts": at, "dur": round((stop - start) * 1e6, 1)})

    def mark(self, name: str) -> None:
        """Mark a moment on every track, and flush the file."""
        self._event(_moment(name))
        self._file.flush()

    def close(self) -> None:
        self._file.write(json.dumps(_moment("end")) + "\n]\n")
        self._file.close()

    def _event(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")


def _moment(name: str) -> dict[str, object]:
    return {"name": name, "ph": "i", "s": "g", "pid": 1, "tid": 1, "ts": round(time.time() * 1e6, 1)}
