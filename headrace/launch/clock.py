"""How another host's clock differs from this one's, from the times in its answers to pings."""

from __future__ import annotations

from collections import deque

_KEPT = 60


class ClockOffset:
    """An answer that took 2 w seconds tells the difference to within w; of the last minute's the closest counts. A difference
    that may be none is none: clocks of one host are the same."""

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, seconds: float, *, within: float) -> None:
        """The other clock is ahead by `seconds`, give or take `within`."""
        self._measured.append((within, seconds))

    @property
    def seconds(self) -> float:
        """Add this to a time here, or take it from a time there."""
        within, seconds = min(self._measured, default=(0.0, 0.0))
        return seconds if abs(seconds) > within else 0.0
