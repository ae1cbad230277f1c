"""How long an episode may take: `episode.timeout` in all, and a quarter of `deadline` between two generate calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class EpisodeClock:
    """Ends an episode after `timeout` seconds, or when it has had no generate call in flight for `idle` seconds; 0 sets no
    limit."""

    def __init__(self, timeout: float = 0.0, idle: float = 0.0) -> None:
        self._timeout, self._idle = timeout or math.inf, idle or math.inf
        self.ends = math.inf
        """When its time is over, as the event loop counts."""
        self.was_idle = False
        """What ended it, if the clock did."""
        self._num_busy = self._num_stopped = 0
        self._left = math.inf
        """Seconds until `ends` when it was stopped."""
        self._limit: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises TimeoutError where the episode is to end."""
        try:
            async with asyncio.timeout(None) as self._limit:
                self.start()
                yield
        finally:
            self._limit = None

    @property
    def is_running(self) -> bool:
        return self._limit is not None

    def start(self) -> None:
        """From now on: its environment starts, or starts again."""
        self._set(asyncio.get_running_loop().time() + self._timeout)

    def lift(self) -> None:
        """It may take as long as it likes."""
        self._set(math.inf)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Inside the block it waits for Headrace, which is not idle."""
        self._num_busy += 1
        self._set(self.ends)
        try:
            yield
        finally:
            self._num_busy -= 1
            self._set(self.ends)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside the block nothing counts; blocks may overlap."""
        loop = asyncio.get_running_loop()
        if not self._num_stopped:
            self._left, self.ends = self.ends - loop.time(), math.inf
        self._num_stopped += 1
        with self.busy():
            try:
                yield
            finally:
                self._num_stopped -= 1
                if not self._num_stopped:
                    self.ends = loop.time() + self._left

    def _set(self, ends: float) -> None:
        self.ends = ends
        if self._limit is None or self._limit.expired():
            return  # it is over, or about to be
        idle_ends = math.inf if self._num_busy else asyncio.get_running_loop().time() + self._idle
        self.was_idle = idle_ends < ends
        self._limit.reschedule(None if math.isinf(min(ends, idle_ends)) else min(ends, idle_ends))
