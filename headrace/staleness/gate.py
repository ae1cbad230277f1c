"""Bound staleness by counting: no group is submitted before the version it may be sampled from is held."""

from __future__ import annotations


class Gate:
    """Counts groups. Groups that will never be trained (rejected, failed, filtered) make room for others.

    With depth d, B groups a batch and E extra ones, a group may be submitted while version v is held only if

        submitted − dropped < (v + 1 + d) · B + E

    The extra ones (`partial.oversample`) are a constant, not a share of each batch: of those submitted (v + 1)·B are trained
    once version v + 1 is, and whatever of the rest is unfinished still counts as submitted. So there are never more than
    (1 + d)·B + E submitted and untrained while the trainer's version is the engines', however long an extra one takes. Trained
    in the order they were submitted, group n comes at version ⌊n/B⌋ and was submitted at v ≥ ⌊(n − E)/B⌋ − d: the
    depth bounds its lag by d + ⌈E/B⌉, and only `reject` makes it d.
    """

    def __init__(self, *, depth: int | None, groups_per_batch: int, steps: int, extra: int = 0) -> None:
        self._depth = depth
        self._groups_per_batch = groups_per_batch
        self._steps = steps
        self._extra = extra

    def is_open(self, *, version: int, submitted: int, dropped: int) -> bool:
        """Whether one more group may be submitted while `version` is what the engines hold."""
        horizon = self._steps if self._depth is None else min(version + 1 + self._depth, self._steps)
        return submitted - dropped < horizon * self._groups_per_batch + self._extra
