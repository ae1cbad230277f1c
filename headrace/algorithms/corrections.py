"""Importance weights ρ = π_prox / μ, detached: μ sampled the token (with the recorded logprob), π_prox is the policy at the
start of the step.

A correction is a function of log ρ; some also use the token's rollout and advantage. Those in `MASKS` return 0 or 1, and the
loss's ratio is relative to μ. The others contain ρ, and the ratio is relative to π_prox. Those in `BATCH_WIDE` compare a token
with all others and need the whole batch at once, so that the result does not depend on packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from headrace.algorithms.tokens import ratio_of, sequence_mean, sequence_sum
from headrace.algorithms.traits import CORRECTIONS_WITH_TRAITS

if TYPE_CHECKING:
    from torch import Tensor

MASKS = frozenset(name for name, traits in CORRECTIONS_WITH_TRAITS.items() if traits.is_mask)
BATCH_WIDE = frozenset(name for name, traits in CORRECTIONS_WITH_TRAITS.items() if traits.needs_whole_batch)


@dataclass(frozen=True)
class _Tokens:
    """[N] each, of whole rollouts."""

    log_ratio: Tensor
    sequence: Tensor
    num_sequences: int
    advantages: Tensor

    def sum(self, values: Tensor) -> Tensor:
        return sequence_sum(values, self.sequence, num_sequences=self.num_sequences)

    def mean(self, values: Tensor) -> Tensor:
        return sequence_mean(values, self.sequence, num_sequences=self.num_sequences)


class Correction(Protocol):
    def __call__(self, tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor: ...


def truncated(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """TIS: min(ρ, cap)."""
    return ratio_of(tokens.log_ratio).clamp_max(cap)


def masked(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """MIS, IcePop: ρ where floor ≤ ρ ≤ cap, else 0."""
    return _inside(ratio_of(tokens.log_ratio), cap=cap, floor=floor)


def sequence_truncated(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """Sequence TIS: min(Π ρ, cap), the product over the rollout."""
    return ratio_of(tokens.sum(tokens.log_ratio)).clamp_max(cap)


def sequence_masked(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """Sequence MIS: Π ρ over the rollout where floor ≤ Π ρ ≤ cap, else 0."""
    return _inside(ratio_of(tokens.sum(tokens.log_ratio)), cap=cap, floor=floor)


def geometric_truncated(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """Geometric TIS: min((Π ρ)^(1/T), cap) over the rollout's T trained tokens."""
    return ratio_of(tokens.mean(tokens.log_ratio)).clamp_max(cap)


def geometric_masked(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """Geometric MIS: (Π ρ)^(1/T) where it lies between floor and cap, else 0."""
    return _inside(ratio_of(tokens.mean(tokens.log_ratio)), cap=cap, floor=floor)


def off_policy_sequences(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """OPSM: 0 for rollouts with a negative mean advantage whose mean log(μ/π_prox) exceeds `limit`, else 1: bad rollouts that
    have become unlikely are left alone."""
    is_off = tokens.mean(-tokens.log_ratio) > limit
    return (~(is_off & (tokens.mean(tokens.advantages) < 0))).to(tokens.log_ratio.dtype)


def second_moment(tokens: _Tokens, *, cap: float, floor: float, limit: float) -> Tensor:
    """M2PO: 0 for just enough tokens of the largest |log ρ| that the mean of log² ρ over the rest is at most `limit`; 1 for
    the rest. Tokens with equal |log ρ| are kept or dropped together."""
    squares = tokens.log_ratio.double().square()
    ordered = squares.sort().values
    running = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    is_kept = running <= limit
    bound = torch.where(is_kept, torch.inf, ordered).amin() if len(ordered) else torch.inf
    return (squares < bound).to(tokens.log_ratio.dtype)


CORRECTIONS: dict[str, Correction] = {
    "tis": truncated,
    "mis": masked,
    "sequence_tis": sequence_truncated,
    "sequence_mis": sequence_masked,
    "geometric_tis": geometric_truncated,
    "geometric_mis": geometric_masked,
    "opsm": off_policy_sequences,
    "m2po": second_moment,
}


def importance_weights(
    name: str,
    log_ratio: Tensor,
    *,
    sequence: Tensor,
    num_sequences: int,
    advantages: Tensor,
    cap: float = 2.0,
    floor: float = 0.5,
    limit: float = 0.04,
) -> Tensor:
    """Apply a correction by name; `none` gives 1. `sequence` [N] is the index of each token's rollout."""
    if name == "none":
        return torch.ones_like(log_ratio)
    tokens = _Tokens(log_ratio.detach(), sequence, num_sequences, advantages)
    return CORRECTIONS[name](tokens, cap=cap, floor=floor, limit=limit)


def _inside(ratio: Tensor, *, cap: float, floor: float) -> Tensor:
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
