"""Importance weights: μ drew the token (its logprob is recorded), π_prox is the policy at the start of the step.

ρ = π_prox / μ, detached. Each correction is a function of log ρ, and some of which rollout a token belongs to and of its
advantage. Those in `MASKS` give 0 or 1, and the loss's ratio stays against μ; the others hold ρ, and it is taken against
π_prox. Those in `BATCH_WIDE` judge a token by all others of the batch, and must be given all of them at once: what comes
out must not depend on how rollouts are packed into passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from headrace.algorithms.sequences import sequence_mean, sequence_sum

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 20.0
"""|log ρ| beyond this is cut off: e²⁰ is past every cap in use, and finite."""
MASKS = frozenset({"opsm", "m2po"})
"""Corrections that only leave out."""
BATCH_WIDE = frozenset({"m2po"})
"""Corrections that need every token of the batch at once."""


@dataclass(frozen=True)
class _Drawn:
    """N tokens of whole rollouts."""

    log_ratio: Tensor
    sequence: Tensor
    num_sequences: int
    advantages: Tensor

    def sum(self, values: Tensor) -> Tensor:
        return sequence_sum(values, self.sequence, num_sequences=self.num_sequences)

    def mean(self, values: Tensor) -> Tensor:
        return sequence_mean(values, self.sequence, num_sequences=self.num_sequences)


class Correction(Protocol):
    """Tokens and constants to weights."""

    def __call__(self, drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor: ...


def truncated(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """TIS: min(ρ, cap)."""
    return _ratio(drawn.log_ratio).clamp_max(cap)


def masked(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """MIS, IcePop: ρ where floor ≤ ρ ≤ cap, else 0."""
    return _inside(_ratio(drawn.log_ratio), cap=cap, floor=floor)


def sequence_truncated(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """Sequence TIS: min(Π ρ, cap), the product over the rollout."""
    return _ratio(drawn.sum(drawn.log_ratio)).clamp_max(cap)


def sequence_masked(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """Sequence MIS: Π ρ over the rollout where floor ≤ Π ρ ≤ cap, else 0."""
    return _inside(_ratio(drawn.sum(drawn.log_ratio)), cap=cap, floor=floor)


def geometric_truncated(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """Geometric TIS: min((Π ρ)^(1/T), cap) over the rollout's T trained tokens."""
    return _ratio(drawn.mean(drawn.log_ratio)).clamp_max(cap)


def geometric_masked(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """Geometric MIS: (Π ρ)^(1/T) where it lies between floor and cap, else 0."""
    return _inside(_ratio(drawn.mean(drawn.log_ratio)), cap=cap, floor=floor)


def off_policy_sequences(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """OPSM: 0 for rollouts of negative advantage (its mean over the rollout) whose mean log(μ/π_prox) exceeds `limit`, else 1:
    what did badly and has become unlikely by now is left alone."""
    is_off = drawn.mean(-drawn.log_ratio) > limit
    return (~(is_off & (drawn.mean(drawn.advantages) < 0))).to(drawn.log_ratio.dtype)


def second_moment(drawn: _Drawn, *, cap: float, floor: float, limit: float) -> Tensor:
    """M2PO: 0 for the tokens of largest |log ρ|, as many as it takes for the mean of log² ρ over the rest to be at most
    `limit`; 1 for the rest. Tokens that are equally far off are kept or left out together."""
    squares = drawn.log_ratio.double().square()
    ordered = squares.sort().values
    running = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    is_kept = running <= limit
    bound = torch.where(is_kept, torch.inf, ordered).amin() if len(ordered) else torch.inf
    return (squares < bound).to(drawn.log_ratio.dtype)


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
    """The weights of a correction by name; `none` weighs everything 1. `sequence` says which rollout each token is of."""
    if name == "none":
        return torch.ones_like(log_ratio)
    drawn = _Drawn(log_ratio.detach(), sequence, num_sequences, advantages)
    return CORRECTIONS[name](drawn, cap=cap, floor=floor, limit=limit)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def _inside(ratio: Tensor, *, cap: float, floor: float) -> Tensor:
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
