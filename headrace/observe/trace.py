"""trace.json for Perfetto: one track for each engine, for the trainer and the scorer, and for their threads that move weights.

It is a JSON array with an event a line, closed when the run ends; Perfetto can open it before that, and after a crash. When it
has half of the space, it becomes trace-1.json, in place of the one before.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from headrace.observe.timeline import BESIDE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

    from headrace.observe.timeline import Slice

_to_json = json.JSONEncoder(separators=(",", ":")).encode
_PENDING_BYTES = 64 << 10
_FIRST_TRACKS = {"trainer": 1, "scorer": 3, "engine": 5}
_LENT = 1 << 20  # the engine on the trainer's device, behind any number of others
_RANKS = 1 << 22  # the trainer's ranks after the first, behind all engines
_LANES = {"": 0, ": weights": 1, ": checkpoints": 3}
"""Perfetto drops a slice that overlaps another of its track without lying inside it. Only the trainer has checkpoints."""
_LEAST_SECONDS, _LEAST_SHARE = 50e-6, 0.02
"""Of work; slices with less, in seconds or of their length, are gaps."""


class Trace:
    """A sink of the slices of every timeline, with a mark at each version. A resumed run appends to its trace."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._origin = time.time() - time.perf_counter()
        self._tracks: dict[str, int] = {}
        self._pending = bytearray()
        self._file = self._open()

    def show(self, track: str, piece: Slice) -> None:
        """Show a slice by the name of the work that took most of it."""
        work = {state: seconds for state, seconds in piece.seconds.items() if not state.startswith("wait")}
        length = piece.stop - piece.start
        if sum(work.values()) < max(_LEAST_SECONDS, _LEAST_SHARE * length):
            return
        name = max(work, key=lambda state: work[state])
        beside = name.removeprefix(BESIDE)
        lane = "" if beside == name else ": checkpoints" if beside.startswith(("save ", "checkpoint ")) else ": weights"
        number = self._number(track, lane)
        times = {"ts": round((self._origin + piece.start) * 1e6), "dur": round(length * 1e6)}
        split = {state: round(seconds, 4) for state, seconds in piece.seconds.items() if seconds >= 0.01 * length}
        args = {"args": split} if len(split) > 1 else {}
        self._add({"name": beside, "ph": "X", "tid": number, **times, **args})

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._mark(f"version {version}")
        self._flush()

    def close(self) -> None:
        self._mark("end")
        self._flush()
        self._close()

    def _number(self, track: str, lane: str) -> int:
        """The track's, which follows from its name: a resumed run continues it."""
        name = track + lane
        if name not in self._tracks:
            role, _, index = track.partition("-")
            number = _LENT if index == "lent" else int(index or 0)
            first = _RANKS + 4 * number if role == "trainer" and number else _FIRST_TRACKS[role] + 2 * number
            self._tracks[name] = first + _LANES[lane]
            self._introduce(name)
        return self._tracks[name]

    def _introduce(self, track: str) -> None:
        self._add({"name": "thread_name", "ph": "M", "tid": self._tracks[track], "args": {"name": track}})

    def _mark(self, name: str) -> None:
        """A moment on every track."""
        self._add({"name": name, "ph": "i", "s": "g", "tid": 1, "ts": round(time.time() * 1e6)})

    def _add(self, event: dict[str, object]) -> None:
        self._pending += _to_json({"pid": 1, **event}).encode() + b",\n"
        if len(self._pending) >= _PENDING_BYTES:
            self._flush()

    # Files

    def _flush(self) -> None:
        """Write whole lines, so that a killed process leaves a trace that opens. If they do not fit, start another file."""
        pending, self._pending = self._pending, bytearray()
        if self._file.tell() + len(pending) > self._max_bytes // 2:
            self._close()
            self._path.replace(self._path.with_name("trace-1.json"))
            self._file = self._open()
            for track in self._tracks:
                self._introduce(track)
            pending, self._pending = self._pending + pending, bytearray()
        self._file.write(pending)
        self._file.flush()

    def _open(self) -> BinaryIO:
        """The file, after its last whole line."""
        file = self._path.open("a+b")
        start = max(0, file.tell() - _PENDING_BYTES)
        file.seek(start)
        tail = file.read()
        end = max(tail.rfind(b"},\n"), tail.rfind(b"}\n]"))
        file.truncate(start + end + 1 if end >= 0 else 0)
        file.write(b"[\n" if end < 0 else b",\n")
        file.flush()  # until then `tell` counts from the end before the truncation
        return file

    def _close(self) -> None:
        """Close the array, without the comma after its last event."""
        self._file.truncate(self._file.tell() - 2)
        self._file.write(b"\n]\n")
        self._file.close()
