"""Losses: pure functions from per-token tensors to one loss per token. Add your own by naming it `module:name`.

A loss takes `TokenTensors`, and its constants as keywords. It returns each token's loss and a dict of metrics (tensors of the
same shape, averaged over tokens). The trainer applies weights, corrections, the KL and the sum:

    def my_loss(tokens, *, clip=0.2):
        ratio = tokens.ratio()
        return -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - clip, 1 + clip) * tokens.advantages), {}

The correction multiplies the first term. A third return value, such as a value loss, is not corrected. A loss that reads a
column of the rollouts declares it with `@needs("teacher")` and finds it in `tokens.columns`.

Notation: r = π/π_old, where π_old is π_prox if a correction contains π_prox/μ, else μ, which sampled the token. A is the
advantage; sg(·) stops the gradient.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from headrace.algorithms.columns import COMPUTED, PROXIMAL, REFERENCE, RETURNS, TEACHER, VALUES
from headrace.algorithms.tokens import MOST_LOG_RATIO, ratio_of
from headrace.algorithms.traits import correction_traits
from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from headrace.algorithms.tokens import TokenTensors

    LossResult: TypeAlias = tuple[Tensor, dict[str, Tensor]]
    TwoTerms: TypeAlias = tuple[Tensor, dict[str, Tensor], Tensor]
    Loss: TypeAlias = Callable[..., LossResult | TwoTerms]

AnyLoss = TypeVar("AnyLoss", bound="Callable[..., Any]")


def needs(*columns: str) -> Callable[[AnyLoss], AnyLoss]:
    """Declare the columns that a loss reads. The trainer computes `proximal`, `reference`, `teacher`, `entropy` and `values`
    (with a value head) if rollouts lack them. Any other column must come with the rollouts."""

    def mark(loss: AnyLoss) -> AnyLoss:
        loss.needs = columns  # type: ignore[attr-defined]  # a function carries any attribute
        return loss

    return mark


def grpo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 0.0) -> LossResult:
    """GRPO, PPO clip: −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A). DAPO's constants; PPO's are 0.2 and 0.2.
    `dual_clip` c (Ye et al. 2020, eq. 3; 0 for none): −max(min(r A, clip(r) A), c A) where A < 0."""
    return clipped_surrogate(tokens.ratio(), tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def reinforce(tokens: TokenTensors) -> LossResult:
    """−A log π. RLOO with `leave_one_out` advantages, REINFORCE++ with `global` ones."""
    return -tokens.advantages * tokens.logprobs, {}


def supervised(tokens: TokenTensors) -> LossResult:
    """−log π of a demonstration; ignores advantages."""
    return -tokens.logprobs, {}


def gspo(tokens: TokenTensors, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO: −min(s A, clip(s, 1 − clip_low, 1 + clip_high) A), s = (Π r)^(1/|y|) over the rollout. Per token, s is written
    sg(s) · π/sg(π), whose gradient is also correct if a rollout's tokens differ in advantage or weight."""
    return clipped_surrogate(_sequence_ratio(tokens, tokens.log_ratio()), tokens, clip_low=clip_low, clip_high=clip_high)


def luspo(tokens: TokenTensors, *, clip_low: float = 2e-3, clip_high: float = 2.5e-3) -> LossResult:
    """LUSPO: GSPO's loss times the rollout's length |y|, which is what `loss_mean = "sum"` makes of it, so that long rollouts
    are not counted less."""
    return gspo(tokens, clip_low=clip_low, clip_high=clip_high)


def gmpo(tokens: TokenTensors, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossResult:
    """GMPO: −A (Π r̂)^(1/|y|) over the rollout, each r clipped by itself in log space: log r̂ = min(log r, clip_high) for
    A > 0, max(log r, −clip_low) for A ≤ 0."""
    log_ratio = tokens.log_ratio()
    clipped = torch.where(tokens.advantages > 0, log_ratio.clamp_max(clip_high), log_ratio.clamp_min(-clip_low))
    return -tokens.advantages * _sequence_ratio(tokens, clipped), {"clipped": (clipped != log_ratio).float()}


def sapo(tokens: TokenTensors, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossResult:
    """SAPO: −(4/τ) σ(τ (r − 1)) A, a soft gate instead of a clip; τ is tau_positive for A > 0, else tau_negative."""
    tau = torch.full_like(tokens.advantages, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    return -torch.sigmoid(tau * (tokens.ratio() - 1)) * 4 / tau * tokens.advantages, {}


def vespo(
    tokens: TokenTensors,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> LossResult:
    """VESPO: −sg(φ(w)) A log π, w = Π r over the rollout, φ(w) = w^k exp(λ (1 − w)), which is 1 at w = 1; k and λ are those
    of the advantage's sign (0 counts as positive)."""
    log_weight = tokens.sequence_sum(tokens.log_ratio().detach()).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    is_negative = tokens.advantages < 0
    power, decay = torch.where(is_negative, k_negative, k_positive), torch.where(is_negative, lambda_negative, lambda_positive)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -weight * tokens.advantages * tokens.logprobs, {"sequence_weight": weight}


def kimi(tokens: TokenTensors, *, tau: float = 0.01) -> TwoTerms:
    """Kimi k1.5 (its eq. 3): ½ (A − τ S)² ÷ τ over the rollout, S = Σ log r, without the constant A²/2τ: −A S + τ/2 S². The
    mean reward stands for the partition function τ log Z, so A is `group` with `scale_rewards = "none"`. A token's share is
    −A log r + τ/2 S log r, with the gradient −A + τ S."""
    log_ratio = tokens.log_ratio()
    pull = tau * tokens.sequence_sum(log_ratio.detach()) * log_ratio
    return -tokens.advantages * log_ratio, {}, pull - 0.5 * pull.detach()


def cispo(tokens: TokenTensors, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossResult:
    """CISPO: −sg(clip(r, 1 − clip_low, 1 + clip_high)) A log π: every token keeps a gradient. clip_low = 1: no lower clip."""
    ratio = tokens.ratio().detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * tokens.advantages * tokens.logprobs, {"clipped": (clipped != ratio).float()}


def topr(tokens: TokenTensors) -> LossResult:
    """TOPR: −w A log π, w = 1 if A ≥ 0, else sg(min(Π r, 1)) over the rollout: bad rollouts now unlikely count little."""
    ratio, is_negative = ratio_of(tokens.sequence_sum(tokens.log_ratio().detach())), tokens.advantages < 0
    weight = torch.where(is_negative, ratio.clamp_max(1.0), 1.0)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": (is_negative & (ratio > 1)).float()}


@needs("proximal")
def decoupled_ppo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 5.0) -> LossResult:
    """Decoupled PPO: −sg(ρ) min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), ρ = π_prox/μ, r = π/π_prox; 0 if ρ > cap."""
    return _decoupled(tokens, tokens.proximal, clip_low=clip_low, clip_high=clip_high, cap=cap)


def a3po(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 5.0) -> LossResult:
    """A-3PO: decoupled PPO with log π_prox = log μ + a (log π − log μ), a = (v_prox − v_μ)/(v − v_μ): no extra forward pass.
    v_prox is the version being trained and v = v_prox + 1 the next, so a = lag/(lag + 1)."""
    lag = (tokens.version - tokens.versions).clamp_min(0).to(tokens.recorded.dtype)
    proximal = tokens.recorded + lag / (lag + 1) * (tokens.logprobs.detach() - tokens.recorded)
    return _decoupled(tokens, proximal, clip_low=clip_low, clip_high=clip_high, cap=cap)


def dppo(tokens: TokenTensors, *, mask: float = 0.2, cap: float = 10.0, tau: float = 1e-3) -> TwoTerms:
    """DPPO: −min(r, cap) A + τ log² r; the first term is dropped if the token's probability has already moved by more than
    `mask` in A's direction: π − π_old > mask for A > 0, < −mask for A ≤ 0."""
    moved = tokens.logprobs.detach().exp() - tokens.old.exp()
    is_past = torch.where(tokens.advantages > 0, moved > mask, moved < -mask)
    gain = torch.where(is_past, 0.0, tokens.ratio().clamp_max(cap) * tokens.advantages)
    return -gain, {"masked": is_past.float()}, tau * tokens.log_ratio().square()


def m2po(tokens: TokenTensors) -> LossResult:
    """M2PO: −r A without clipping: its correction, of the same name, drops the tokens whose ratio is farthest from 1."""
    return -tokens.ratio() * tokens.advantages, {}


def aipo(tokens: TokenTensors, *, cap: float = 4.0) -> LossResult:
    """AIPO: −sg(min(r, cap)) A log π; caps of 2 to 10 are in use."""
    ratio = tokens.ratio().detach()
    return -ratio.clamp_max(cap) * tokens.advantages * tokens.logprobs, {"clipped": (ratio > cap).float()}


@needs(VALUES, RETURNS)
def ppo(
    tokens: TokenTensors,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    value_weight: float = 0.5,
    dual_clip: float = 0.0,
) -> TwoTerms:
    """PPO: −min(r A, clip(r) A) + value_weight · ½ max((V − R)², (clip(V, V_old ± value_clip) − R)²). V_old and R are the
    columns `values` and `returns`, which `train.advantage = "gae"` fills. `dual_clip` as in `grpo`."""
    assert tokens.values is not None, "call_loss has looked"
    loss, seen = grpo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    old, returns = tokens.columns[VALUES], tokens.columns[RETURNS]
    near = torch.clamp(tokens.values, old - value_clip, old + value_clip)
    free, clipped = (tokens.values - returns).square(), (near - returns).square()
    value_loss = 0.5 * torch.maximum(free, clipped)
    seen |= {"value_loss": value_loss.detach(), "value_clipped": (clipped > free).float(), "value": tokens.values.detach()}
    return loss, seen, value_weight * value_loss


@needs(TEACHER)
def distill(tokens: TokenTensors, *, cap: float = 2.0) -> LossResult:
    """On-policy distillation: sg(min(r, cap)) ½ (log π − log π_T)², with the gradient of the reverse KL. Ignores advantages."""
    teacher = tokens.columns[TEACHER]
    weight = tokens.ratio().detach().clamp_max(cap)
    return weight * k2(tokens.logprobs, teacher), {"teacher_kl": (tokens.logprobs - teacher).detach()}


def clipped_surrogate(
    ratio: Tensor, tokens: TokenTensors, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> LossResult:
    """−min(r A, clip(r) A), for A < 0 at most −`dual_clip` A; `clipped` is 1 where the ratio was."""
    advantages = tokens.advantages
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain = torch.minimum(free, clipped)
    if dual_clip:
        gain = torch.maximum(gain, torch.where(advantages < 0, dual_clip * advantages, -torch.inf))
    return -gain, {"clipped": (gain != free).detach().float()}


def _sequence_ratio(tokens: TokenTensors, log_ratio: Tensor) -> Tensor:
    """[N] (Π r)^(1/|y|) over the rollout, written sg(s) · r/sg(r), so that each token has the gradient of its own r."""
    return ratio_of(tokens.sequence_mean(log_ratio.detach()) + log_ratio - log_ratio.detach())


def _decoupled(tokens: TokenTensors, proximal: Tensor, *, clip_low: float, clip_high: float, cap: float) -> LossResult:
    weight = ratio_of(proximal - tokens.recorded)
    is_dropped = weight > cap
    weight = torch.where(is_dropped, 0.0, weight)
    loss, seen = clipped_surrogate(ratio_of(tokens.logprobs - proximal), tokens, clip_low=clip_low, clip_high=clip_high)
    return weight * loss, {**seen, "proximal_weight": weight, "masked": is_dropped.float()}


# Estimators of the KL to a reference model, per token; d = log π − log π_ref


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """d, unbiased. The gradient is `k2`'s, because d's own gradient is 0 on average, whatever π_ref is."""
    squared = k2(logprobs, other)
    return (logprobs - other).detach() + squared - squared.detach()


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """d²/2, whose gradient d ∇log π is that of KL(π ‖ π_ref) on tokens sampled by π."""
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(−d) − 1 + d: unbiased, never negative; used by GRPO."""
    return ratio_of(other - logprobs) - 1 + (logprobs - other)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
_BUILT_IN = (
    *(grpo, ppo, reinforce, gspo, luspo, gmpo, cispo, sapo, vespo, kimi),
    *(topr, decoupled_ppo, a3po, dppo, m2po, aipo, distill, supervised),
)
LOSSES: dict[str, Loss] = {loss.__name__: loss for loss in _BUILT_IN}


def needed_columns(loss: str, corrections: Iterable[str] = (), kl: str = "none") -> tuple[str, ...]:
    """Return the columns that a loss, corrections and a KL read, each once."""
    wanted = getattr(resolve_loss(loss), "needs", ())
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(f"train.loss = {loss!r}: its `needs` must be a tuple of column names, not {wanted!r}")
    has_proximal = any(correction_traits(name).needs_proximal for name in corrections)
    also = [*wanted, *([PROXIMAL] if has_proximal else []), *([REFERENCE] if kl != "none" else [])]
    return tuple(dict.fromkeys(also))


def columns_to_bring(loss: str) -> tuple[str, ...]:
    """Return the needed columns that must come with the rollouts."""
    return tuple(column for column in needed_columns(loss) if column not in COMPUTED)


def call_loss(
    name: str, tokens: TokenTensors, constants: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Call a loss by name and check columns and shapes: a mean would silently be weighted twice. The third result is
    uncorrected."""
    wanted = needed_columns(name)
    for column in wanted:
        if column != PROXIMAL and column not in tokens.columns:
            raise missing_column(f"loss {name!r}", column)
    if VALUES in wanted and tokens.values is None:
        raise ValueError(f"loss {name!r} trains values, and this trainer has no value head")
    result = resolve_loss(name)(tokens, **constants)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(f"loss {name!r} must return (losses, metrics) or (losses, metrics, uncorrected)")
    losses, seen, uncorrected = result if len(result) == 3 else (*result, None)
    for term in (losses, uncorrected):
        if term is not None and term.shape != tokens.logprobs.shape:
            raise ConfigError(
                f"loss {name!r} returned losses of shape {tuple(term.shape)}; one per token is wanted, "
                f"{tuple(tokens.logprobs.shape)}: summing and averaging are the trainer's work"
            )
    return losses, seen, uncorrected


def resolve_loss(name: str) -> Loss:
    """Find a built-in loss by name, or a user's by `module:name`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" in name:
        loss: Loss = import_name(name, setting="train.loss")
        return loss
    raise ConfigError(f"train.loss = {name!r}: must be one of {', '.join(LOSSES)}, or your own as module:name")


def check_loss(name: str, constants: Mapping[str, float]) -> None:
    """Raise unless the loss exists and takes these constants."""
    parameters = inspect.signature(resolve_loss(name)).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    takes = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
    for constant in constants:
        if constant not in takes:
            known = ", ".join(takes) or "none"
            raise ConfigError(f"train.constants.{constant}: the loss {name!r} takes no {constant!r}; it takes: {known}")


def missing_column(what: str, column: str) -> ValueError:
    """The error for a needed column that neither came with the rollouts nor was computed."""
    fix = {
        REFERENCE: "the trainer computes it from train.reference",
        TEACHER: "name a model in train.teacher, or have the environment put it on every rollout",
        VALUES: "the trainer computes it with a value head",
        RETURNS: "set train.advantage = 'gae'",
    }.get(column, "the environment must put it on every rollout")
    return ValueError(f"{what} needs the column {column!r}, which the batch does not have: {fix}")
