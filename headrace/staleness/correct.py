"""Importance weights: μ drew the token (its logprob is recorded), π_prox is the policy at the start of the step.

ρ = π_prox / μ, detached. Each correction is a function of log ρ alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 20.0
"""|log ρ| beyond this is cut off: e²⁰ is past every cap in use, and finite."""


class Correction(Protocol):
    """log ρ and constants to weights."""

    def __call__(self, log_ratio: Tensor, *, cap: float, floor: float) -> Tensor: ...


def truncated(log_ratio: Tensor, *, cap: float, floor: float) -> Tensor:
    """TIS: min(ρ, cap)."""
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp().clamp_max(cap)


def masked(log_ratio: Tensor, *, cap: float, floor: float) -> Tensor:
    """MIS, IcePop: ρ where floor ≤ ρ ≤ cap, else 0."""
    ratio = log_ratio.clamp(-_LARGEST, _LARGEST).exp()
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)


CORRECTIONS: dict[str, Correction] = {"tis": truncated, "mis": masked}


def importance_weights(name: str, log_ratio: Tensor, *, cap: float = 2.0, floor: float = 0.5) -> Tensor:
    """The weights of a correction by name; `none` weighs everything 1."""
    if name == "none":
        return torch.ones_like(log_ratio)
    return CORRECTIONS[name](log_ratio.detach(), cap=cap, floor=floor)
