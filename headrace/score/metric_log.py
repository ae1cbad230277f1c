"""What rewards log: `log_metric(name, value)`."""

from __future__ import annotations

import math
import threading
from typing import TypeAlias

Sums: TypeAlias = "dict[str, list[float]]"
"""[sum, count] of each metric."""


def added(sums: Sums, more: Sums) -> Sums:
    """Both, in a new dict."""
    both = dict(sums)
    for name, (total, count) in more.items():
        before = both.get(name, [0.0, 0])
        both[name] = [before[0] + total, before[1] + count]
    return both


class MetricLog:
    """Adds metrics up until they are taken; any thread may add."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """The `log_metric` of a reward. What is no number raises in the reward, which fails by it."""
        if not isinstance(name, str) or not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): log a finite number under a name")
        self.merge({name: [float(value), 1]})

    def merge(self, sums: Sums) -> None:
        with self._lock:
            self._sums = added(self._sums, sums)

    def take(self) -> Sums:
        """What was added since the last time."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return taken
