"""Threads that call plain rewards, so that a slow reward does not block the event loop and one that hangs times out.

        event loop                                     worker thread
        map(function, items) ──── job ───────────────► takes an item, notes which and since when, calls the function,
           waits for the end of the job, or for        takes the next item, …
           the deadline of a call                      │
           ◄─────────────────── all results at once ───┘

The result of a call past its deadline is `TimedOut`. Threads cannot be killed, so its thread is abandoned, and its late result
ignored; a new thread takes the remaining items. Nothing is pickled, so a reward from the user's own script works. One worker,
the default, calls rewards one at a time and in order. For `reward.processes` there are such threads too, but each passes its
calls on to a process of its own, which is killed with a late call.
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
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.score.process import RewardProcess
from headrace.score.signature import RewardError
from headrace.score.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO

S = TypeVar("S")
T = TypeVar("T")

log = logging.getLogger("headrace.score")
_IMPORT_SECONDS = 300.0
"""How long a process may take to start and to import a reward, besides the timeout of the first call."""
MAX_STUCK = 8
"""Threads stuck at once, or timeouts in a row, at which the run stops."""


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
        self.num_left = len(items)
        self.error: BaseException | None = None
        self.is_over = False
        """Nobody waits for what is left of it."""
        self.began = math.inf
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()


class _Worker(threading.Thread):
    """A thread, and the call that it is making."""

    job: _Job | None = None
    index = 0
    since = 0.0
    """When the call began; in the future while its process is being started."""
    is_abandoned = False
    process: RewardProcess | None = None
    """The one it passes its calls on to, if it has one."""


class RewardWorkers:
    """`num_threads` threads, started when first needed. Any number of coroutines, in any event loop, may share them."""

    def __init__(
        self,
        num_threads: int = 1,
        *,
        timeout: float,
        stacks: IO[str] | None = None,
        num_processes: int = 0,
        has_processes: bool = False,
    ) -> None:
        """`stacks`: the run's log, to which a watchdog (`headrace.score.watchdog`) and processes write; None: no watchdog.
        `has_processes`: each thread passes its calls on to a process of its own."""
        assert num_threads >= 1 and timeout > 0
        self.timeout, self.has_processes = timeout, has_processes
        self._num_threads, self._stacks = num_threads, stacks
        self._watchdog = None if stacks is None or has_processes else Watchdog(stacks, timeout=timeout)
        self._calls: SimpleQueue[tuple[_Job, int] | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._stuck: set[_Worker] = set()
        self._late_in_a_row = 0
        self._is_closed = False
        self.num_calls = 0
        """Calls that have ended, in time or not: while it rises, rewards make progress."""
        self._lock = threading.Lock()
        self.processes = self._with_processes(num_processes) if num_processes else None
        """Workers for rewards that are called in processes; None: so far all are called in these threads."""

    @property
    def num_stuck(self) -> int:
        """Abandoned threads whose call has not returned yet."""
        return len(self._stuck)

    def _with_processes(self, number: int) -> RewardWorkers:
        return RewardWorkers(number, timeout=self.timeout, stacks=self._stacks, has_processes=True)

    def process_workers(self, *, is_needed: bool) -> RewardWorkers | None:
        """Those that call rewards in processes; if they are needed and there are none, as many as there are threads."""
        if self.processes is None and is_needed:
            self.processes = self._with_processes(self._num_threads)
        return self.processes

    async def map(
        self, function: Callable[[S], T], items: Sequence[S], *, name: str, limit: float, budget: float = math.inf
    ) -> list[T | TimedOut]:
        """The results of `function` for each item, in order. An exception ends the job and is raised here. A call may take
        `limit` seconds; none starts later than `budget` seconds after the first. Waits for the workers;
        woken by the last result, and by the clock when a call may have timed out."""
        if not items:
            return []
        job = _Job(function, items, name=name, limit=limit, budget=budget)
        with contextlib.nullcontext() if self._watchdog is None else self._watchdog.watching():
            with self._lock:
                assert not self._is_closed
                while len(self._workers) < self._num_threads:
                    self._start_thread()
                for index in range(len(items)):
                    self._calls.put((job, index))
            try:
                while not job.done.done():
                    await asyncio.wait({job.done}, timeout=self._abandon_late(job.limit))
            finally:
                job.is_over = True
        if job.error is not None:
            raise job.error
        return cast("list[T | TimedOut]", job.results)

    def process(self, reward: dict[str, Any]) -> RewardProcess:
        """The process of the calling worker, which has imported the reward. Called by a job's function; the time until it has
        is not the reward's."""
        worker, began = cast("_Worker", threading.current_thread()), time.monotonic()
        worker.since = began + _IMPORT_SECONDS
        if worker.process is None or worker.process.has_ended:
            process = RewardProcess(self._stacks)
            with self._lock:
                worker.process = process
                if self._is_closed:
                    process.kill()
        worker.process.load(reward)
        with self._lock:
            worker.since = time.monotonic()
            if worker.job is not None:
                worker.job.began += worker.since - began
        return worker.process

    def close(self) -> None:
        """End idle threads now and the others after their call, without waiting for them; processes end at once."""
        if self.processes is not None:
            self.processes.close()
        with self._lock:
            self._is_closed = True
            for worker in [*self._workers, *self._stuck]:
                if worker.process is not None:
                    worker.process.kill()
            for _ in self._workers:
                self._calls.put(None)

    def _work(self) -> None:
        """A worker thread. Waits for calls; woken by `map` and `close`."""
        worker = cast("_Worker", threading.current_thread())
        try:
            while not worker.is_abandoned and (taken := self._calls.get()) is not None:
                self._call(worker, *taken)
        finally:
            if worker.process is not None:
                worker.process.end()

    def _call(self, worker: _Worker, job: _Job, index: int) -> None:
        """Call a job's function with one item, unless it is too late for that."""
        with self._lock:
            now = time.monotonic()
            if self._is_closed or job.is_over or now - job.began > job.budget:
                self._settle(job, index, TimedOut())
                return
            job.began = min(job.began, now)
            worker.job, worker.index, worker.since = job, index, now
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.context.copy().run(job.function, job.items[index])
        except BaseException as raised:  # noqa: BLE001  (`map` raises it again)
            error = raised
        with self._lock:
            if worker.is_abandoned:
                self._stuck.discard(worker)
                return
            worker.job, self._late_in_a_row = None, 0
            self.num_calls += 1
            if error is not None:
                job.error, job.is_over = job.error or error, True
            self._settle(job, index, result)

    def _abandon_late(self, soonest: float) -> float:
        """Abandon all calls past their deadline, of any job. Returns the seconds until the next may be."""
        with self._lock:
            now = time.monotonic()
            for worker in list(self._workers):
                if worker.job is not None:
                    left = worker.since + worker.job.limit - now
                    if left <= 0:
                        self._abandon(worker, worker.job)
                    else:
                        soonest = min(soonest, left)
        return soonest

    # What follows is called with the lock

    def _start_thread(self) -> None:
        worker = _Worker(target=self._work, name="reward", daemon=True)
        self._workers.append(worker)
        worker.start()

    def _settle(self, job: _Job, index: int, result: object) -> None:
        job.results[index] = result
        job.num_left -= 1
        if not job.num_left:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                job.loop.call_soon_threadsafe(job.done.set_result, None)

    def _abandon(self, worker: _Worker, job: _Job) -> None:
        cause = TimeoutError(f"no answer from reward {job.name!r} within {job.limit:g} s")
        if worker.process is not None:
            log.warning("%s; its process is ended", cause)
            worker.process.abort()
            advice = "give the reward a time limit of its own, or raise reward.timeout if it needs longer"
        else:
            cause.__traceback__ = _where(worker)
            log.warning("%s; its thread is abandoned in\n%s", cause, "".join(traceback.format_tb(cause.__traceback__)))
            advice = "threads cannot be killed: give the reward a time limit of its own, make it async, or set reward.processes"
        worker.is_abandoned = True
        self._workers.remove(worker)
        self._stuck.add(worker)
        self._late_in_a_row += 1
        self.num_calls += 1
        self._settle(job, worker.index, TimedOut(cause))
        if max(len(self._stuck), self._late_in_a_row) >= MAX_STUCK:
            raise RewardError(
                f"{self._late_in_a_row} calls in a row got no answer within reward.timeout = {self.timeout:g} s and "
                f"{len(self._stuck)} threads are stuck, the last in reward {job.name!r}; {advice}"
            ) from cause
        self._start_thread()


def _where(thread: threading.Thread) -> types.TracebackType | None:
    """The traceback an exception raised now in that thread would have, outermost frame first."""
    frame = sys._current_frames().get(thread.ident or 0)
    found: types.TracebackType | None = None
    while frame is not None:
        found = types.TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return found
