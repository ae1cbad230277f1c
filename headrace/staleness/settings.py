"""The recipe's `[staleness]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.algorithms import correction_traits
from headrace.settings import ConfigError, check


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
