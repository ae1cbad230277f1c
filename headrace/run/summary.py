"""What summary.json says of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.observe import bound_by

if TYPE_CHECKING:
    from headrace.run.session import Session


def summarize(session: Session, status: str, *, seconds: dict[str, float]) -> dict[str, Any]:
    """The contents of summary.json. `memory` has peak bytes so far; in `inline` mode both are of the one process. An
    engine that reports no peak is left out."""
    progress, policy, forecast, budget = session.progress, session.policy, session.forecast, session.observer.budget()
    memory = {"trainer": {"predicted": forecast and forecast.trainer_process, "peak": session.trainer_peak}}
    if engine_peak := session.roles.engine_peak():
        memory["engine"] = {"predicted": forecast and forecast.engine_process, "peak": engine_peak}
    before, after = progress.held_out_before or {}, progress.held_out_after
    untrained = policy.wasted_tokens + sum(group.num_sampled for group in policy.buffer.groups())
    role, share_of_time = bound_by(budget)
    return {
        "status": status,
        "config_hash": session.identity,
        "steps": session.recipe.steps,
        "version": policy.version,
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "greedy_before": before.get("greedy"),
        "greedy_after": after.get("greedy"),
        "held_out": {
            "before": before,
            "after": after,
            "version": progress.held_out_version,
            "temperature": session.recipe.evaluate.sampling.temperature,
        },
        "reward_first": progress.reward_first,
        "reward_last": progress.reward_last,
        "seconds": {
            **seconds,
            "first_step": progress.first_step,
            "rl": progress.seconds_rl,
            "evaluate": progress.seconds_evaluating,
        },
        "tokens": {
            "sampled": progress.trained_tokens + untrained,
            "trained": progress.trained_tokens,
            "wasted": policy.wasted_tokens,
        },
        "lag": {"mean": progress.lag_sum / max(progress.trained_tokens, 1), "max": progress.lag_max},
        "staleness": {
            "max_lag": session.recipe.staleness.max_lag,
            "depth": policy.gate.depth,
            "why": "" if policy.pace is None else policy.pace.controller.why,
        },
        "lending": None if session.run.lending is None else session.run.lending.summary(),
        "skipped_steps": progress.skipped_steps,
        "accounting": policy.ledger.counts(),
        "groups_from_journal": policy.recovered.num_used,
        "dropped_because": dict(policy.ledger.reasons),
        "pushed": getattr(session.roles.environment, "push_counts", {}),
        "time_budget": budget,
        "occupancy": session.observer.occupancy,
        "bound_by": role,
        "bound_share": share_of_time,
        "stopped_by": session.stopped_by,
        "changes": [asdict(change) for change in session.changes],
        "callbacks": {name: round(seconds, 3) for name, seconds in session.callbacks.seconds.items()},
        "memory": memory,
        **session.roles.losses(),
        "checkpoint": None if session.checkpoint_folder is None else str(session.checkpoint_folder),
    }
