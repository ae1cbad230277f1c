"""Optimizer steps skipped because the gradient was not finite. They are counted, and their rollouts kept on disk. One now and
then is an accident; `train.max_skipped` in a row mean that loss, data or weights are broken, and end the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.observe import Observer
    from headrace.run.work import StartedBatch


class NotFiniteGradient(RuntimeError):
    """The gradient was NaN or infinite in `train.max_skipped` steps in a row."""


class SkippedSteps:
    """Counts skipped steps in a row; `limit` 0 means no limit."""

    def __init__(self, *, limit: int, observer: Observer) -> None:
        self._limit, self._observer = limit, observer
        self._in_a_row = 0
        self._failure: NotFiniteGradient | None = None

    def note(self, started: StartedBatch, seen: Sequence[dict[str, float]]) -> None:
        """Take the metrics of a version's steps, in order of versions. `check` raises later, once the version is settled."""
        was_skipped = [bool(step.get("skipped", 0.0)) for step in seen]
        if not any(was_skipped):
            self._in_a_row = 0
            return
        version = started.version + 1
        offending = [batch for batch, is_skipped in zip(started.batches, was_skipped, strict=True) if is_skipped]
        kept = self._observer.keep_rollouts(version, [rollout for batch in offending for rollout in batch.rollouts])
        where = "could not be kept" if kept is None else f"are in {kept}"
        for is_skipped in was_skipped:
            self._in_a_row = self._in_a_row + 1 if is_skipped else 0
            if self._failure is None and self._in_a_row == self._limit > 0:
                look = f"`{command()} inspect {kept.parents[1]} --step {version}` shows them; " if kept is not None else ""
                self._failure = NotFiniteGradient(
                    f"the gradient was not finite in {self._limit} optimizer steps in a row, the last of version {version} "
                    f"(train.max_skipped = {self._limit}). Weights and optimizer are as they were before the first of them. "
                    f"The last rollouts {where}; {look}look for a loss that divides by zero or overflows, or lower "
                    f"train.learning_rate"
                )
        steps = f"{len(offending)} of {len(seen)} steps" if len(seen) > 1 else "the step"
        self._observer.screen.say(
            f"version {version}: the gradient is not finite, {steps} skipped, {self._in_a_row} in a row; rollouts {where}"
        )

    def check(self) -> None:
        """Raise if too many steps in a row were skipped."""
        if self._failure is not None:
            raise self._failure
