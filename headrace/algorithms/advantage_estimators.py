"""Advantages: how much better than expected a rollout, or a token of it, did."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import Array, Rollout

_ROUNDING = 1e-6
"""A standard deviation up to this, relative to the largest value or 1, counts as rounding: equal float32 rewards may differ by
some 1e-7 of their size, and a weighted sum that cancels may be that far from 0."""


def advantages(rewards: Sequence[float], *, kind: str) -> Array:
    """[siblings]. `group`: (r − mean) ÷ std; `group_mean`: r − mean; `leave_one_out`: r − mean of the others."""
    if kind == "group":
        return normalised(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    centred: Array = values - values.mean()
    if kind == "leave_one_out":
        centred = centred * len(values) / max(len(values) - 1, 1)
    elif kind != "group_mean":
        raise ValueError(f"train.advantage = {kind!r}: must be group, group_mean or leave_one_out")
    return centred.astype(np.float32)


def batch_advantages(groups: Sequence[Sequence[float]], *, kind: str) -> list[Array]:
    """One advantage per rollout, by group, for all groups of a version. `global`: (r − mean) ÷ std over all of them; `reward`:
    r; `gae`, `distill`: 0, because theirs are per token and computed later; others: `advantages` of each group."""
    if kind == "global":
        scaled = normalised(np.concatenate([np.zeros(0), *groups]))
        return np.split(scaled, np.cumsum([len(group) for group in groups]))[:-1] if groups else []
    if kind == "reward":
        return [np.asarray(group, dtype=np.float32) for group in groups]
    if kind in ("gae", "distill"):
        return [np.zeros(len(group), dtype=np.float32) for group in groups]
    return [advantages(group, kind=kind) for group in groups]


def normalised(values: Sequence[float] | Array) -> Array:
    """(value − mean) ÷ std, float32; all 0 if the values differ only by rounding."""
    if not len(values):
        return np.zeros(0, dtype=np.float32)
    wide: Array = np.asarray(values, dtype=np.float64)
    centred: Array = wide - wide.mean()
    spread = centred.std()
    is_rounding = spread <= _ROUNDING * max(1.0, np.abs(wide).max())
    return np.zeros(len(wide), dtype=np.float32) if is_rounding else (centred / spread).astype(np.float32)


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
