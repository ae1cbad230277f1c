"""The per-token tensors that losses take, and sums over the tokens of each rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_LOG_RATIO = 20.0  # |log ratio| is clamped to this: e²⁰ is finite, and beyond every clip in use


@dataclass(frozen=True, kw_only=True)
class RolloutTokens:
    """N tokens of whole rollouts; all tensors are [N]."""

    sequence: Tensor
    """Index of the token's rollout in this pass, below `num_sequences`."""
    num_sequences: int
    advantages: Tensor

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N]: for each token the sum of `values` over its rollout."""
        sums = values.new_zeros(self.num_sequences).index_add(0, self.sequence, values)
        return sums.index_select(0, self.sequence)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N]: for each token the mean of `values` over its rollout."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values))


@dataclass(frozen=True, kw_only=True)
class TokenTensors(RolloutTokens):
    """N trained tokens of whole rollouts; all tensors are [N]. π is the policy being trained, μ the one that sampled."""

    logprobs: Tensor
    """log π, with a gradient."""
    recorded: Tensor
    """log μ, under the distribution the engine really sampled from."""
    proximal: Tensor
    """log π_prox, under the policy at the start of the version."""
    old: Tensor
    """Denominator of ratios: `proximal` if a correction contains π_prox/μ, else `recorded`."""
    versions: Tensor
    """The version that sampled each token."""
    version: int
    """The version being trained."""
    columns: dict[str, Tensor]
    """Columns that every rollout of the batch has, and those that the trainer computed."""
    entropy: Tensor
    """Of each token's distribution, with a gradient: `.detach()` it where it only weighs."""
    values: Tensor | None = None
    """The value head's estimate before each token, with a gradient; None without a value head."""

    def log_ratio(self) -> Tensor:
        """[N] log π − log π_old."""
        return self.logprobs - self.old

    def ratio(self) -> Tensor:
        """[N] π / π_old, clamped to finite values."""
        return ratio_of(self.log_ratio())


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped to finite values."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
