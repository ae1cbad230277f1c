"""trace.json for Perfetto: a JSON array that is closed when the run ends; Perfetto can open it before."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from headrace.observe.timeline import BESIDE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TRACKS = {"engine": 1, "trainer": 2, "scorer": 3, "engine: weights": 4, "trainer: weights": 5}
"""The track of each role, and of its threads that move weights."""
_SHORTEST = 50e-6
"""Seconds; shorter spans are counted in the budget but not shown."""


class Trace:
    """A sink of the spans of every role, with a mark at each version. A resumed run appends to its trace."""

    def __init__(self, path: Path) -> None:
        kept = []
        if path.exists():  # a closed or truncated array: whole lines of it are kept, each ending in a comma
            lines = [line.rstrip(",") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
            kept = [line for line in lines if line.endswith("}")]
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[\n" + "".join(f"{line},\n" for line in kept))
        self._origin = time.time() - time.perf_counter()
        if not kept:
            for role, track in _TRACKS.items():
                self._event({"name": "thread_name", "ph": "M", "tid": track, "args": {"name": role}})

    def span(self, role: str, state: str, start: float, stop: float) -> None:
        """One span, in `perf_counter` seconds."""
        if stop - start >= _SHORTEST and not state.startswith("wait"):
            track = _TRACKS[f"{role}: weights" if state.startswith(BESIDE) else role]
            times = {"ts": round((self._origin + start) * 1e6, 1), "dur": round((stop - start) * 1e6, 1)}
            self._event({"name": state.removeprefix(BESIDE), "ph": "X", "tid": track, **times})

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._mark(f"version {version}")
        self._file.flush()

    def close(self) -> None:
        self._mark("end", after="\n]\n")
        self._file.close()

    def _mark(self, name: str, *, after: str = ",\n") -> None:
        """A moment on every track."""
        self._event({"name": name, "ph": "i", "s": "g", "tid": 1, "ts": round(time.time() * 1e6, 1)}, after=after)

    def _event(self, event: dict[str, object], *, after: str = ",\n") -> None:
        self._file.write(json.dumps({"pid": 1, **event}) + after)
