"""Ends a run whose reward never releases the GIL, such as a regular expression that backtracks forever.

No timeout works then, because the event loop is blocked too; `faulthandler`'s timer needs no interpreter. It is set while
reward calls are in flight and reset whenever the event loop runs. If the loop has not run for `reward.timeout` plus a margin,
the timer writes the stacks of all threads to the run's log and exits with status 1. A process has one such timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MARGIN = 30.0
"""Seconds beyond `reward.timeout`, so that a loop that is merely busy does not end the run."""


class Watchdog:
    """The first job sets the timer; every beat resets it, until a beat finds no job in flight."""

    def __init__(self, file: IO[str], *, timeout: float, margin: float = MARGIN) -> None:
        self._file, self._after, self._beat_every = file, timeout + margin, margin / 3
        self._num_open = 0
        self._beating: asyncio.Task[None] | None = None
        file.write(
            f"rewards: if stacks of all threads follow, a reward blocked the interpreter, and with it the whole run, for "
            f"{self._after:g} s, as a regular expression can, and the process was ended\n"
        )
        file.flush()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the event loop while a job is in flight."""
        self._num_open += 1
        if self._beating is None:
            self._set_timer()  # now: the reward may block the loop before the first beat
            self._beating = asyncio.get_running_loop().create_task(self._beat())
            self._beating.add_done_callback(self._stopped)  # also when the loop ends, which cancels its tasks
        try:
            yield
        finally:
            self._num_open -= 1

    async def _beat(self) -> None:
        """Reset the timer while a job is in flight. Woken by the clock; if the loop is blocked, the timer fires."""
        while self._num_open:
            self._set_timer()
            await asyncio.sleep(self._beat_every)

    def _set_timer(self) -> None:
        faulthandler.dump_traceback_later(self._after, file=self._file, exit=True)

    def _stopped(self, _: asyncio.Task[None]) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._beating = None
