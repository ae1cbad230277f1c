"""Optimizer steps skipped because the gradient was not finite. They are counted, and their rollouts kept on disk. One now and
then is an accident; `train.max_skipped` in a row mean that loss, data or weights are broken, and end the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.observe import Observer
    from headrace.run.batches import StartedBatch


class NotFiniteGradient(RuntimeError):
    """The gradient was NaN or infinite in `train.max_skipped` steps in a row."""


class SkippedSteps:
    """Counts skipped steps in a row; `limit` 0 means no limit."""

    def __init__(self, *, limit: int, observer: Observer) -> None:
        self._limit, self._observer = limit, observer
        self._in_a_row = 0

    def check(self, started: StartedBatch, seen: Sequence[dict[str, float]]) -> None:
        """Take the metrics of a version's steps, in order of versions; raise if too many in a row were skipped."""
        was_skipped = [bool(step.get("skipped", 0.0)) for step in seen]
        if not any(was_skipped):
            self._in_a_row = 0
            return
        version, is_limit_reached = started.version + 1, False
        for is_skipped in was_skipped:
            self._in_a_row = self._in_a_row + 1 if is_skipped else 0
            is_limit_reached |= self._in_a_row == self._limit > 0
        offending = [batch for batch, is_skipped in zip(started.batches, was_skipped, strict=True) if is_skipped]
        kept = self._observer.keep_rollouts(version, [rollout for batch in offending for rollout in batch.rollouts])
        where = "could not be kept" if kept is None else f"are in {kept}"
        steps = f"{len(offending)} of {len(seen)} steps" if len(seen) > 1 else "the step"
        self._observer.screen.say(
            f"version {version}: the gradient is not finite, {steps} skipped, {self._in_a_row} in a row; rollouts {where}"
        )
        if is_limit_reached:
            look = f"`{command()} inspect {kept.parents[1]} --step {version}` shows them; " if kept is not None else ""
            raise NotFiniteGradient(
                f"the gradient was not finite in {self._limit} optimizer steps in a row, the last of version {version} "
                f"(train.max_skipped = {self._limit}). Weights and optimizer are as they were before the first of them. "
                f"The last rollouts {where}; {look}look for a loss that divides by zero or overflows, or lower "
                f"train.learning_rate"
            )
