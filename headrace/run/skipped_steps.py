"""Optimizer steps that were skipped because the gradient was not finite: counted, shown, their rollouts kept, and after so
many one after another the run ends. One now and then is an accident; many are a loss, data or weights that are broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.observe import Observer
    from headrace.run.work import StartedBatch


class NotFiniteGradient(RuntimeError):
    """Gradients were NaN or infinite in as many steps one after another as `train.max_skipped` allows."""


class SkippedSteps:
    """How many, since the run began here, and how many one after another. `limit`: `train.max_skipped`."""

    def __init__(self, *, limit: int, observer: Observer) -> None:
        self._limit, self._observer = limit, observer
        self._in_a_row = 0
        self._failure: NotFiniteGradient | None = None

    def note(self, started: StartedBatch, seen: Sequence[dict[str, float]]) -> None:
        """What the trainer saw in the steps of a version. Called once for each version, in order; raises nothing: that the
        version is trained is to be noted first, whatever follows from it."""
        was_skipped = [bool(step.get("skipped", 0.0)) for step in seen]
        if not any(was_skipped):
            self._in_a_row = 0
            return
        version = started.version + 1
        offending = [batch for batch, is_skipped in zip(started.batches, was_skipped, strict=True) if is_skipped]
        kept = self._observer.keep_rollouts(version, [rollout for batch in offending for rollout in batch.rollouts])
        for is_skipped in was_skipped:
            self._in_a_row = self._in_a_row + 1 if is_skipped else 0
            if self._failure is None and self._in_a_row == self._limit > 0:
                self._failure = _failure(version, self._limit, kept)
        steps = f"{len(offending)} of {len(seen)} steps" if len(seen) > 1 else "the step"
        self._observer.screen.say(
            f"version {version}: the gradient is not finite, {steps} skipped, {self._in_a_row} in a row; "
            f"rollouts {_where(kept)}"
        )

    def check(self) -> None:
        """Ends the run when too many were skipped one after another. Called when the version they belong to is settled."""
        if self._failure is not None:
            raise self._failure


def _failure(version: int, count: int, kept: Path | None) -> NotFiniteGradient:
    look = f"`{command()} inspect {kept.parents[1]} --step {version}` shows them; " if kept is not None else ""
    return NotFiniteGradient(
        f"the gradient was not finite in {count} optimizer steps one after another, the last of version {version} "
        f"(train.max_skipped = {count}). Weights and optimizer are as they were before the first of them. The last rollouts "
        f"{_where(kept)}; {look}look for a loss that divides by zero or overflows, or lower train.learning_rate"
    )


def _where(kept: Path | None) -> str:
    return "could not be kept" if kept is None else f"are in {kept}"
