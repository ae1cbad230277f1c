"""Sums and means over the tokens of each sequence, given back to every one of its tokens. Losses and corrections that judge
whole rollouts share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sequence_sum(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """[N]: for each token the sum of `values` [N] over its sequence. `sequence` [N] holds numbers below `num_sequences`."""
    sums = values.new_zeros(num_sequences).index_add(0, sequence, values)
    return sums.index_select(0, sequence)


def sequence_mean(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """[N]: for each token the mean of `values` [N] over its sequence."""
    counts = sequence_sum(torch.ones_like(values), sequence, num_sequences=num_sequences)
    return sequence_sum(values, sequence, num_sequences=num_sequences) / counts
