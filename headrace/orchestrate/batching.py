"""Groups into a batch: advantages over siblings, and the weights that make every mean the algorithm wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.score import advantages
from headrace.types import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.types import Array, Rollout


def make_batches(groups: Sequence[Group], recipe: Recipe, *, version: int) -> list[Batch]:
    """One batch per optimizer step of this version."""
    parts = min(recipe.train.mini_batches, len(groups))
    return [_make_batch(groups[part::parts], recipe, version=version) for part in range(parts)]


def _make_batch(groups: Sequence[Group], recipe: Recipe, *, version: int) -> Batch:
    rollouts: list[Rollout] = []
    per_token: list[Array] = []
    for group in groups:
        rewards = [episode.reward for episode in group.episodes]
        values = advantages([reward for reward in rewards if reward is not None], kind=recipe.train.advantage)
        for episode, value in zip(group.episodes, values, strict=True):
            for rollout in episode.rollouts:
                rollouts.append(rollout)
                per_token.append(np.where(rollout.loss_mask, value, 0).astype(np.float32))
    staleness = recipe.staleness
    return Batch(
        rollouts=tuple(rollouts),
        advantages=tuple(per_token),
        weights=_weights(rollouts, mean=recipe.train.loss_mean),
        loss=recipe.train.loss,
        constants=recipe.train.constants,
        correction=staleness.correct,
        correction_constants={} if staleness.correct == "none" else {"cap": staleness.cap, "floor": staleness.floor},
        version=version,
    )


def _weights(rollouts: Sequence[Rollout], *, mean: str) -> tuple[Array, ...]:
    counts = [int(np.count_nonzero(rollout.loss_mask)) for rollout in rollouts]
    total = max(sum(counts), 1)
    scales = [1 / total if mean == "token" else 1 / (len(rollouts) * max(count, 1)) for count in counts]
    return tuple(
        np.where(rollout.loss_mask, scale, 0).astype(np.float32) for rollout, scale in zip(rollouts, scales, strict=True)
    )
