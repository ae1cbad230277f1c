"""What rewards log: `log_metric(name, value)`."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Sums: TypeAlias = "dict[str, list[float]]"
"""[sum, count] of each metric."""


def added(sums: Mapping[str, list[float]], more: Mapping[str, list[float]]) -> Sums:
    """A new dict of both."""
    nothing = [0.0, 0]
    return {
        name: [a + b for a, b in zip(sums.get(name, nothing), more.get(name, nothing), strict=True)]
        for name in {**sums, **more}
    }


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

    def merge(self, sums: Mapping[str, list[float]]) -> None:
        with self._lock:
            self._sums = added(self._sums, sums)

    def take(self) -> Sums:
        """What was added since the last time."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return taken
