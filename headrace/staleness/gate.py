"""Bound staleness by counting: no group is submitted before the version it may be sampled from is held."""

from __future__ import annotations


class Gate:
    """Counts groups. Groups that will never be trained (rejected, failed, filtered) make room for others."""

    def __init__(self, *, depth: int | None, groups_per_batch: int, steps: int) -> None:
        self._depth = depth
        self._groups_per_batch = groups_per_batch
        self._steps = steps

    def is_open(self, *, version: int, submitted: int, dropped: int) -> bool:
        """Whether one more group may be submitted while `version` is what the engines hold."""
        horizon = self._steps if self._depth is None else min(version + 1 + self._depth, self._steps)
        return submitted - dropped < horizon * self._groups_per_batch
