"""Timelines of roles in other processes: each process keeps a `ProcessTimeline`, the launcher a `MirroredTimeline`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.observe.timeline import IDLE, STATES, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_SPANS = 20_000
"""Spans kept between two reports. Beyond that the trace has gaps, but not the budget."""


class ProcessTimeline(Timeline):
    """The timeline of a role with its own thread. The kernel reports how long that thread waited for a processor."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._delays = _RunDelay()
        self._spans: list[tuple[str, float, float]] = []
        self._lock = threading.Lock()
        """Held while a span is closed, because another thread may call `report`."""

    def report(self) -> dict[str, Any]:
        """Totals since the process started, and the spans since the last report. Any thread may call it."""
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
        if len(self._spans) < _MAX_SPANS:
            self._spans.append((name, start, stop))


class _RunDelay:
    """Seconds the working thread has waited for a processor; 0 where unknown (not on Linux)."""

    def __init__(self) -> None:
        self._file = -1
        self._thread = 0
        self._last = 0

    def take(self, most: float) -> float:
        """Seconds waited since the last call; the excess over `most` is left for the next. Only the working thread calls it."""
        thread = threading.get_native_id()
        if thread != self._thread:  # its first call
            self._open(thread)
            self._last = self._read()
            return 0.0
        taken = min(int(most * 1e9), self._read() - self._last)
        self._last += taken
        return taken / 1e9

    def so_far(self) -> float:
        """Seconds waited since the last `take`. Any thread may call it."""
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
    """The sum of the reports of one role's processes. The launcher adds when the trainer waited for an evaluation."""

    def __init__(self, role: str, *, on_span: Callable[[str, str, float, float], None] | None = None) -> None:
        super().__init__(role, on_span=on_span)
        self._reports: dict[str, dict[str, Any]] = {}
        self._at_start: dict[str, float] = {}
        self._evaluated = 0.0

    def take(self, name: str, report: dict[str, Any]) -> None:
        """Store a process's newest report."""
        self._reports[name] = report
        if self._on_span is not None:
            for state, start, stop in report["spans"]:
                self._on_span(self.role, state, start, stop)
        self._update()

    def forget(self, name: str) -> None:
        """A process has ended: its report still counts, and a restarted process may reuse the name."""
        if name in self._reports:
            self._reports[f"{name}, ended ({len(self._reports)})"] = self._reports.pop(name)

    def start(self) -> None:
        self._at_start = self._sums()
        self._evaluated = 0.0
        self._update()

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Count evaluations: the process knows only that it is idle. All other states it reports itself."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if state == "evaluate":
                self._evaluated += time.perf_counter() - started
                self._update()

    def _close(self, now: float) -> None:
        """Do nothing: the process closes its own spans."""

    def _sums(self) -> dict[str, float]:
        """Seconds in every state, and slot counts, of all processes since they started."""
        reports = self._reports.values()
        sums = {state: sum(report["totals"].get(state, 0.0) for report in reports) for state in STATES[self.role]}
        return sums | {name: sum(report[name] for report in reports) for name in ("occupied", "slots")}

    def _update(self) -> None:
        totals = {name: max(0.0, value - self._at_start.get(name, 0.0)) for name, value in self._sums().items()}
        self.occupied, self.slots = int(totals.pop("occupied")), int(totals.pop("slots"))
        if self._evaluated:
            evaluated = min(self._evaluated, totals[IDLE[self.role]])  # only idle time: it may have worked meanwhile
            totals["evaluate"] += evaluated
            totals[IDLE[self.role]] -= evaluated
        self.totals = totals
