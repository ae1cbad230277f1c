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
    values: list[float] = []
    for group in groups:
        rewards = [episode.reward for episode in group.episodes]
        of_group = advantages([reward for reward in rewards if reward is not None], kind=recipe.train.advantage)
        for episode, value in zip(group.episodes, of_group.tolist(), strict=True):
            rollouts += episode.rollouts
            values += [value] * len(episode.rollouts)
    lengths = np.array([len(rollout) for rollout in rollouts], dtype=np.int64)
    mask = np.concatenate([rollout.loss_mask for rollout in rollouts]) if rollouts else np.zeros(0, dtype=bool)
    staleness = recipe.staleness
    return Batch.from_columns(
        rollouts,
        advantages=_on_trained(values, lengths, mask),
        weights=_on_trained(_scales(lengths, mask, mean=recipe.train.loss_mean), lengths, mask),
        loss=recipe.train.loss,
        constants=recipe.train.constants,
        correction=staleness.correct,
        correction_constants={} if staleness.correct == "none" else {"cap": staleness.cap, "floor": staleness.floor},
        version=version,
    )


def _on_trained(values: Sequence[float] | Array, lengths: Array, mask: Array) -> Array:
    """[tokens] float32: each rollout's value on its trained tokens, 0 elsewhere."""
    return np.where(mask, np.repeat(np.asarray(values, dtype=np.float32), lengths), np.float32(0))


def _scales(lengths: Array, mask: Array, *, mean: str) -> Array:
    """What a trained token of each rollout weighs: the weights of a batch come to 1."""
    if mean == "token":
        return np.full(len(lengths), 1 / max(int(np.count_nonzero(mask)), 1))
    trained = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)])
    stops = np.cumsum(lengths)
    counts = trained[stops] - trained[stops - lengths]
    scales: Array = 1 / (len(lengths) * np.maximum(counts, 1))
    return scales
