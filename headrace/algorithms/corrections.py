"""Importance weights ρ = π_prox / μ, detached: μ sampled the token (with the recorded logprob), π_prox is the policy at the
start of the version.

A correction is a function of log ρ; some also use the token's rollout, advantage or version. Those in `MASKS` return 0 or 1;
the others contain ρ. Those in `BATCH_WIDE` compare a token with all others and need the whole batch at once, so that the result
does not depend on packing. Several multiply, at most one of which contains ρ; the loss's ratio is then relative to π_prox, and
to μ if none does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.algorithms.tokens import RolloutTokens, ratio_of
from headrace.algorithms.traits import CORRECTIONS_WITH_TRAITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MASKS = frozenset(name for name, traits in CORRECTIONS_WITH_TRAITS.items() if traits.is_mask)
BATCH_WIDE = frozenset(name for name, traits in CORRECTIONS_WITH_TRAITS.items() if traits.needs_whole_batch)


@dataclass(frozen=True, kw_only=True)
class CorrectedTokens(RolloutTokens):
    """What a correction is computed from: the tokens' log ρ and versions, and the recipe's constants."""

    log_ratio: Tensor
    versions: Tensor
    cap: float = 2.0
    floor: float = 0.5
    limit: float = 0.04


_OVER: dict[str, Callable[[CorrectedTokens], Tensor]] = {
    "": lambda tokens: tokens.log_ratio,
    "sequence_": lambda tokens: tokens.sequence_sum(tokens.log_ratio),
    "geometric_": lambda tokens: tokens.sequence_mean(tokens.log_ratio),
}
"""What stands for ρ: the token's own, the product Π ρ over its rollout, or (Π ρ)^(1/T) over the rollout's T trained tokens."""


def _truncated(name: str, tokens: CorrectedTokens) -> Tensor:
    """TIS: min(ρ, cap)."""
    return ratio_of(_OVER[name](tokens)).clamp_max(tokens.cap)


def _masked(name: str, tokens: CorrectedTokens) -> Tensor:
    """MIS, IcePop: ρ where floor ≤ ρ ≤ cap, else 0."""
    ratio = ratio_of(_OVER[name](tokens))
    return torch.where((ratio >= tokens.floor) & (ratio <= tokens.cap), ratio, 0.0)


def opsm(tokens: CorrectedTokens) -> Tensor:
    """OPSM, DeepSeek-V3.2's off-policy sequence mask (its eq. 9): 0 for rollouts with a negative mean advantage whose mean
    log(μ/π) exceeds `limit`, else 1: bad rollouts that have become unlikely are left alone. π is the policy that the optimizer
    step finds, so that later steps of a version see how far the earlier ones moved it."""
    is_off = tokens.sequence_mean(-tokens.log_ratio) > tokens.limit
    return (~(is_off & (tokens.sequence_mean(tokens.advantages) < 0))).to(tokens.log_ratio.dtype)


def m2po(tokens: CorrectedTokens) -> Tensor:
    """M2PO: 0 for just enough tokens of the largest |log ρ| that the mean of log² ρ over the rest is at most `limit`; 1 for
    the rest. Tokens with equal |log ρ| are kept or dropped together."""
    squares = tokens.log_ratio.double().square()
    ordered = squares.sort().values
    running = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    bound = torch.where(running <= tokens.limit, torch.inf, ordered).amin() if len(ordered) else torch.inf
    return (squares < bound).to(tokens.log_ratio.dtype)


def prefix(tokens: CorrectedTokens) -> Tensor:
    """0 for tokens older than the newest version among the trained tokens of their rollout: the off-policy prefix of a rollout
    that was continued under newer weights; else 1."""
    newest = tokens.versions.new_zeros(tokens.num_sequences).scatter_reduce(0, tokens.sequence, tokens.versions, "amax")
    return (tokens.versions == newest.index_select(0, tokens.sequence)).to(tokens.log_ratio.dtype)


def trust_region(tokens: CorrectedTokens) -> Tensor:
    """0 for tokens with log² ρ above `limit`, else 1."""
    return (tokens.log_ratio.square() <= tokens.limit).to(tokens.log_ratio.dtype)


CORRECTIONS: dict[str, Callable[[CorrectedTokens], Tensor]] = {
    **{f"{over}tis": functools.partial(_truncated, over) for over in _OVER},
    **{f"{over}mis": functools.partial(_masked, over) for over in _OVER},
    "icepop": functools.partial(_masked, ""),
    **{correction.__name__: correction for correction in (opsm, m2po, prefix, trust_region)},
}


@torch.no_grad()
def importance_weights(name: str, tokens: CorrectedTokens) -> Tensor:
    """Apply a correction by name."""
    return CORRECTIONS[name](tokens)
