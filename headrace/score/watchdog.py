"""For rewards that hold the interpreter itself: a regular expression that backtracks for ever lets no other thread run.

No deadline of ours can then be kept, for the event loop that would keep it is stopped too. `faulthandler` has a timer that
needs no interpreter. It is wound up while reward calls are open and rewound whenever the event loop runs; when the loop
has not run for `reward.timeout` and a margin, it writes the stacks of all threads to the run's log and ends the process
with status 1. There is one such timer in a process.
"""

from __future__ import annotations

import asyncio
import faulthandler
from typing import IO

MARGIN = 30.0
"""Seconds beyond `reward.timeout`: a loop that is only busy is not ended."""


class Watchdog:
    """Wound up from the first open job until a beat finds none, so that busy scoring winds it up once in a while only."""

    def __init__(self, file: IO[str], *, timeout: float, margin: float = MARGIN) -> None:
        self._file = file
        self._after = timeout + margin
        self._beat_every = margin / 3
        self._num_open = 0
        self._beating: asyncio.Task[None] | None = None
        self._has_said = False

    def opened(self) -> None:
        """A job begins. Called in the event loop."""
        self._num_open += 1
        if self._beating is None:
            self._say_once()
            self._wind()
            self._beating = asyncio.get_running_loop().create_task(self._beat())
            self._beating.add_done_callback(self._stopped)  # also when the loop ends, which cancels its tasks

    def closed(self) -> None:
        """A job has ended."""
        self._num_open -= 1

    async def _beat(self) -> None:
        """Rewinds while a job is open. Wakes by the clock: that it wakes is what is watched."""
        while True:
            await asyncio.sleep(self._beat_every)
            if not self._num_open:
                return
            self._wind()

    def _wind(self) -> None:
        faulthandler.dump_traceback_later(self._after, file=self._file, exit=True)

    def _stopped(self, _: asyncio.Task[None]) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._beating = None

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            self._file.write(
                f"rewards: stacks of all threads below this line mean that a reward held the interpreter, and with it the "
                f"whole run, for {self._after:g} s, as a regular expression can, and that the process was ended\n"
            )
            self._file.flush()
