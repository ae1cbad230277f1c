"""Losses that raise the probability of what did well. r = π/π_old, ρ = π/μ; where no correction weighs by π_prox/μ, π_old
is μ and r is ρ. A is the advantage, sg(·) carries no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.algorithms.losses.declare import needs
from headrace.algorithms.losses.tokens import ratio_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.algorithms.losses.declare import LossResult, TwoTerms
    from headrace.algorithms.losses.tokens import TokenTensors


def grpo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossResult:
    """GRPO, PPO clip: −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A). DAPO's constants; PPO's are 0.2 and 0.2."""
    loss, is_clipped = clipped_surrogate(tokens.ratio(), tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"clipped": is_clipped}


def reinforce(tokens: TokenTensors) -> LossResult:
    """−A log π. RLOO with `leave_one_out` advantages, REINFORCE++ with `global` ones."""
    return -tokens.advantages * tokens.logprobs, {}


def supervised(tokens: TokenTensors) -> LossResult:
    """−log π of a demonstration; advantages are not looked at."""
    return -tokens.logprobs, {}


def gspo(tokens: TokenTensors, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """GSPO: −min(s A, clip(s, 1 − clip_low, 1 + clip_high) A), s = (Π r)^(1/|y|) over the rollout.

    s is written sg(s) · π/sg(π) for each token: the same gradient where advantage and weight are those of the whole rollout,
    and the right one where they are not.
    """
    log_ratio = tokens.log_ratio().detach()
    ratio = ratio_of(tokens.sequence_mean(log_ratio) + tokens.logprobs - tokens.logprobs.detach())
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"clipped": is_clipped}


def cispo(tokens: TokenTensors, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossResult:
    """CISPO: −sg(clip(r, 1 − clip_low, 1 + clip_high)) A log π: every token keeps a gradient. 1 is no lower clip."""
    ratio = tokens.ratio().detach()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * tokens.advantages * tokens.logprobs, {"clipped": (clipped != ratio).float()}


def topr(tokens: TokenTensors) -> LossResult:
    """TOPR: −w A log π, w = 1 where A ≥ 0, else sg(clip(Π r, 0, 1)), the product over the rollout: what did badly and is
    unlikely by now is left alone."""
    ratio, is_negative = ratio_of(tokens.sequence_sum(tokens.log_ratio().detach())), tokens.advantages < 0
    weight = torch.where(is_negative, ratio.clamp_max(1.0), 1.0)
    return -weight * tokens.advantages * tokens.logprobs, {"clipped": (is_negative & (ratio > 1)).float()}


@needs("proximal")
def decoupled_ppo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 5.0) -> LossResult:
    """Decoupled PPO: −sg(ρ) min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), ρ = π_prox/μ, r = π/π_prox. Tokens with ρ > cap
    are dropped, not clamped."""
    return _decoupled(tokens, tokens.proximal, clip_low=clip_low, clip_high=clip_high, cap=cap)


def a3po(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 5.0) -> LossResult:
    """A-3PO: decoupled PPO with log π_prox = log μ + a (log π − log μ), a = (v_prox − v_μ)/(v − v_μ).

    v_prox is the version being trained from, v = v_prox + 1 the one being made: a = lag/(lag + 1), and no extra forward pass.
    """
    lag = (tokens.version - tokens.versions).clamp_min(0).to(tokens.recorded.dtype)
    proximal = tokens.recorded + lag / (lag + 1) * (tokens.logprobs.detach() - tokens.recorded)
    return _decoupled(tokens, proximal, clip_low=clip_low, clip_high=clip_high, cap=cap)


def dppo(tokens: TokenTensors, *, mask: float = 0.2, cap: float = 10.0, tau: float = 1e-3) -> TwoTerms:
    """DPPO: −min(r, cap) A + τ log² r; the first term is dropped where the token's probability has already moved by more than
    `mask` the way A pushes it: π − π_old > mask for A > 0, < −mask for A ≤ 0."""
    moved = tokens.logprobs.detach().exp() - tokens.old.exp()
    is_past = torch.where(tokens.advantages > 0, moved > mask, moved < -mask)
    gain = torch.where(is_past, 0.0, tokens.ratio().clamp_max(cap) * tokens.advantages)
    return -gain, {"masked": is_past.float()}, tau * tokens.log_ratio().square()


def m2po(tokens: TokenTensors) -> LossResult:
    """M2PO: −r A, nothing clipped: the correction of the same name, which comes with it, has left out the tokens whose ratio
    is farthest from 1."""
    return -tokens.ratio() * tokens.advantages, {}


def aipo(tokens: TokenTensors, *, cap: float = 4.0) -> LossResult:
    """AIPO: −sg(min(r, cap)) A log π; caps of 2 to 10 are in use."""
    ratio = tokens.ratio().detach()
    return -ratio.clamp_max(cap) * tokens.advantages * tokens.logprobs, {"clipped": (ratio > cap).float()}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """−min(r A, clip(r) A), and 1 where the clip took hold."""
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, clipped), (clipped < free).detach().float()


def _decoupled(tokens: TokenTensors, proximal: Tensor, *, clip_low: float, clip_high: float, cap: float) -> LossResult:
    weight = ratio_of(proximal - tokens.recorded)
    is_dropped = weight > cap
    weight = torch.where(is_dropped, 0.0, weight)
    ratio = ratio_of(tokens.logprobs - proximal)
    loss, is_clipped = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return weight * loss, {"clipped": is_clipped, "proximal_weight": weight, "masked": is_dropped.float()}
