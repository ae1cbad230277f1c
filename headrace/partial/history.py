"""Half-finished rollouts: which can be gone on with, and how much of one a restart leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records import FinishReason, Source

if TYPE_CHECKING:
    from headrace.records import Rollout
    from headrace.sync import Lineage


def is_resumable(rollout: Rollout) -> bool:
    """Whether a rollout that was interrupted can be gone on with by running its episode again from the start.

    Only the first generate call of an episode's first rollout can. What an environment did before a later one, a tool it
    called or a prompt it made of another rollout's text, is lost with it, and may come out otherwise the second time.
    """
    is_first = rollout.id == rollout.episode and rollout.parent is None
    is_cut = rollout.finish_reason is FinishReason.ABORT and rollout.num_sampled > 0
    return is_first and is_cut and bool((np.diff(rollout.is_sampled.astype(np.int8)) >= 0).all())


def goes_on_from(prompt: Rollout, partial: Rollout) -> bool:
    """Whether a partial rollout begins with this prompt, token for token, and holds no other."""
    start = len(prompt)
    return (
        not prompt.calls
        and len(partial) > start
        and np.array_equal(partial.token_ids[:start], prompt.token_ids)
        and np.array_equal(partial.source[:start], prompt.source)
        and bool((partial.source[start:] == Source.SAMPLED).all())
    )


def still_history(rollout: Rollout, lineage: Lineage) -> Rollout | None:
    """The part of a partial rollout that weights of this life, or of its history, have drawn; None if that is nothing.

    What is left is given this life's name. That is true of it: every token left was drawn by a version from which this life
    has come, so (this life, version) are the same weights. Nothing newer is left that the name could be wrong about, and what
    is drawn from here on is drawn in this life. Under the old name the first token it draws past the checkpoint would
    condemn it.
    """
    drawn_by = np.unique(rollout.versions[rollout.is_sampled]).tolist()
    dead = [version for version in drawn_by if not lineage.contains(rollout.lineage, version)]
    if dead:
        cut = int(np.flatnonzero(np.isin(rollout.versions, dead))[0])
        if not rollout.is_sampled[:cut].any():
            return None
        rollout = rollout.forked(cut, id=f"{rollout.id} cut").replace(id=rollout.id, parent=rollout.parent)
    return rollout.replace(lineage=lineage.id)
