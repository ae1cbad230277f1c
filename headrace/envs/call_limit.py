"""Bounds the generate calls in flight at the engines."""

from __future__ import annotations

import asyncio
from collections import deque


class CallLimit:
    """A semaphore for generate calls. An episode holds a place during a call, not while it waits for a tool. Its later calls
    go before the first calls of other episodes, so that started episodes finish first."""

    def __init__(self, limit: int) -> None:
        self.num_free = limit
        self._later: deque[asyncio.Future[None]] = deque()
        self._first: deque[asyncio.Future[None]] = deque()

    async def acquire(self, *, is_first: bool) -> None:
        """Waits for a place. Woken by `release`, which hands it over."""
        if self.num_free:
            self.num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._first if is_first else self._later).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.release()  # `release` handed it over just before
            raise

    def release(self) -> None:
        for waiting in (self._later, self._first):
            while waiting:
                place = waiting.popleft()
                if not place.done():
                    place.set_result(None)
                    return
        self.num_free += 1
