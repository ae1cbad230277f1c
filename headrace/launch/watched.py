"""Watches the processes of a run while it goes on: pings them, mirrors their timelines, and runs tasks in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from headrace.launch.placement import LENT
from headrace.launch.process import PING_GRACE_SECONDS
from headrace.rpc import RemoteError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from headrace.launch.process import RoleProcess
    from headrace.observe import MirroredTimeline

log = logging.getLogger("headrace")

_PING_SECONDS = 1.0


class WatchedProcesses:
    """What every kind of launcher knows of its connected processes."""

    def __init__(self, *, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._started: list[RoleProcess] = []
        """All that may not have ended."""
        self._timelines: dict[str, MirroredTimeline] = {}
        """Of the current session, by role."""
        self._engine_peak = 0
        """Peak memory in bytes reported by any engine, lost ones included."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()

    def _take_report(self, process: RoleProcess, report: dict[str, Any]) -> None:
        """Into the timeline of the current session."""
        is_engine = process.role == "engine" and process.index != LENT  # which waits whenever the trainer does not
        is_counted = is_engine or process.index == 0  # ranks do the same at the same time
        if process.host is not None and (ahead := process.host.ticks.seconds):
            report = {**report, "slices": [[start - ahead, stop - ahead, *more] for start, stop, *more in report["slices"]]}
        self._timelines[process.role].take(process.name, report, is_counted=is_counted)

    @property
    def _connected(self) -> Iterable[RoleProcess]:
        """Of each place, the process that connected last."""
        return {each.name: each for each in self._started if each.streams and not each.place.is_over}.values()

    def _describe(self) -> str:
        """Each process, its last reported activity, and its log."""
        shown = (f"\n  {each.name} ({each.handle.describe()}): {each.doing}, log {each.log}" for each in self._connected)
        return "".join(shown)

    async def _refresh(self) -> None:
        """Request every process's timeline now; one that does not answer keeps its last."""
        await asyncio.gather(*(self._ping(each, PING_GRACE_SECONDS) for each in self._connected))

    async def _keep_pinging(self, process: RoleProcess) -> None:
        """Give the process up if a ping stays unanswered for `heartbeat` seconds."""
        heartbeat = self._heartbeat
        while not process.lost.is_set():
            asked = time.monotonic()
            if not await self._ping(process, heartbeat) and not process.lost.is_set():
                silence = f"has not answered for {time.monotonic() - asked:.0f} s (heartbeat = {heartbeat:g})"
                process.give_up(f"{silence}; it was last at {process.doing}")
            await asyncio.sleep(min(_PING_SECONDS, heartbeat / 4))

    async def _ping(self, process: RoleProcess, seconds: float) -> bool:
        try:
            report = await process.ping(seconds)
            if report is None:
                return False
            if process.role == "engine":
                self._engine_peak = max(self._engine_peak, int(process.state.get("memory_peak", 0)))
            self._take_report(process, report)
        except (RemoteError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s answered a ping with what cannot be read", process.name, exc_info=error)
            process.give_up(f"answered a ping with what cannot be read: {error!r}")
            return False
        return True

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background; what it raises ends the run."""

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and self._failure is None:
                self._failure = error
                self._has_failed.set()

        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(on_end)

    def _cancel_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
