"""Turns groups into batches: advantages, and the token weights that implement the recipe's mean (`train.mean_over`).

Per-rollout advantages need only rewards. Per-token ones need columns that only the trainer can compute, so they take two
steps: `make_batches`, then `with_token_advantages` once the columns of `columns_first` are computed. Both see all groups of a
version, so that batch statistics do not depend on the number of optimizer steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.algorithms import (
    ADVANTAGES,
    PROXIMAL,
    REFERENCE,
    RETURNS,
    REWARDS,
    TEACHER,
    VALUES,
    batch_advantages,
    gae,
    needed_columns,
    normalised,
    token_rewards,
)
from headrace.records import Batch
from headrace.staleness import correction_constants, correction_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.records import Array, Rollout
    from headrace.run.evaluate import Evaluation
    from headrace.trainer import Published


@dataclass(eq=False)
class StartedBatch:
    """The groups taken from the buffer to train one version, until its metrics are written."""

    version: int
    """The version trained from; the result is `version + 1`."""
    groups: list[Group]
    steps_before: int
    """Optimizer steps the trainer had made before."""
    batches: list[Batch] = field(default_factory=list)
    steps: list[Awaitable[dict[str, float]]] = field(default_factory=list)
    """Metrics of each optimizer step; empty until the steps are requested from the trainer."""
    publishing: Awaitable[Published] | None = None
    """The publication of the next version, if it was requested together with the steps."""
    seen: list[dict[str, float]] = field(default_factory=list)
    """The metrics of the steps, once they are trained."""
    rejected: float = 0.0
    """The share of rollouts rejected, of those trained or rejected since the version before."""
    evaluation: Evaluation | None = None
    metrics: dict[str, Any] | None = None
    """Of the version, once any evaluation that was due is done."""


def make_batches(groups: Sequence[Group], recipe: Recipe, *, version: int) -> list[Batch]:
    """One batch per optimizer step of this version."""
    rewards = [[episode.reward for episode in group.episodes if episode.reward is not None] for group in groups]
    values = batch_advantages(rewards, kind=recipe.train.advantage)
    parts = min(recipe.train.mini_batches, len(groups))
    return [_make_batch(groups[part::parts], values[part::parts], recipe, version=version) for part in range(parts)]


def columns_first(batches: Sequence[Batch], recipe: Recipe) -> list[str]:
    """Columns the trainer computes before a version's first step: those per-token advantages need, and, if several steps will
    move the weights, the current policy's logprobs where a loss or correction uses them."""
    train = recipe.train
    made_from = ADVANTAGES[train.advantage].made_from
    wanted = [*([made_from] if made_from else []), *([REFERENCE] if train.kl_in_reward else [])]
    if len(batches) > 1 and PROXIMAL in needed_columns(train.loss, correction_of(recipe)):
        wanted.append(PROXIMAL)
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    return [name for name in wanted if not all(name in rollout.columns for rollout in rollouts)]


def with_column(batch: Batch, name: str, values: Sequence[Array]) -> Batch:
    """Add a column to every rollout."""
    rollouts = tuple(_with_columns(rollout, {name: value}) for rollout, value in zip(batch.rollouts, values, strict=True))
    return dataclasses.replace(batch, rollouts=rollouts)


def with_token_advantages(batches: Sequence[Batch], recipe: Recipe) -> list[Batch]:
    """Add per-token advantages, if the recipe uses them, from columns computed before."""
    made_from = ADVANTAGES[recipe.train.advantage].made_from
    if not made_from:
        return list(batches)
    if made_from == TEACHER:
        return [dataclasses.replace(batch, advantages=tuple(map(_distilled, batch.rollouts))) for batch in batches]
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    made, returns = zip(*(_estimated(rollout, recipe) for rollout in rollouts), strict=True)
    scaled = np.split(normalised(np.concatenate(made)), np.cumsum([len(part) for part in made])[:-1])
    placed, returned = (iter(map(_placed, parts, rollouts)) for parts in (scaled, returns))
    results = []
    for batch in batches:
        with_returns = with_column(batch, RETURNS, [next(returned) for _ in batch.rollouts])
        results.append(dataclasses.replace(with_returns, advantages=tuple(next(placed) for _ in batch.rollouts)))
    return results


def _make_batch(groups: Sequence[Group], values: Sequence[Array], recipe: Recipe, *, version: int) -> Batch:
    train = recipe.train
    rollouts: list[Rollout] = []
    of_rollouts: list[float] = []
    for group, of_group in zip(groups, values, strict=True):
        for episode, value in zip(group.episodes, of_group.tolist(), strict=True):
            members = episode.rollouts
            if ADVANTAGES[train.advantage].learns_values:
                reward = episode.reward or 0.0
                members = tuple(_with_columns(rollout, {REWARDS: token_rewards(rollout, reward)}) for rollout in members)
            rollouts += members
            of_rollouts += [value] * len(members)
    lengths = np.array([len(rollout) for rollout in rollouts], dtype=np.int64)
    mask = np.concatenate([rollout.loss_mask for rollout in rollouts]) if rollouts else np.zeros(0, dtype=bool)
    has_kl = train.kl > 0 and not train.kl_in_reward
    return Batch.from_columns(
        rollouts,
        advantages=_on_trained(of_rollouts, lengths, mask),
        weights=_on_trained(_scales(lengths, mask, recipe), lengths, mask),
        loss=train.loss,
        constants=train.constants,
        correction=correction_of(recipe),
        correction_constants=correction_constants(recipe),
        kl=train.kl_estimator if has_kl else "none",
        kl_weight=train.kl if has_kl else 0.0,
        version=version,
    )


def _on_trained(values: Sequence[float] | Array, lengths: Array, mask: Array) -> Array:
    """[tokens] float32: each rollout's value on its trained tokens, 0 elsewhere."""
    return np.where(mask, np.repeat(np.asarray(values, dtype=np.float32), lengths), np.float32(0))


def _scales(lengths: Array, mask: Array, recipe: Recipe) -> Array:
    """[rollouts]: the weight of each trained token. They sum to 1 over a batch, or less with a constant, or if sequences count
    equally and some have no trained token."""
    train = recipe.train
    if train.mean_over == "constant":
        return np.full(len(lengths), train.mini_batches / (train.batch * recipe.sampling.max_tokens))
    if train.mean_over == "token":
        return np.full(len(lengths), 1 / max(int(np.count_nonzero(mask)), 1))
    trained = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)])
    stops = np.cumsum(lengths)
    counts = trained[stops] - trained[stops - lengths]
    scales: Array = 1 / (len(lengths) * np.maximum(counts, 1))
    return scales


def _estimated(rollout: Rollout, recipe: Recipe) -> tuple[Array, Array]:
    """(Advantages, returns) of the trained tokens of one rollout."""
    train, mask = recipe.train, rollout.loss_mask
    rewards = rollout.columns[REWARDS][mask]
    if train.kl_in_reward:
        rewards = rewards - train.kl * (rollout.logprobs[mask] - rollout.columns[REFERENCE][mask])
    return gae(rewards, rollout.columns[VALUES][mask], discount=train.discount, trace=train.gae_lambda)


def _distilled(rollout: Rollout) -> Array:
    """[T]: log π_T − log μ, how much likelier the sampled token is under the teacher."""
    return np.where(rollout.loss_mask, rollout.columns[TEACHER] - rollout.logprobs, np.float32(0)).astype(np.float32)


def _placed(values: Array, rollout: Rollout) -> Array:
    """[T] float32: `values` at the trained tokens, 0 elsewhere."""
    result = np.zeros(len(rollout), dtype=np.float32)
    result[rollout.loss_mask] = values
    return result


def _with_columns(rollout: Rollout, columns: dict[str, Array]) -> Rollout:
    return rollout.replace(columns={**rollout.columns, **columns})
