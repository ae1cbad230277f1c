"""An endless, resumable stream of tasks from weighted sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.tasks.sources import Row, TaskSource


class TaskStream:
    """(seed, position) decides at random which source is next; each source has its own order."""

    def __init__(self, sources: Sequence[tuple[TaskSource, float]], *, seed: int) -> None:
        self.sources = [source for source, _ in sources]
        weights = np.array([weight for _, weight in sources], dtype=np.float64)
        self._edges = np.cumsum(weights / weights.sum())
        self._seed = seed
        self._counts = [0] * len(self.sources)

    @property
    def position(self) -> int:
        return sum(self._counts)

    def next(self) -> Row:
        which = self._choose() if len(self.sources) > 1 else 0
        row = self.sources[which].row(self._counts[which])
        self._counts[which] += 1
        return row

    def _choose(self) -> int:
        number = np.random.default_rng((self._seed, self.position)).random()
        return min(int(np.searchsorted(self._edges, number, side="right")), len(self.sources) - 1)

    def state(self) -> list[int]:
        """Rows taken from each source: all that a checkpoint needs."""
        return list(self._counts)

    def restore(self, counts: list[int]) -> None:
        assert len(counts) == len(self.sources)
        self._counts = list(counts)
