"""The per-token tensors that losses are functions of, and sums over the tokens of each rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_LOG_RATIO = 20.0
"""|log ratio| beyond this is cut off: e²⁰ is past every clip in use, and finite."""


@dataclass(frozen=True, kw_only=True)
class TokenTensors:
    """N trained tokens of whole rollouts. π are the weights being trained, μ those that drew a token."""

    logprobs: Tensor
    """[N] log π, with a gradient."""
    recorded: Tensor
    """[N] log μ, of the distribution the engine really drew from."""
    proximal: Tensor
    """[N] log π_prox, under the policy at the start of the version."""
    old: Tensor
    """[N] what ratios are taken against: `recorded`, or `proximal` where a correction weighs by π_prox/μ."""
    advantages: Tensor
    """[N] as they came with the batch."""
    sequence: Tensor
    """[N] which rollout of this pass a token belongs to, from 0."""
    num_sequences: int
    """Rollouts of this pass."""
    versions: Tensor
    """[N] the version that drew each token."""
    version: int
    """The version being trained from."""
    columns: dict[str, Tensor]
    """[N] each: whatever columns every rollout of the batch has, and those the trainer computed."""
    entropy: Tensor
    """[N] of the distribution each token could be drawn from, without a gradient."""
    values: Tensor | None = None
    """[N] what the value head expects of the state before each token, with a gradient; None where there is no such head."""

    def log_ratio(self) -> Tensor:
        """[N] log π − log π_old."""
        return self.logprobs - self.old

    def ratio(self) -> Tensor:
        """[N] π / π_old, cut off where it would overflow."""
        return ratio_of(self.log_ratio())

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[N]: for each token the sum of `values` over its rollout."""
        return sequence_sum(values, self.sequence, num_sequences=self.num_sequences)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[N]: for each token the mean of `values` over its rollout."""
        return sequence_mean(values, self.sequence, num_sequences=self.num_sequences)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """e to the log ratio, cut off where it would overflow."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def sequence_sum(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """[N]: for each token the sum of `values` [N] over its sequence. `sequence` [N] holds numbers below `num_sequences`."""
    sums = values.new_zeros(num_sequences).index_add(0, sequence, values)
    return sums.index_select(0, sequence)


def sequence_mean(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """[N]: for each token the mean of `values` [N] over its sequence."""
    counts = sequence_sum(torch.ones_like(values), sequence, num_sequences=num_sequences)
    return sequence_sum(values, sequence, num_sequences=num_sequences) / counts
