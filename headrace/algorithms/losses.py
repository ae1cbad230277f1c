"""Losses: pure functions from per-token tensors to one loss per token. Add your own by naming it `module:name`.

A loss takes `TokenTensors`, and its constants as keywords. It returns each token's loss and a dict of metrics (tensors of the
same shape, averaged over tokens). The trainer applies weights, corrections, the KL and the sum:

    def my_loss(tokens, *, clip=0.2):
        ratio = tokens.ratio()
        return -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - clip, 1 + clip) * tokens.advantages), {}

The correction multiplies the first term. A third return value, such as a value loss, is not corrected. A loss that reads a
column of the rollouts declares it with `@needs("teacher")` and finds it in `tokens.columns`.

Notation: r = π/π_old, where π_old is π_prox if the correction contains π_prox/μ, else μ, which sampled the token. A is the
advantage; sg(·) stops the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from headrace.algorithms.columns import COMPUTED, PROXIMAL, REFERENCE, RETURNS, TEACHER, VALUES
from headrace.algorithms.tokens import ratio_of
from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from headrace.algorithms.tokens import TokenTensors

    LossResult: TypeAlias = tuple[Tensor, dict[str, Tensor]]
    TwoTerms: TypeAlias = tuple[Tensor, dict[str, Tensor], Tensor]
    Loss: TypeAlias = Callable[..., LossResult | TwoTerms]

AnyLoss = TypeVar("AnyLoss", bound="Callable[..., Any]")


def needs(*columns: str) -> Callable[[AnyLoss], AnyLoss]:
    """Declare the columns that a loss reads. The trainer computes `proximal`, `reference`, `teacher` and `values` (with a value
    head) if rollouts lack them. Any other column must come with the rollouts."""

    def mark(loss: AnyLoss) -> AnyLoss:
        loss.needs = columns  # type: ignore[attr-defined]  # a function carries any attribute
        return loss

    return mark


def grpo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossResult:
    """GRPO, PPO clip: −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A). DAPO's constants; PPO's are 0.2 and 0.2."""
    loss, is_clipped = clipped_surrogate(tokens.ratio(), tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"clipped": is_clipped}


def reinforce(tokens: TokenTensors) -> LossResult:
    """−A log π. RLOO with `leave_one_out` advantages, REINFORCE++ with `global` ones."""
    return -tokens.advantages * tokens.logprobs, {}


def supervised(tokens: TokenTensors) -> LossResult:
    """−log π of a demonstration; ignores advantages."""
    return -tokens.logprobs, {}


def gspo(tokens: TokenTensors, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO: −min(s A, clip(s, 1 − clip_low, 1 + clip_high) A), s = (Π r)^(1/|y|) over the rollout. Per token, s is written
    sg(s) · π/sg(π), whose gradient is also correct if a rollout's tokens differ in advantage or weight."""
    log_ratio = tokens.log_ratio().detach()
    ratio = ratio_of(tokens.sequence_mean(log_ratio) + tokens.logprobs - tokens.logprobs.detach())
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"clipped": is_clipped}


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
) -> TwoTerms:
    """PPO: −min(r A, clip(r) A) + value_weight · ½ max((V − R)², (clip(V, V_old ± value_clip) − R)²). V_old and R are the
    columns `values` and `returns`, which `train.advantage = "gae"` fills."""
    assert tokens.values is not None, "call_loss has looked"
    loss, is_clipped = clipped_surrogate(tokens.ratio(), tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    old, returns = tokens.columns[VALUES], tokens.columns[RETURNS]
    near = torch.clamp(tokens.values, old - value_clip, old + value_clip)
    free, clipped = (tokens.values - returns).square(), (near - returns).square()
    value_loss = 0.5 * torch.maximum(free, clipped)
    seen = {
        "clipped": is_clipped,
        "value_loss": value_loss.detach(),
        "value_clipped": (clipped > free).float(),
        "value": tokens.values.detach(),
    }
    return loss, seen, value_weight * value_loss


@needs(TEACHER)
def distill(tokens: TokenTensors, *, cap: float = 2.0) -> LossResult:
    """On-policy distillation: sg(min(r, cap)) ½ (log π − log π_T)², with the gradient of the reverse KL. Ignores advantages."""
    teacher = tokens.columns[TEACHER]
    weight = tokens.ratio().detach().clamp_max(cap)
    return weight * k2(tokens.logprobs, teacher), {"teacher_kl": (tokens.logprobs - teacher).detach()}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """−min(r A, clip(r) A), and 1 where the ratio was clipped."""
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, clipped), (clipped < free).detach().float()


def _decoupled(tokens: TokenTensors, proximal: Tensor, *, clip_low: float, clip_high: float, cap: float) -> LossResult:
    weight = ratio_of(proximal - tokens.recorded)
    is_dropped = weight > cap
    weight = torch.where(is_dropped, 0.0, weight)
    ratio = ratio_of(tokens.logprobs - proximal)
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return weight * loss, {"clipped": is_clipped, "proximal_weight": weight, "masked": is_dropped.float()}


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
_BUILT_IN = grpo, ppo, reinforce, gspo, cispo, topr, decoupled_ppo, a3po, dppo, m2po, aipo, distill, supervised
LOSSES: dict[str, Loss] = {loss.__name__: loss for loss in _BUILT_IN}


def needed_columns(loss: str, correction: str = "none", kl: str = "none") -> tuple[str, ...]:
    """Return the columns that a loss, a correction and a KL read, each once."""
    wanted = getattr(resolve_loss(loss), "needs", ())
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(f"train.loss = {loss!r}: its `needs` must be a tuple of column names, not {wanted!r}")
    also = [*wanted, *([PROXIMAL] if correction != "none" else []), *([REFERENCE] if kl != "none" else [])]
    return tuple(dict.fromkeys(also))


def columns_to_bring(loss: str, correction: str = "none", kl: str = "none") -> tuple[str, ...]:
    """Return the needed columns that must come with the rollouts."""
    return tuple(column for column in needed_columns(loss, correction, kl) if column not in COMPUTED)


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


def missing_column(what: str, column: str) -> ValueError:
    """The error for a needed column that neither came with the rollouts nor was computed."""
    fix = {
        REFERENCE: "the trainer computes it from train.reference",
        TEACHER: "name a model in train.teacher, or have the environment put it on every rollout",
        VALUES: "the trainer computes it with a value head",
        RETURNS: "set train.advantage = 'gae'",
    }.get(column, "the environment must put it on every rollout")
    return ValueError(f"{what} needs the column {column!r}, which the batch does not have: {fix}")
