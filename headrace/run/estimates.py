"""What held-out samples say about a model: pass@k, maj@k and means, with 95 % confidence intervals and paired differences.

Tasks are the independent draws, samples of one task are not: each task gives one value of every metric, and an interval comes
from how those values spread over tasks. Shares get Wilson's interval, which holds near 0 and 1 too, for the number of
independent draws that would spread as much; other means, and paired differences, get mean ± 1.96 standard errors.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records import Array

_Z = 1.959964
_SUBSETS = 256
"""Subsets of a task's samples over which maj@k is averaged, at most."""
REWARD = "held_out_reward"
"""The one metric that is no share."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskScore:
    """How one task went."""

    source: str
    id: str
    """Of its row's content: two evaluations are compared on equal tasks."""
    rewards: tuple[float | None, ...]
    """Of each sample; None if it could not be judged."""
    answers: tuple[str | None, ...]
    """What each sample votes for in maj@k; None if it gives no answer."""
    greedy: float | None
    """The reward of decoding greedily, if that was asked for and could be judged."""

    def values(self, *, success_at: float) -> dict[str, float]:
        """By metric, over the samples that could be judged; metrics that need more of them are left out."""
        judged = [(reward, answer) for reward, answer in zip(self.rewards, self.answers, strict=True) if reward is not None]
        right, found = [reward >= success_at for reward, _ in judged], dict[str, float]()
        if judged:
            found["success"] = sum(right) / len(right)
            found[REWARD] = sum(reward for reward, _ in judged) / len(judged)
        if self.greedy is not None:
            found["greedy"] = float(self.greedy >= success_at)
        for k in (k for k in sizes(len(self.rewards)) if k <= len(judged)):
            found[f"pass@{k}"] = pass_at(k, samples=len(right), right=sum(right))
            if k > 1:  # one vote, like two that tie, is no majority
                found[f"maj@{k}"] = majority_at(k, answers=[answer for _, answer in judged], right=right)
        return found


def sizes(samples: int) -> list[int]:
    """The k of pass@k and maj@k: 1, 2, 4, … and the number of samples itself; none for a single sample."""
    return sorted({samples, *(2**power for power in range(samples.bit_length()))}) if samples > 1 else []


def pass_at(k: int, *, samples: int, right: int) -> float:
    """The chance that one of k samples is right, by the unbiased estimator of Chen et al. 2021: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at(k: int, *, answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """The chance that the most frequent answer of k samples is right, averaged over subsets of the samples; answers that tie
    share it equally. A sample without an answer has no vote; where none has one, nothing is right."""
    names = list({answer: None for answer in answers if answer is not None})
    if not names or not any(right) or all(right):
        return float(bool(names) and all(right))
    ids = np.array([names.index(answer) if answer is not None else len(names) for answer in answers])
    chance = np.bincount(ids, weights=right, minlength=len(names) + 1)[:-1] / np.bincount(ids, minlength=len(names) + 1)[:-1]
    drawn = ids[_subsets(len(answers), k)]
    rows = (len(names) + 1) * np.arange(len(drawn))[:, None]
    votes = np.bincount((drawn + rows).ravel(), minlength=len(drawn) * (len(names) + 1)).reshape(len(drawn), -1)[:, :-1]
    wins = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float(np.mean((wins * chance).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)))


@functools.cache
def _subsets(samples: int, k: int) -> Array:
    """[subsets, k] indices: all subsets of k samples if they are few, otherwise random ones, the same for every task."""
    if math.comb(samples, k) <= _SUBSETS:
        return np.array(list(itertools.combinations(range(samples), k)))
    draws = np.random.default_rng(0)
    return np.array([draws.permutation(samples)[:k] for _ in range(_SUBSETS)])


def estimate(name: str, values: Sequence[float]) -> Estimate:
    """The mean over tasks with its interval."""
    mean, error = _mean_and_error(values)
    if name == REWARD:
        return Estimate(mean, mean - _Z * error, mean + _Z * error)
    draws = mean * (1 - mean) / error**2 if error else float(len(values))
    centre = (mean + _Z**2 / (2 * draws)) / (1 + _Z**2 / draws)
    half = _Z / (1 + _Z**2 / draws) * math.sqrt(mean * (1 - mean) / draws + _Z**2 / (4 * draws**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def estimates(tasks: Sequence[TaskScore], *, success_at: float) -> dict[str, Estimate]:
    """Every metric that at least one task has a value of; all tasks count equally."""
    values = [task.values(success_at=success_at) for task in tasks]
    names = sorted({name for each in values for name in each}, key=_order)
    return {name: estimate(name, [each[name] for each in values if name in each]) for name in names}


def differences(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Ours minus theirs, task by task: what both found hard or easy cancels."""
    names = sorted({name for each in ours for name in each}, key=_order)
    found = {}
    for name in names:
        pairs = [a[name] - b[name] for a, b in zip(ours, theirs, strict=True) if name in a and name in b]
        if pairs:
            mean, error = _mean_and_error(pairs)
            found[name] = Estimate(mean, mean - _Z * error, mean + _Z * error)
    return found


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(np.mean(values)), error


def _order(name: str) -> tuple[int, str, int]:
    kind, _, k = name.partition("@")
    return ("success", "greedy", REWARD, "pass", "maj").index(kind), kind, int(k or 0)
