"""The recipe's `[staleness]`, and the correction it means. What each correction computes: `headrace.algorithms`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.algorithms import correction_traits, loss_traits
from headrace.settings import ConfigError, check
from headrace.staleness.gate import GATES
from headrace.staleness.reject import RULES

if TYPE_CHECKING:
    from headrace.config import Recipe

    GateName: TypeAlias = str
    RuleName: TypeAlias = str
else:
    GateName = Literal[tuple(GATES)]
    RuleName = Literal[tuple(RULES)]

INLINE_LAG = 1
"""What `max_lag = "auto"` means in a run that must not depend on timing."""


@dataclass(frozen=True, kw_only=True)
class StalenessSettings:
    """How old a token may be, and what is done about it. Gate, rejection and correction combine freely."""

    max_lag: int | float | Literal["auto"] = "auto"
    """The most versions between a token's sampling and its training; 0 is synchronous. Of a fraction, the gate lets that many
    batches run ahead, and rejection rounds up. `auto`: as few as keep the trainer busy, found while the run goes on."""
    max_lag_limit: int = 8
    """The bound on `max_lag = "auto"`, at which groups are rejected."""
    gate: GateName = "depth"
    """When a group may be submitted. `depth`: if it could be trained within max_lag versions were groups trained in order.
    `slots`: while there is room for its episodes among those unfinished. `none`: whenever the buffer has room."""
    slots: float = 2.0
    """Batches' worth of episodes that may be unfinished with gate = "slots"."""
    reject: RuleName = "oldest"
    """Which groups are dropped when a batch is made: those that lag more than max_lag by their `oldest` trained token, by their
    `first` sampled token, or by the versions that passed while they were `in_flight`, without their time in the queue;
    `never`: none."""
    rejected: Literal["refill", "retry"] = "refill"
    """What is submitted in place of a rejected group: another task, or the same again, three times at most."""
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
        check(self.max_lag == "auto" or 0 <= self.max_lag < math.inf, "max_lag", self.max_lag, "≥ 0")
        check(self.max_lag_limit >= 1, "max_lag_limit", self.max_lag_limit, "≥ 1")
        check(0 < self.slots < math.inf, "slots", self.slots, "a number above 0")
        check(self.cap >= 1, "cap", self.cap, "≥ 1")
        check(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")
        check(0 <= self.limit < math.inf, "limit", self.limit, "a number ≥ 0")
        if self.limit and not correction_traits(self.correct).usual_limit:
            raise ConfigError(f"limit = {self.limit:g}: only correct = 'opsm' and 'm2po' have a limit, not '{self.correct}'")

    @property
    def is_auto(self) -> bool:
        return self.max_lag == "auto"

    @property
    def is_gated(self) -> bool:
        """Whether the gate bounds the lag of what is trained in the order of submission."""
        return GATES[self.gate].bounds_lag

    @property
    def rejects(self) -> bool:
        """Whether groups that are too old are dropped."""
        return RULES[self.reject].lag is not None

    @property
    def retries(self) -> bool:
        """Whether the task of a rejected group is submitted again."""
        return self.rejected == "retry"

    @property
    def is_bounded(self) -> bool:
        """Whether anything bounds the lag of what is trained."""
        return self.is_gated or self.rejects

    def bound(self, *, is_inline: bool) -> float:
        """`max_lag`, or the most that "auto" can come to."""
        if not isinstance(self.max_lag, str):
            return self.max_lag
        return INLINE_LAG if is_inline else self.max_lag_limit

    @property
    def bounded_by(self) -> str:
        """The setting that says how old a token may be, and its value, for an error."""
        return f"staleness.max_lag_limit = {self.max_lag_limit}" if self.is_auto else f"staleness.max_lag = {self.max_lag:g}"


def check_staleness(recipe: Recipe) -> None:
    """Refuse a `[staleness]` that would have no effect, or not the one it promises."""
    staleness, groups = recipe.staleness, recipe.train.groups_per_batch
    if staleness.is_auto and recipe.exact:
        raise ConfigError(
            "staleness.max_lag = 'auto': it follows measured times, which exact = true does not allow; set it to 1, or 0"
        )
    if staleness.slots * groups < 1:
        raise ConfigError(f"staleness.slots = {staleness.slots:g}: no group has room in that share of a batch of {groups}")
    if staleness.retries and not staleness.rejects:
        raise ConfigError(
            f"staleness.rejected = '{staleness.rejected}': nothing is rejected with reject = '{staleness.reject}'"
        )


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
