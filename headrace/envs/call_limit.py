"""How many generate calls may be at the engines at once."""

from __future__ import annotations

import asyncio
from collections import deque


class CallLimit:
    """Places for generate calls. An episode holds one only during a call, not while it waits for a tool, and later calls of an
    episode go before the first calls of others: what was started finishes first."""

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
                self.release()  # it was handed over at the same moment
            raise

    def release(self) -> None:
        for waiting in (self._later, self._first):
            while waiting:
                place = waiting.popleft()
                if not place.done():
                    place.set_result(None)
                    return
        self.num_free += 1
