"""The recipe's `[staleness]`, and the correction it means. What each correction computes: `headrace.algorithms`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.algorithms import correction_traits, loss_traits
from headrace.buffer import buffer_policy, is_ordered
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
    `slots`: while there is room for its episodes among those unfinished. `none`: while fewer episodes are
    unfinished than twice the engines' slots, or than a batch has."""
    slots: float = 2.0
    """Batches' worth of episodes that may be unfinished with gate = "slots"."""
    reject: RuleName = "oldest"
    """Which groups are dropped when a batch is made: those that lag more than max_lag by their `oldest` trained token, by their
    `first` sampled token, or by the versions that passed while they were `in_flight`, without their time in the queue;
    `never`: none."""
    rejected: Literal["refill", "retry", "wait"] = "refill"
    """What is submitted in place of a rejected group: another task, or the same again, up to three times in all. `wait`: no
    group becomes too old: the trainer waits for those in flight that would, if it took its next batch without them."""
    correct: tuple[
        Literal[
            "none",
            "tis",
            "mis",
            "icepop",
            "sequence_tis",
            "sequence_mis",
            "geometric_tis",
            "geometric_mis",
            "opsm",
            "m2po",
            "prefix",
            "trust_region",
        ],
        ...,
    ] = ("none",)
    """One correction, or a list of several, whose weights multiply. `none`: the loss's ratio is taken against the logprobs the
    engine recorded. `tis`, `mis`: it is taken against the policy at the start of the step, and each token is weighted by the
    truncated or masked importance weight; `sequence_` takes the product over the rollout, `geometric_` its mean; `icepop` is
    another name of mis. `opsm`, `m2po`, `trust_region`: as none, but rollouts or tokens too far off are left out. `prefix`:
    as none, without the tokens that are older than the newest of their rollout."""
    cap: float = 2.0
    """Largest importance weight (tis), or the largest kept (mis)."""
    floor: float = 0.5
    """Smallest importance weight kept (mis)."""
    limit: float = 0.0
    """How far off is too far. `m2po`: the mean of the squared log ratio that the kept tokens have at most; 0 takes 0.04.
    `trust_region`: the largest squared log ratio; 0 takes 0.04. `opsm`: the mean log ratio by which a rollout of negative
    advantage has become less likely; 0 takes 1e-4. Refused if several of these are combined: each then has its default."""

    def __post_init__(self) -> None:
        check(self.max_lag == "auto" or 0 <= self.max_lag < math.inf, "max_lag", self.max_lag, "≥ 0")
        check(self.max_lag_limit >= 1, "max_lag_limit", self.max_lag_limit, "≥ 1")
        check(0 < self.slots < math.inf, "slots", self.slots, "a number above 0")
        check(self.cap >= 1, "cap", self.cap, "≥ 1")
        check(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")
        check(0 <= self.limit < math.inf, "limit", self.limit, "a number ≥ 0")
        self._check_combination()

    def _check_combination(self) -> None:
        given = f"correct = {_shown(self.correct)}"
        if not self.correct or (len(self.correct) > 1 and "none" in self.correct):
            raise ConfigError(f"{given}: name one correction or several, or 'none' alone")
        if len(set(self.correct)) < len(self.correct):
            raise ConfigError(f"{given}: each correction is applied once; name it once")
        weighting = [name for name in self.corrections if not correction_traits(name).is_mask]
        if len(weighting) > 1:
            raise ConfigError(f"{given}: {' and '.join(weighting)} would each apply the importance weight; keep one of them")
        limited = [name for name in self.corrections if correction_traits(name).usual_limit]
        if self.limit and len(limited) != 1:
            only = f"only correct = 'opsm', 'm2po' and 'trust_region' have a limit, not {_shown(self.correct)}"
            each = f"{' and '.join(limited)} each have their own; set it to 0"
            raise ConfigError(f"limit = {self.limit:g}: {each if limited else only}")

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections that `correct` names."""
        return tuple(name for name in self.correct if name != "none")

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
        return RULES[self.reject] is not None

    @property
    def retries(self) -> bool:
        """Whether the task of a rejected group is submitted again."""
        return self.rejected == "retry"

    @property
    def waits(self) -> bool:
        """Whether the trainer waits for groups in flight before they are too old."""
        return self.rejected == "wait"

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
    given = f"staleness.rejected = '{staleness.rejected}'"
    if staleness.retries and recipe.buffer.is_by_episode:
        raise ConfigError(f"{given}: a task is submitted as a group; set buffer.unit = 'group', or rejected = 'refill'")
    if staleness.rejected != "refill" and not staleness.rejects:
        raise ConfigError(f"{given}: nothing is rejected with reject = '{staleness.reject}'")
    if staleness.waits:
        _check_waiting(recipe, given)


def _check_waiting(recipe: Recipe, given: str) -> None:
    """Refuse `rejected = "wait"` where it would change nothing, or where waiting would not be enough."""
    gate, extra = recipe.staleness.gate, recipe.partial.oversample
    too_many = "more groups run ahead than can be trained within max_lag, however long the trainer waits"
    if not recipe.staleness.is_gated:
        raise ConfigError(f"{given}: with gate = '{gate}' {too_many}; set it to 'depth'")
    if extra > 1:
        raise ConfigError(f"{given}: with partial.oversample = {extra:g} {too_many}; set it to 1")
    if recipe.buffer.is_by_episode:
        raise ConfigError(
            f"{given}: with buffer.unit = '{recipe.buffer.unit}' lost episodes are replaced by whole groups, so that "
            f"{too_many}; set it to 'group'"
        )
    if is_ordered(recipe):
        order = "exact = true" if recipe.exact else f"buffer.order = '{recipe.buffer.order}'"
        raise ConfigError(f"{given}: with {order} the trainer waits for other groups; set it to 'refill'")
    if buffer_policy(recipe).overwrites:
        raise ConfigError(f"{given}: buffer.kind = '{recipe.buffer.kind}' drops what the trainer would wait for; set another")
    if recipe.partial.cancels:
        raise ConfigError(f"{given}: no group grows too old to be cancelled; set partial.cancel = 'never'")


def corrections_of(recipe: Recipe) -> dict[str, dict[str, float]]:
    """The corrections of `staleness.correct` and the loss's own, each once, with their constants."""
    staleness, own = recipe.staleness, loss_traits(recipe.train.loss).correction
    names = dict.fromkeys([*([] if own == "none" else [own]), *staleness.corrections])
    return {name: _constants(name, staleness) for name in names}


def _constants(name: str, staleness: StalenessSettings) -> dict[str, float]:
    """The constants of one correction, with `staleness.limit = 0` resolved."""
    traits = correction_traits(name)
    if not traits.is_mask:
        return {"cap": staleness.cap, "floor": staleness.floor}
    if not traits.usual_limit:
        return {}
    return {"limit": (staleness.limit if name in staleness.correct else 0.0) or traits.usual_limit}


def check_correction(recipe: Recipe) -> None:
    """Refuse a correction that would apply the loss's own importance weight twice."""
    loss = recipe.train.loss
    for name in recipe.staleness.corrections:
        if loss_traits(loss).has_importance_weight and not correction_traits(name).is_mask:
            raise ConfigError(
                f"staleness.correct = {_shown(recipe.staleness.correct)}: train.loss = '{loss}' has the importance weight in "
                f"it, which {name} would apply again; leave {name} out"
            )


def _shown(names: tuple[str, ...]) -> str:
    """As it is written in a recipe: one name, or a list."""
    return repr(names[0]) if len(names) == 1 else repr(list(names))
