"""Estimators of the KL to a reference model, per token; d = log π − log π_ref."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algorithms.tokens import ratio_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
