"""Threads that call plain rewards, so that a slow reward does not block the event loop and one that hangs times out.

        event loop                                     worker thread
        map(function, items) ──── job ───────────────► takes an item, notes which and since when, calls the function,
           waits for the end of the job, or for        takes the next item, …
           the deadline of a call                      │
           ◄─────────────────── all results at once ───┘

The result of a call past its deadline is `TimedOut`. Threads cannot be killed, so its thread is abandoned, and its late result
ignored; a new thread takes the remaining items. Nothing is pickled, so a reward from the user's own script works. One worker,
the default, calls rewards one at a time and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import sys
import threading
import time
import traceback
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.score.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO

S = TypeVar("S")
T = TypeVar("T")

MAX_STUCK = 8
"""Threads stuck at once, or timeouts in a row, at which the run stops."""


class RewardError(ValueError):
    """A reward function is wrong in a way that no retry can fix; the run stops and shows it."""


@dataclass(frozen=True)
class TimedOut:
    """The result of a call that did not return in time, or that there was no time left to make."""

    cause: TimeoutError | None = None
    """Its traceback is where the call was when it timed out; None if it was never made."""


class _Job:
    """A function, the items to call it with, and the results so far. The workers' lock guards everything but `done`."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any], *, name: str, limit: float, budget: float) -> None:
        self.function, self.items, self.name = function, items, name
        self.limit, self.budget = limit, budget
        self.results: list[Any] = [TimedOut()] * len(items)
        self.error: BaseException | None = None
        self.taken = 0
        self.missing = len(items)
        self.began = 0.0
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def drop_rest(self) -> None:
        """Skip the items that no worker has taken yet."""
        self.missing -= len(self.items) - self.taken
        self.taken = len(self.items)

    def settle(self) -> None:
        """Wake `map` once no result is missing. Any thread may call it."""
        if self.missing == 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class _Worker:
    def __init__(self, number: int, work: Callable[[_Worker], None]) -> None:
        self.job: _Job | None = None
        self.index = 0
        self.since = 0.0
        self.is_abandoned = False
        self.thread = threading.Thread(target=work, args=(self,), name=f"reward-{number}", daemon=True)


class RewardWorkers:
    """`num_threads` threads, started when first needed. Any number of coroutines, in any event loop, may share them."""

    def __init__(self, num_threads: int = 1, *, timeout: float, stacks: IO[str] | None = None) -> None:
        """`stacks`: the run's log, to which a watchdog writes (`headrace.score.watchdog`); None: no watchdog."""
        assert num_threads >= 1 and timeout > 0
        self.timeout: float = timeout
        self._num_threads = num_threads
        self._watchdog = None if stacks is None else Watchdog(stacks, timeout=timeout)
        self._jobs: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._stuck: set[_Worker] = set()
        self._num_started = 0
        self._late_in_a_row = 0
        self._is_closed = False
        self.num_calls = 0
        """Calls that have ended, in time or not: while it rises, rewards make progress."""
        self._changed = threading.Condition(threading.Lock())
        self._here = threading.local()

    @property
    def num_stuck(self) -> int:
        """Abandoned threads whose call has not returned yet."""
        return len(self._stuck)

    async def map(
        self, function: Callable[[S], T], items: Sequence[S], *, name: str, limit: float = 0.0, budget: float = math.inf
    ) -> list[T | TimedOut]:
        """The results of `function` for each item, in order. An exception ends the job and is raised here. A call may take
        `limit` seconds (default `timeout`); none starts later than `budget` seconds after the first. Waits for the workers;
        woken by the last result, and by the clock when a call may have timed out."""
        if not items:
            return []
        job = _Job(function, items, name=name, limit=limit or self.timeout, budget=budget)
        self._submit(job)
        try:
            while not job.done.done():
                await asyncio.wait({job.done}, timeout=self._abandon_late(job.limit))
        finally:
            with self._changed:
                job.drop_rest()
            if self._watchdog is not None:
                self._watchdog.closed()
        if job.error is not None:
            raise job.error
        return cast("list[T | TimedOut]", job.results)

    def restart_deadline(self) -> None:
        """Called in a worker thread by a function that retries: its deadline counts from now."""
        self._here.worker.since = time.monotonic()

    def close(self) -> None:
        """End idle threads now and the others after their call, without waiting for them."""
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.drop_rest()
                job.settle()
            self._changed.notify_all()

    # In the event loop

    def _submit(self, job: _Job) -> None:
        if self._watchdog is not None:
            self._watchdog.opened()
        with self._changed:
            assert not self._is_closed
            self._jobs.append(job)
            while len(self._workers) < self._num_threads:
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        self._num_started += 1
        worker = _Worker(self._num_started, self._work)
        self._workers.append(worker)
        worker.thread.start()

    def _abandon_late(self, soonest: float) -> float:
        """Abandon all calls past their deadline, of any job. Returns the seconds until the next may be."""
        with self._changed:
            now = time.monotonic()
            for worker in list(self._workers):
                if worker.job is not None:
                    left = worker.since + worker.job.limit - now
                    if left <= 0:
                        self._abandon(worker, worker.job)
                    else:
                        soonest = min(soonest, left)
        return soonest

    def _abandon(self, worker: _Worker, job: _Job) -> None:
        cause = TimeoutError(f"no answer from reward {job.name!r} within {job.limit:g} s")
        cause.__traceback__ = _where(worker.thread)
        stack = "".join(traceback.format_tb(cause.__traceback__))
        logging.getLogger("headrace.score").warning("%s; its thread is abandoned in\n%s", cause, stack)
        worker.is_abandoned, worker.job = True, None
        self._workers.remove(worker)
        self._stuck.add(worker)
        self._late_in_a_row += 1
        self.num_calls += 1
        job.results[worker.index] = TimedOut(cause)
        job.missing -= 1
        job.settle()
        if max(len(self._stuck), self._late_in_a_row) >= MAX_STUCK:
            raise RewardError(
                f"{self._late_in_a_row} calls in a row got no answer within reward.timeout = {self.timeout:g} s and "
                f"{len(self._stuck)} threads are stuck, the last in reward {job.name!r}; threads cannot be killed: give the "
                f"reward a time limit of its own, or make it async"
            ) from cause
        self._start_thread()

    # In a worker thread

    def _work(self, worker: _Worker) -> None:
        self._here.worker = worker
        outcome: Any = None
        error: BaseException | None = None
        seen: _Job | None = None
        while (job := self._turn(worker, outcome, error)) is not None:
            if job is not seen:
                seen, context = job, job.context.copy()
            try:
                outcome, error = context.run(job.function, job.items[worker.index]), None
            except BaseException as raised:  # noqa: BLE001  (`map` raises it again)
                outcome, error = None, raised

    def _turn(self, worker: _Worker, outcome: object, error: BaseException | None) -> _Job | None:
        """Store the last result and take the next item; None ends the thread. Waits for a job; woken by `map` and `close`."""
        with self._changed:
            if worker.is_abandoned:
                self._stuck.discard(worker)
                return None
            if worker.job is not None:
                self._store(worker.job, worker.index, outcome, error)
                worker.job = None
            while not self._is_closed:
                job = self._next_job()
                if job is not None:
                    worker.job, worker.index, worker.since = job, job.taken, time.monotonic()
                    job.taken += 1
                    return job
                self._changed.wait()
            return None

    def _store(self, job: _Job, index: int, outcome: object, error: BaseException | None) -> None:
        self._late_in_a_row = 0
        self.num_calls += 1
        if error is None:
            job.results[index] = outcome
        else:
            job.error = job.error or error
            job.drop_rest()
        job.missing -= 1
        job.settle()

    def _next_job(self) -> _Job | None:
        while self._jobs:
            job = self._jobs[0]
            if job.taken == 0:
                job.began = time.monotonic()
            elif job.budget < math.inf and job.taken < len(job.items) and time.monotonic() - job.began > job.budget:
                job.drop_rest()
                job.settle()
            if job.taken < len(job.items):
                return job
            self._jobs.popleft()
        return None


def _where(thread: threading.Thread) -> types.TracebackType | None:
    """The traceback an exception raised now in that thread would have, outermost frame first."""
    frame = sys._current_frames().get(thread.ident or 0)
    found: types.TracebackType | None = None
    while frame is not None:
        found = types.TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return found
