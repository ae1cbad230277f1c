"""What a run reports: the metrics of a version, and the totals of `summary.json`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import command

if TYPE_CHECKING:
    from headrace.observe import Observer
    from headrace.run.batches import StartedBatch


@dataclass
class Progress:
    """Totals of the whole run, saved in checkpoints."""

    held_out_before: dict[str, float] | None = None
    """Held-out metrics before RL; None until measured."""
    held_out_after: dict[str, float] = field(default_factory=dict)
    """Held-out metrics of the last evaluation."""
    trained_tokens: int = 0
    wasted_tokens: int = 0
    """As of the last checkpoint."""
    lag_sum: float = 0.0
    lag_max: int = 0
    seconds_rl: float = 0.0
    first_step: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    skipped_steps: int = 0

    def count(self, started: StartedBatch, *, seconds: float) -> dict[str, Any]:
        """Add a version that took `seconds` to the totals and return its metrics."""
        batches, groups = started.batches, started.groups
        versions = np.concatenate([rollout.versions for batch in batches for rollout in batch.rollouts])
        lags = started.version - versions[versions >= 0]
        rewards = [episode.reward for group in groups for episode in group.episodes if episode.reward is not None]
        tokens, most = len(lags), int(lags.max(initial=0))
        self.seconds_rl += seconds
        self.trained_tokens += tokens
        self.lag_sum += float(lags.sum())
        self.lag_max = max(self.lag_max, most)
        self.reward_last = float(np.mean(rewards))
        self.reward_first = self.reward_last if self.reward_first is None else self.reward_first
        return {
            "reward": self.reward_last,
            "reward_std": float(np.std(rewards)),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "completion_tokens": tokens / sum(len(batch.rollouts) for batch in batches),
            "lag_mean": float(lags.mean()) if tokens else 0.0,
            "lag_max": most,
            "seconds": seconds,
            "tied_groups": sum(group.is_tied for group in groups),
        }


def trainer_metrics(seen: list[dict[str, float]], *, memory_peak: int) -> dict[str, float]:
    """Means over the optimizer steps that report a metric. The mismatch is the first step's, before the weights move."""
    names = dict.fromkeys(name for step in seen for name in step)
    metrics = {name: float(np.mean([step[name] for step in seen if name in step])) for name in names}
    metrics |= {name: seen[0][name] for name in ("mismatch", "mismatch_max")}
    return {f"train/{name}": value for name, value in (metrics | {"memory_peak": float(memory_peak)}).items()}


class NotFiniteGradient(RuntimeError):
    """The gradient was NaN or infinite in `train.max_skipped` steps in a row."""


class SkippedSteps:
    """Counts optimizer steps skipped because the gradient was not finite, and keeps their rollouts on disk. One now and then is
    an accident; `limit` in a row (0: any number) mean that loss, data or weights are broken, and end the run."""

    def __init__(self, *, limit: int, observer: Observer, in_thread: bool) -> None:
        """`in_thread`: write rollouts there, to keep the event loop free."""
        self._limit, self._observer, self._in_thread = limit, observer, in_thread
        self._in_a_row = 0

    async def check(self, started: StartedBatch) -> None:
        """Take a trained version, in order; raise if too many steps in a row were skipped."""
        was_skipped = [bool(step.get("skipped", 0.0)) for step in started.seen]
        if not any(was_skipped):
            self._in_a_row = 0
            return
        version, is_limit_reached = started.version + 1, False
        for is_skipped in was_skipped:
            self._in_a_row = self._in_a_row + 1 if is_skipped else 0
            is_limit_reached |= self._in_a_row == self._limit > 0
        offending = [batch for batch, is_skipped in zip(started.batches, was_skipped, strict=True) if is_skipped]
        rollouts, keep = [rollout for batch in offending for rollout in batch.rollouts], self._observer.keep_rollouts
        kept = await asyncio.to_thread(keep, version, rollouts) if self._in_thread else keep(version, rollouts)
        where = "could not be kept" if kept is None else f"are in {kept}"
        steps = f"{len(offending)} of {len(started.seen)} steps" if len(started.seen) > 1 else "the step"
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
