"""The recipe's `[filter]`: which scored groups are worth training. Others are dropped, and new ones sampled in their place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.settings import check

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Which groups are trained, by rewards before shaping. Dropped ones are replaced by new ones until the batch is full."""

    max_tied: float = 1.0
    """Share of a batch's groups that may be tied, all siblings having the same reward: 1 keeps them all, 0 drops them all
    (dynamic sampling, as in DAPO), 0.5 samples until half the batch is untied."""
    min_reward: float | None = None
    """Groups with a mean reward below this are dropped as too hard."""
    max_reward: float | None = None
    """Groups with a mean reward above this are dropped as too easy."""
    max_draws: int = 10
    """Groups sampled for each group trained, at most; the rest of the batch is then filled with what comes."""

    def __post_init__(self) -> None:
        check(0 <= self.max_tied <= 1, "max_tied", self.max_tied, "a share from 0 to 1")
        for name in ("min_reward", "max_reward"):
            value = getattr(self, name)
            check(value is None or math.isfinite(value), name, value, "a finite number")
        least, most = self.min_reward, self.max_reward
        check(least is None or most is None or least <= most, "min_reward", least, f"≤ max_reward = {most}")
        check(self.max_draws >= 2, "max_draws", self.max_draws, "≥ 2: with 1 nothing could be dropped")

    @property
    def is_on(self) -> bool:
        return self.max_tied < 1 or self.min_reward is not None or self.max_reward is not None


def unwanted(
    groups: Sequence[Sequence[float]], settings: FilterSettings, *, batch: int, most: float = math.inf
) -> dict[int, str]:
    """The groups to drop, `most` at most: place -> why. `groups`: the siblings' rewards of each group, in the order in which
    groups leave the buffer, `batch` at a time."""
    max_tied, found = math.floor(settings.max_tied * batch + 1e-9), dict[int, str]()
    num_kept = num_tied = 0
    for place, rewards in enumerate(groups):
        is_tied, mean = len(rewards) > 1 and len(set(rewards)) == 1, sum(rewards) / len(rewards)
        reason = ""
        if is_tied and num_tied >= max_tied:
            reason = "tied: all siblings have the same reward"
        elif settings.min_reward is not None and mean < settings.min_reward:
            reason = "too hard: the mean reward is below filter.min_reward"
        elif settings.max_reward is not None and mean > settings.max_reward:
            reason = "too easy: the mean reward is above filter.max_reward"
        if reason and len(found) < most:
            found[place] = reason
            continue
        num_kept, num_tied = num_kept + 1, num_tied + is_tied
        if num_kept % batch == 0:
            num_tied = 0
    return found
