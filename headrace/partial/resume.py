"""Unfinished rollouts: which can be resumed, and how much of one is still valid after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records import FinishReason, Source

if TYPE_CHECKING:
    from headrace.records import Rollout
    from headrace.sync import Lineage


def is_resumable(rollout: Rollout) -> bool:
    """Whether an interrupted rollout can be resumed by running its episode again from the start. Only the first generate call
    of an episode's first rollout can: before a later call, the environment may have called a tool or built a prompt from
    another rollout's text, which may come out differently the second time."""
    is_first = rollout.id == rollout.episode and rollout.parent is None
    is_cut = rollout.finish_reason is FinishReason.ABORT and rollout.num_sampled > 0
    return is_first and is_cut and bool((np.diff(rollout.is_sampled.astype(np.int8)) >= 0).all())


def is_continuation(prompt: Rollout, partial: Rollout) -> bool:
    """Whether a partial rollout is this prompt, token for token, followed by sampled tokens only."""
    start = len(prompt)
    return (
        not prompt.calls
        and len(partial) > start
        and np.array_equal(partial.token_ids[:start], prompt.token_ids)
        and np.array_equal(partial.source[:start], prompt.source)
        and bool((partial.source[start:] == Source.SAMPLED).all())
    )


def surviving_part(rollout: Rollout, lineage: Lineage) -> Rollout | None:
    """The part of a partial rollout sampled by weights that this lineage descends from; None if there is none. It is relabelled
    with this lineage, since (this lineage, version) names the same weights for all its tokens; under the old label, the first
    token sampled past the checkpoint would get the rollout rejected."""
    versions = np.unique(rollout.versions[rollout.is_sampled]).tolist()
    dead = [version for version in versions if not lineage.contains(rollout.lineage, version)]
    if dead:
        cut = int(np.flatnonzero(np.isin(rollout.versions, dead))[0])
        if not rollout.is_sampled[:cut].any():
            return None
        rollout = rollout.forked(cut, id=f"{rollout.id} cut").replace(id=rollout.id, parent=rollout.parent)
    return rollout.replace(lineage=lineage.id)
