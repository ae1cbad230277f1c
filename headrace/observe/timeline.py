"""Timelines: each role is in exactly one state at any moment, so its shares of time always sum to 1."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Budget: TypeAlias = dict[str, dict[str, float]]
"""Role → state → share of time."""
STATES = {
    "engine": ("prefill", "decode", "swap", "wait-gate", "wait-weights", "descheduled"),
    "trainer": ("compute", "publish", "save", "evaluate", "wait-batch", "descheduled"),
    "scorer": ("score", "wait", "descheduled"),
}
"""`descheduled`: ready to run, but without a processor. `evaluate`: the trainer waits for a held-out evaluation."""
BESIDE = "beside "
"""Prefix of spans that are not states (`Timeline.beside`)."""
IDLE = {"engine": "wait-gate", "trainer": "wait-batch", "scorer": "wait"}
WAITING = frozenset({"wait-gate", "wait-weights", "wait-batch", "wait", "evaluate", "descheduled"})


class Signal(asyncio.Event):
    """An event that knows when it was set."""

    raised_at = 0.0

    def set(self) -> None:
        if not self.is_set():
            self.raised_at = time.perf_counter()
        super().set()


class Timeline:
    """The states of one role. `on_span(role, state, start, stop)` is called for every finished span."""

    def __init__(self, role: str, *, on_span: Callable[[str, str, float, float], None] | None = None) -> None:
        self.role = role
        self.totals = dict.fromkeys(STATES[role], 0.0)
        self.occupied = 0
        self.slots = 0
        self._on_span = on_span
        self._state = IDLE[role]
        self._depth: Counter[str] = Counter()
        self._before: dict[str, str] = {}
        self._since = time.perf_counter()

    def start(self) -> None:
        """Start the window that `shares` covers."""
        self.totals = dict.fromkeys(STATES[self.role], 0.0)
        self.occupied = self.slots = 0
        self._since = time.perf_counter()

    def enter(self, state: str, *, at: float | None = None) -> None:
        """Change to another state, now or as of an earlier moment of the current span."""
        now = time.perf_counter() if at is None else max(at, self._since)
        self._close(now)
        self._state = state

    def split(self, state: str, *, share: float) -> None:
        """Give a share of the span so far to another state."""
        if share > 0:
            now, current = time.perf_counter(), self._state
            self._state = state
            self._close(self._since + share * (now - self._since))
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
            self._note(BESIDE + what, start, time.perf_counter())

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
        self.occupied += occupied
        self.slots += slots

    def shares(self) -> dict[str, float]:
        """Each state's share of the window so far; they sum to 1."""
        self._close(time.perf_counter())
        window = sum(self.totals.values())
        return {state: total / window if window else float(state == IDLE[self.role]) for state, total in self.totals.items()}

    def _close(self, now: float) -> None:
        if now > self._since:
            self.totals[self._state] += now - self._since
            self._note(self._state, self._since, now)
            self._since = now

    def _note(self, name: str, start: float, stop: float) -> None:
        if self._on_span is not None:
            self._on_span(self.role, name, start, stop)


def at_work(budget: Budget) -> dict[str, float]:
    """The share of time each role was at work. Descheduled counts as waiting (for a processor)."""
    return {role: 1.0 - sum(shares.get(state, 0.0) for state in WAITING) for role, shares in budget.items()}


def bound_by(budget: Budget) -> tuple[str, float]:
    """(the role that waits least, its share of time at work): making that role faster makes the run faster."""
    working = at_work(budget)
    role = max(working, key=lambda name: working[name])
    return role, working[role]
