"""Rejects groups that are too old when a batch is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.records import Episode
    from headrace.sync import Lineage


def too_old(episodes: Iterable[Episode], *, version: int, max_lag: int | None, lineage: Lineage) -> str | None:
    """Why these episodes cannot be trained at `version`, or None. Tokens of weights that a restart discarded never can be."""
    for episode in episodes:
        for rollout in episode.rollouts:
            if not rollout.num_sampled:
                continue
            if not lineage.contains(rollout.lineage, int(rollout.versions.max())):
                return "lineage"
            if max_lag is not None and version - rollout.oldest_version > max_lag:
                return "lag"
    return None
