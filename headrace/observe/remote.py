"""Timelines of roles in other processes: kept there, mirrored here."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.observe.spans import IDLE, STATES, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEPT_SPANS = 20_000
"""Between two looks; a trace with more of them is thinned, the budget is not."""


class ProcessTimeline(Timeline):
    """Of a role that has a thread to itself. The time it could run but did not is what the system says it was."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._delays = _RunDelay()
        self._spans: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()
        """A look from another thread comes between two spans, never within the end of one."""

    def report(self) -> dict[str, Any]:
        """Totals since the process began, to this moment, and the spans since the last report. From any thread."""
        with self._lock:
            totals, state = dict(self.totals), self._state
            span = max(0.0, time.perf_counter() - self._since)
            delayed = min(span, self._delays.so_far())
            totals["descheduled"] += delayed
            totals[state] += span - delayed
            spans, self._spans = self._spans, []
            return {"totals": totals, "occupied": self.occupied, "slots": self.slots, "state": state, "spans": spans}

    def enter(self, state: str, *, at: float | None = None) -> None:
        with self._lock:
            super().enter(state, at=at)

    def split(self, state: str, *, share: float) -> None:
        with self._lock:
            super().split(state, share=share)

    def _close(self, now: float) -> None:
        span = now - self._since
        if span <= 0:
            return
        delayed = self._delays.take(span)
        self.totals["descheduled"] += delayed
        self.totals[self._state] += span - delayed
        self._keep(self._state, self._since, now)
        self._since = now

    def _note(self, name: str, start: float, stop: float) -> None:
        with self._lock:
            self._keep(name, start, stop)

    def _keep(self, name: str, start: float, stop: float) -> None:
        if len(self._spans) < _KEPT_SPANS:
            self._spans.append((name, start, stop))


class _RunDelay:
    """Seconds the calling thread has waited for a processor, where the system tells (Linux)."""

    def __init__(self) -> None:
        self._file = -1
        self._thread = 0
        self._last = 0

    def take(self, most: float) -> float:
        """Since what was taken before, by the thread that works; what is more than `most` belongs to the next span."""
        thread = threading.get_native_id()
        if thread != self._thread:  # the first look from it
            self._open(thread)
            self._last = self._read()
            return 0.0
        taken = min(int(most * 1e9), self._read() - self._last)
        self._last += taken
        return taken / 1e9

    def so_far(self) -> float:
        """What could be taken, asked from any thread."""
        return (self._read() - self._last) / 1e9

    def _open(self, thread: int) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._thread = thread
        try:
            self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def _read(self) -> int:
        if self._file < 0:
            return 0
        try:
            return int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return self._last


class MirroredTimeline(Timeline):
    """What processes of one role have reported, together. Waiting that is seen only from here is told apart here."""

    def __init__(self, role: str, *, on_span: Callable[[str, str, float, float], None] | None = None) -> None:
        super().__init__(role, on_span=on_span)
        self._reports: dict[str, dict[str, Any]] = {}
        self._gone: list[dict[str, Any]] = []
        self._base: dict[str, float] = {}
        self._base_slots = (0, 0)
        self._evaluated = 0.0

    def take(self, name: str, report: dict[str, Any]) -> None:
        """The newest report of one process."""
        self._reports[name] = report
        if self._on_span is not None:
            for state, start, stop in report["spans"]:
                self._on_span(self.role, state, start, stop)
        self._sum()

    def forget(self, name: str) -> None:
        """The process is gone; what it reported still counts, and one of its name may begin again."""
        if name in self._reports:
            self._gone.append(self._reports.pop(name))

    def start(self) -> None:
        self._base, self._base_slots = self._totals(), self._slots()
        self._evaluated = 0.0
        self._sum()

    def shares(self) -> dict[str, float]:
        window = sum(self.totals.values())
        return {
            state: total / window if window > 0 else float(state == IDLE[self.role]) for state, total in self.totals.items()
        }

    def _totals(self) -> dict[str, float]:
        reports = [*self._reports.values(), *self._gone]
        return {state: sum(report["totals"].get(state, 0.0) for report in reports) for state in STATES[self.role]}

    def _slots(self) -> tuple[int, int]:
        reports = [*self._reports.values(), *self._gone]
        return sum(report["occupied"] for report in reports), sum(report["slots"] for report in reports)

    def _sum(self) -> None:
        totals = {state: max(0.0, total - self._base.get(state, 0.0)) for state, total in self._totals().items()}
        if self._evaluated:
            evaluated = min(self._evaluated, totals[IDLE[self.role]])  # what it did meanwhile it did
            totals["evaluate"] += evaluated
            totals[IDLE[self.role]] -= evaluated
        self.totals = totals
        occupied, slots = self._slots()
        self.occupied, self.slots = occupied - self._base_slots[0], slots - self._base_slots[1]

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """The process idles meanwhile, and this is why. Its own work it reports itself."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if state == "evaluate":
                self._evaluated += time.perf_counter() - began
                self._sum()

    def enter(self, state: str, *, at: float | None = None) -> None:
        """Nothing: the process knows what it does."""

    def split(self, state: str, *, share: float) -> None:
        """Nothing: the process knows what it does."""

    def _close(self, now: float) -> None:
        """Nothing: the process knows what it does."""
