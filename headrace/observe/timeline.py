"""Timelines: each role is in exactly one state at any moment, so its shares of time always sum to 1.

A role in the launcher has a `Timeline`. A role in other processes has a `ProcessTimeline` in each, whose reports the launcher's
`MirroredTimeline` adds up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OnSlice = Callable[[str, "Slice"], None]

Budget: TypeAlias = dict[str, dict[str, float]]
"""Role → state → share of time."""
STATES = {
    "engine": ("prefill", "decode", "swap", "wait-gate", "wait-weights", "descheduled"),
    "trainer": ("compute", "publish", "save", "evaluate", "wait-batch", "descheduled"),
    "scorer": ("score", "wait", "descheduled"),
}
"""`descheduled`: ready to run, but without a processor. `evaluate`: the trainer waits for a held-out evaluation."""
BESIDE = "beside "
"""Prefix of work that is not a state (`Timeline.beside`)."""
IDLE = {"engine": "wait-gate", "trainer": "wait-batch", "scorer": "wait"}
WAITING = frozenset({"wait-gate", "wait-weights", "wait-batch", "wait", "evaluate", "descheduled"})
_FINE, _COARSE = 2e-4, 3.0
"""Seconds: the shortest slice of a trace while there is detail left, and from then on."""
_DETAILED = 10_000
"""Slices of a timeline that may be short: the trace shows minutes step by step, and a week in slices of `_COARSE` seconds."""
_MAX_SLICES = 20_000
"""Slices kept between two reports. Beyond that the trace has gaps, but not the budget."""


class Signal(asyncio.Event):
    """An event that knows when it was set."""

    raised_at = 0.0

    def set(self) -> None:
        if not self.is_set():
            self.raised_at = time.perf_counter()
            super().set()


class Slice(NamedTuple):
    """A piece of a timeline, for the trace."""

    start: float
    stop: float
    seconds: dict[str, float]
    """By state. Work beside the states (`Timeline.beside`) has a slice of its own."""


class Slicer:
    """Merges the spans of a timeline, of which there are several per decode step, into slices. However often states change, n
    seconds give at most `_DETAILED` + n / `_COARSE` slices."""

    def __init__(self) -> None:
        self._state = ""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._first = self._start = self._stop = time.perf_counter()
        self._num_cut = 0

    def add(self, state: str, start: float, stop: float) -> Slice | None:
        """Add the next span; returns the slice before it, if that is whole now."""
        finished, length = None, self._stop - self._start
        if state != self._state or length >= _COARSE:
            has_detail = self._num_cut < _DETAILED + (start - self._first) / _COARSE
            if length >= _COARSE or (has_detail and min(length, stop - start) >= _FINE):
                finished = self.cut()
            if not self._seconds:
                self._start = start
            if stop - start > self._stop - self._start:
                self._state = state  # the longest span so far
        self._seconds[state] += stop - start
        self._stop = stop
        return finished

    def cut(self) -> Slice:
        """The slice so far; the next span starts another."""
        finished = Slice(self._start, self._stop, dict(self._seconds))
        self._seconds.clear()
        self._start, self._state = self._stop, ""
        self._num_cut += 1
        return finished


class Timeline:
    """The states of one role. `on_slice(track, slice)` is called for every piece of it that the trace shows."""

    def __init__(self, role: str, *, on_slice: OnSlice | None = None) -> None:
        self.role = role
        self._counted = dict.fromkeys((*STATES[role], "occupied", "slots"), 0.0)
        """Seconds in every state, and decode steps' slots, since it was made."""
        self._left_out = dict(self._counted)
        """What of these is before or beside the window that `shares` covers."""
        self._on_slice = on_slice
        self._slicer = Slicer()
        self._state = IDLE[role]
        self._depth: Counter[str] = Counter()
        self._before: dict[str, str] = {}
        self._since = time.perf_counter()
        self._lock = threading.Lock()  # held while a span is closed, because a process's `report` comes from another thread

    @property
    def totals(self) -> dict[str, float]:
        """Seconds in every state, of the window."""
        return {state: max(0.0, self._counted[state] - self._left_out[state]) for state in STATES[self.role]}

    @property
    def occupied(self) -> int:
        """Slots in use, summed over decode steps."""
        return int(self._counted["occupied"] - self._left_out["occupied"])

    @property
    def slots(self) -> int:
        return int(self._counted["slots"] - self._left_out["slots"])

    def start(self) -> None:
        """Start the window that `shares` covers."""
        self._left_out, self._since = dict(self._counted), time.perf_counter()

    def enter(self, state: str, *, at: float | None = None) -> None:
        """Change to another state, now or as of an earlier moment of the current span."""
        with self._lock:
            self._close(time.perf_counter() if at is None else max(at, self._since))
            self._state = state

    def split(self, state: str, *, share: float) -> None:
        """Give a share of the span so far to another state."""
        if share > 0:
            with self._lock:
                current, self._state = self._state, state
                self._close(self._since + share * (time.perf_counter() - self._since))
                self._state = current

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Be in `state` inside the block, then return to the previous state; blocks of one state may overlap."""
        self._depth[state] += 1
        if self._depth[state] == 1:
            self._before[state] = self._state
            self.enter(state)
        try:
            yield
        finally:
            self._depth[state] -= 1
            if self._depth[state] == 0:
                self.enter(self._before.pop(state))

    @contextlib.contextmanager
    def beside(self, what: str) -> Iterator[None]:
        """Concurrent work of another thread: it has its own track in the trace and is not counted in the budget."""
        start = time.perf_counter()
        try:
            yield
        finally:
            stop = time.perf_counter()
            with self._lock:
                self._show(Slice(start, stop, {BESIDE + what: stop - start}))

    async def wait(self, state: str, signal: Signal) -> None:
        """Wait for the signal in `state`. From when it is set until this coroutine runs, the role is descheduled."""
        if signal.is_set():
            return
        if not any(self._depth.values()):  # otherwise the role is at work during this wait
            self.enter(state)
        await signal.wait()
        if not any(self._depth.values()):
            self.enter("descheduled", at=signal.raised_at)

    def count(self, *, occupied: int, slots: int) -> None:
        """Add a decode step's slot occupancy."""
        self._counted["occupied"] += occupied
        self._counted["slots"] += slots

    def shares(self) -> dict[str, float]:
        """Each state's share of the window so far; they sum to 1."""
        self._close(time.perf_counter())
        totals = self.totals
        window = sum(totals.values())
        return {state: total / window if window else float(state == IDLE[self.role]) for state, total in totals.items()}

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """The time in this block is not part of the window."""
        self._close(time.perf_counter())
        before = dict(self._counted)
        try:
            yield
        finally:
            self._close(time.perf_counter())
            for name, value in self._counted.items():
                self._left_out[name] += value - before[name]

    def end(self) -> None:
        """The run is over: show what was not yet shown."""
        self._close(time.perf_counter())
        self._show(self._slicer.cut())

    def _close(self, now: float) -> None:
        span = now - self._since
        if span > 0:
            delayed = self._delayed(span)
            self._counted["descheduled"] += delayed
            self._counted[self._state] += span - delayed
            finished = self._slicer.add(self._state, self._since, now)
            if finished is not None:
                self._show(finished)
            self._since = now

    def _delayed(self, span: float) -> float:
        """Seconds of the span in which the role waited for a processor, if that is known."""
        return 0.0

    def _show(self, finished: Slice) -> None:
        if self._on_slice is not None:
            self._on_slice(self.role, finished)


class ProcessTimeline(Timeline):
    """The timeline of a role with its own thread. The kernel reports how long that thread waited for a processor (on Linux)."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._slices: list[Slice] = []
        self._thread = 0
        self._schedstat = -1  # the thread's file of that name
        self._delay = 0  # nanoseconds of waiting that were counted

    def report(self) -> dict[str, Any]:
        """Totals since the process started, and the slices since the last report. Any thread may call it."""
        with self._lock:
            totals, state = self.totals, self._state
            span = max(0.0, time.perf_counter() - self._since)
            delayed = min(span, (self._read_delay() - self._delay) / 1e9)
            totals["descheduled"] += delayed
            totals[state] += span - delayed
            slices, self._slices = self._slices, []
            return {"totals": totals, "occupied": self.occupied, "slots": self.slots, "state": state, "slices": slices}

    def _delayed(self, span: float) -> float:
        """The excess over `span` is left for the next one. Called by the working thread alone."""
        thread = threading.get_native_id()
        if thread != self._thread:  # its first call
            path = Path(f"/proc/self/task/{thread}/schedstat")
            self._thread, self._schedstat = thread, os.open(path, os.O_RDONLY) if path.exists() else -1
            self._delay = self._read_delay()
            return 0.0
        delayed = min(int(span * 1e9), self._read_delay() - self._delay)
        self._delay += delayed
        return delayed / 1e9

    def _read_delay(self) -> int:
        if self._schedstat < 0:
            return 0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1])
        except OSError:  # the thread has ended
            return self._delay

    def _show(self, finished: Slice) -> None:
        if len(self._slices) < _MAX_SLICES:
            self._slices.append(finished)


class MirroredTimeline(Timeline):
    """The sum of the reports of one role's processes. The launcher adds when the trainer waited for an evaluation."""

    def __init__(self, role: str, *, on_slice: OnSlice | None = None) -> None:
        super().__init__(role, on_slice=on_slice)
        self._reports: dict[str, dict[str, Any]] = {}
        """Of each live process its newest, and in "" the sum of those that have ended."""
        self._evaluated = 0.0

    def take(self, name: str, report: dict[str, Any], *, is_counted: bool = True) -> None:
        """Store a process's newest report, if its time is counted. In the trace each process has its own track."""
        if is_counted:
            told = {**report["totals"], "occupied": report["occupied"], "slots": report["slots"]}
            newest = {key: float(told[key]) for key in self._counted}  # raises before anything of it is kept
            before, self._reports[name] = self._reports.get(name, {}), newest
            for key in self._counted:
                self._counted[key] += newest[key] - before.get(key, 0)
        if self._on_slice is not None:
            for each in report["slices"]:
                self._on_slice(name, Slice(*each))

    def forget(self, name: str) -> None:
        """A process has ended: its report still counts, and a restarted process may reuse the name."""
        if name not in self._reports:  # its time was not counted
            return
        ended = [self._reports.pop(each) for each in ("", name) if each in self._reports]
        self._reports[""] = {key: sum(report[key] for report in ended) for key in self._counted}

    def start(self) -> None:
        super().start()
        self._evaluated = 0.0

    @contextlib.contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Count evaluations: the process knows only that it is idle. All other states it reports itself."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if state == "evaluate":
                self._evaluated += time.perf_counter() - started

    def _close(self, now: float) -> None:
        """Do nothing: the process closes its own spans."""

    @property
    def totals(self) -> dict[str, float]:
        totals = super().totals
        if self._evaluated:
            evaluated = min(self._evaluated, totals[IDLE[self.role]])  # only idle time: it may have worked meanwhile
            totals["evaluate"] += evaluated
            totals[IDLE[self.role]] -= evaluated
        return totals


def at_work(budget: Budget) -> dict[str, float]:
    """The share of time each role was at work. Descheduled counts as waiting (for a processor)."""
    return {role: 1.0 - sum(shares.get(state, 0.0) for state in WAITING) for role, shares in budget.items()}


def bound_by(budget: Budget) -> tuple[str, float]:
    """(the role that waits least, its share of time at work): making that role faster makes the run faster."""
    working = at_work(budget)
    role = max(working, key=lambda name: working[name])
    return role, working[role]
