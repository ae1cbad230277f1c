"""Advantages: how much better than expected a rollout, or a turn or a token of it, did."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records import Array, Episode, Rollout

_ROUNDING = 1e-6
"""A standard deviation up to this, relative to the largest value or 1, counts as rounding: equal float32 rewards may differ by
some 1e-7 of their size, and a weighted sum that cancels may be that far from 0."""


def batch_advantages(groups: Sequence[Sequence[float] | Array], *, baseline: str, scale: str) -> list[Array]:
    """One advantage per rollout, by group, for all groups of a version: (reward − baseline) ÷ scale. Baselines that are per
    token (`gae`, `distill`) give 0: those advantages are computed later."""
    every = np.concatenate([np.zeros(0), *groups])
    return [advantages(group, every, baseline=baseline, scale=scale) for group in groups]


def advantages(rewards: Sequence[float] | Array, every: Sequence[float] | Array, *, baseline: str, scale: str) -> Array:
    """[siblings] float32, of one group; `every` are the rewards of all groups of the version. `baseline` is the mean of the
    siblings (`group`), of the others (`leave_one_out`), of `every` (`global`), or 0 (`reward`); `scale` the standard deviation
    over the siblings (`group`), over `every` (`batch`), or 1 (`none`). All 0 if what it divides by is rounding."""
    values, count = np.asarray(rewards, dtype=np.float64), len(rewards)
    over = {"group": values, "leave_one_out": values, "global": np.asarray(every), "reward": np.zeros(1)}
    if baseline not in over:
        return np.zeros(count, dtype=np.float32)
    centred: Array = values - over[baseline].mean()
    if baseline == "leave_one_out":
        centred = centred * count / max(count - 1, 1)
    spread = 1.0 if scale == "none" else _spread(values if scale == "group" else every)
    return (centred / spread if spread else np.zeros(count)).astype(np.float32)


def normalised(values: Sequence[float] | Array) -> Array:
    """(value − mean) ÷ std, float32; all 0 if the values differ only by rounding."""
    return advantages(values, values, baseline="group", scale="group") if len(values) else np.zeros(0, dtype=np.float32)


def sum_of_normalised(parts: Sequence[Mapping[str, float]], *, weights: Mapping[str, float]) -> Array:
    """[siblings]: the weighted sum of their rewards, each reward function normalised over the siblings by itself first (GDPO).
    `parts` are the rewards of each sibling by name; one that does not apply to a sibling adds nothing."""
    total = np.zeros(len(parts))
    for name in dict.fromkeys(name for part in parts for name in part):
        has = [index for index, part in enumerate(parts) if name in part]
        total[has] += weights.get(name, 1.0) * normalised([parts[index][name] for index in has])
    return total


def _spread(values: Sequence[float] | Array) -> float:
    """The standard deviation; 0 if the values differ only by rounding."""
    wide: Array = np.asarray(values, dtype=np.float64)
    spread = float((wide - wide.mean()).std())
    return 0.0 if spread <= _ROUNDING * max(1.0, np.abs(wide).max()) else spread


def token_rewards(rollout: Rollout, reward: float) -> Array:
    """[T] float32: the outcome's reward on the last trained token, and each step reward on the last trained token up to its
    index. A step reward before the first trained token is left out: no trained token earned it."""
    rewards = np.zeros(len(rollout), dtype=np.float32)
    trained = np.flatnonzero(rollout.loss_mask)
    if not len(trained):
        return rewards
    rewards[trained[-1]] += reward
    for index, value in rollout.step_rewards:
        place = int(np.searchsorted(trained, index, side="right")) - 1
        if place >= 0:
            rewards[trained[place]] += value
    return rewards


def gae(rewards: Array, values: Array, *, discount: float, trace: float) -> tuple[Array, Array]:
    """(advantages, returns), float32, of one rollout's trained tokens in order: δ_t = r_t + γ V_{t+1} − V_t,
    A_t = δ_t + γ λ A_{t+1}, R_t = A_t + V_t, with `discount` γ and `trace` λ. V_t is the value before token t was sampled; it
    is 0 after the last token."""
    now = np.asarray(values, dtype=np.float64)
    later = np.append(now[1:], 0.0)[: len(now)]
    errors = np.asarray(rewards, dtype=np.float64) + discount * later - now
    decay = discount * trace
    backwards = accumulate(errors[::-1].tolist(), lambda after, error: error + decay * after)
    made = np.fromiter(backwards, dtype=np.float64, count=len(now))[::-1]
    return made.astype(np.float32), (made + now).astype(np.float32)


def turns_of(rollout: Rollout) -> Array:
    """[T] int64: which turn sampled each token, counted from 0; -1 elsewhere. A turn ends where something follows that the
    policy did not sample; one that was interrupted and resumed is one."""
    sampled = rollout.is_sampled
    starts = sampled & ~np.append(False, sampled[:-1])
    turns: Array = np.where(sampled, np.cumsum(starts) - 1, -1)
    return turns


def turn_advantages(
    siblings: Sequence[Episode], rewards: Sequence[float] | Array, *, scale: str, discount: float
) -> list[Array]:
    """[T] float32 of every rollout of a group, in order: turn-level GRPO. A turn is worth its step rewards and those still to
    come, each later turn discounted once more; the episode's own of `rewards` comes with the last turn. It is compared with the
    same turn of the siblings; a sibling that has no such turn any more is represented by its last one (and its last rollout).
    So without step rewards and discount every turn gets what `group` gives its episode."""
    to_come = [
        [_to_come(_turn_rewards(rollout, reward), discount) for rollout in episode.rollouts]
        for episode, reward in zip(siblings, np.asarray(rewards).tolist(), strict=True)
    ]
    found = [[np.zeros(len(of_turns)) for of_turns in of_rollouts] for of_rollouts in to_come]
    for place in range(max(map(len, to_come), default=0)):
        same = [of_rollouts[min(place, len(of_rollouts) - 1)] for of_rollouts in to_come]
        for turn in range(max(map(len, same))):
            compared = np.array([of_turns[min(turn, len(of_turns) - 1)] for of_turns in same])
            made = advantages(compared, compared, baseline="group", scale=scale)
            for sibling, of_rollouts in enumerate(found):
                if place < len(of_rollouts) and turn < len(of_rollouts[place]):
                    of_rollouts[place][turn] = made[sibling]
    return [
        np.where(rollout.loss_mask, of_turns[turns_of(rollout)], 0).astype(np.float32)
        for episode, of_rollouts in zip(siblings, found, strict=True)
        for rollout, of_turns in zip(episode.rollouts, of_rollouts, strict=True)
    ]


def _turn_rewards(rollout: Rollout, reward: float) -> Array:
    """[turns], of a rollout without any turn its reward alone."""
    turns, of_tokens = turns_of(rollout), token_rewards(rollout, reward)
    if not rollout.loss_mask.any():
        return np.append(np.zeros(max(int(turns.max(initial=-1)), 0)), reward)
    sums: Array = np.bincount(turns[rollout.loss_mask], weights=of_tokens[rollout.loss_mask], minlength=int(turns.max()) + 1)
    return sums


def _to_come(rewards: Array, discount: float) -> Array:
    backwards = accumulate(rewards[::-1].tolist(), lambda after, reward: reward + discount * after)
    return np.fromiter(backwards, dtype=np.float64, count=len(rewards))[::-1]


def turn_gae(rewards: Array, values: Array, turns: Array, *, discount: float, trace: float) -> tuple[Array, Array]:
    """(advantages, returns), float32, of one rollout's trained tokens in order, by `gae` over turns: a turn is one action, with
    the sum of its tokens' rewards and the value before its first; discount and trace apply from turn to turn. All tokens of a
    turn share its advantage and its return. `turns`: which turn each token is of."""
    firsts = np.flatnonzero(np.diff(turns, prepend=-1))
    sums = np.add.reduceat(np.asarray(rewards, dtype=np.float64), firsts) if len(firsts) else np.zeros(0)
    made, returns = gae(sums, np.asarray(values)[firsts], discount=discount, trace=trace)
    counts = np.diff(np.append(firsts, len(turns)))
    return np.repeat(made, counts), np.repeat(returns, counts)
