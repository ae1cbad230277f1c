"""The recipe's `[staleness]`, and the correction it means. What each correction computes: `headrace.algorithms`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.algorithms import correction_traits, loss_traits
from headrace.settings import ConfigError, check

if TYPE_CHECKING:
    from headrace.config import Recipe


@dataclass(frozen=True, kw_only=True)
class StalenessSettings:
    """How old a token may be, and what is done about it. Gate, rejection and correction combine freely."""

    max_lag: int = 1
    """The most versions between a token's sampling and its training; 0 is synchronous."""
    gate: bool = True
    """Submit no group that could not be trained within max_lag versions if groups were trained in order."""
    reject: bool = True
    """Drop groups with a token older than max_lag when a batch is made, and submit others instead."""
    correct: Literal["none", "tis", "mis", "sequence_tis", "sequence_mis", "geometric_tis", "geometric_mis", "opsm", "m2po"] = (
        "none"
    )
    """`none`: the loss's ratio is taken against the logprobs the engine recorded. `tis`, `mis`: it is taken against the
    policy at the start of the step, and each token is weighted by the truncated or masked importance weight; `sequence_` takes
    the product over the rollout, `geometric_` its mean. `opsm`, `m2po`: as none, but rollouts or tokens too far off are left
    out."""
    cap: float = 2.0
    """Largest importance weight (tis), or the largest kept (mis)."""
    floor: float = 0.5
    """Smallest importance weight kept (mis)."""
    limit: float = 0.0
    """How far off is too far. `m2po`: the mean of the squared log ratio that the kept tokens have at most; 0 takes 0.04.
    `opsm`: the mean log ratio by which a rollout of negative advantage has become less likely; 0 takes 1e-4."""

    def __post_init__(self) -> None:
        check(self.max_lag >= 0, "max_lag", self.max_lag, "≥ 0")
        check(self.cap >= 1, "cap", self.cap, "≥ 1")
        check(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")
        check(0 <= self.limit < math.inf, "limit", self.limit, "a number ≥ 0")
        if self.limit and not correction_traits(self.correct).usual_limit:
            raise ConfigError(f"limit = {self.limit:g}: only correct = 'opsm' and 'm2po' have a limit, not '{self.correct}'")

    @property
    def is_bounded(self) -> bool:
        """Whether anything bounds the lag of what is trained."""
        return self.gate or self.reject


def correction_of(recipe: Recipe) -> str:
    """`staleness.correct`, or if that is "none" the loss's own correction."""
    correct = recipe.staleness.correct
    return loss_traits(recipe.train.loss).correction if correct == "none" else correct


def correction_constants(recipe: Recipe) -> dict[str, float]:
    """The constants of the recipe's correction, with `staleness.limit = 0` resolved."""
    name, staleness = correction_of(recipe), recipe.staleness
    if name == "none":
        return {}
    usual_limit = correction_traits(name).usual_limit
    if usual_limit:
        return {"limit": staleness.limit or usual_limit}
    return {"cap": staleness.cap, "floor": staleness.floor}


def check_correction(recipe: Recipe) -> None:
    """Refuse a correction that would apply the loss's own importance weight twice, or replace the loss's own mask."""
    correct, loss = recipe.staleness.correct, recipe.train.loss
    if correct == "none":
        return
    traits = loss_traits(loss)
    if traits.has_importance_weight and not correction_traits(correct).is_mask:
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = '{loss}' has the importance weight in it; leave it 'none'"
        )
    if traits.correction not in ("none", correct):
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = '{loss}' brings a mask, which this would replace; leave it 'none'"
        )
