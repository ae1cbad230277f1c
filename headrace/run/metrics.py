"""What a run reports: the metrics of a version, and the totals of `summary.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.observe import bound_by

if TYPE_CHECKING:
    from headrace.observe import Observer
    from headrace.run.batches import StartedBatch
    from headrace.run.evaluate import Evaluation
    from headrace.run.policy import PolicyState


@dataclass
class TrainedVersion:
    """A trained version whose metrics are not written yet."""

    started: StartedBatch
    seen: list[dict[str, float]]
    at: float
    """When it was trained, by `time.perf_counter`."""
    evaluation: Evaluation | None = None
    is_complete: bool = False
    """Any evaluation that was due is done."""


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

    def summary(self, policy: PolicyState, observer: Observer, *, seconds: dict[str, float]) -> dict[str, Any]:
        """Most of summary.json."""
        before, after = self.held_out_before or {}, self.held_out_after
        budget = observer.budget()
        role, share = bound_by(budget)
        buffered = (r for group in policy.buffer.groups() for episode in group.episodes for r in episode.rollouts)
        sampled = self.trained_tokens + policy.wasted_tokens + sum(rollout.num_sampled for rollout in buffered)
        return {
            "steps": policy.recipe.steps,
            "version": policy.version,
            "success_before": before.get("success"),
            "success_after": after.get("success"),
            "greedy_before": before.get("greedy"),
            "greedy_after": after.get("greedy"),
            "held_out": {"before": before, "after": after},
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "seconds": {**seconds, "first_step": self.first_step, "rl": self.seconds_rl},
            "tokens": {"sampled": sampled, "trained": self.trained_tokens, "wasted": policy.wasted_tokens},
            "lag": {"mean": self.lag_sum / max(self.trained_tokens, 1), "max": self.lag_max},
            "skipped_steps": self.skipped_steps,
            "accounting": policy.ledger.counts(),
            "dropped_because": policy.ledger.reasons,
            "time_budget": budget,
            "occupancy": observer.occupancy,
            "bound_by": role,
            "bound_share": share,
        }


def trainer_metrics(seen: list[dict[str, float]], *, memory_peak: int) -> dict[str, float]:
    """Means over the optimizer steps that report a metric. The mismatch is the first step's, before the weights move."""
    names = dict.fromkeys(name for step in seen for name in step)
    metrics = {name: float(np.mean([step[name] for step in seen if name in step])) for name in names}
    metrics |= {name: seen[0][name] for name in ("mismatch", "mismatch_max")}
    return {f"train/{name}": value for name, value in (metrics | {"memory_peak": float(memory_peak)}).items()}


def sync_metrics(policy: PolicyState) -> dict[str, Any]:
    """Of the last update the engines loaded: bytes sent, and bytes of all the weights."""
    update = policy.last_update
    metrics: dict[str, Any] = {"canary": policy.canary_difference, "failed_syncs": policy.failed_updates}
    if update is not None and update.parts:
        metrics["sync_bytes"] = float(update.num_bytes)
        metrics["sync_full_bytes"] = float(update.manifest.total_bytes)
    return metrics
