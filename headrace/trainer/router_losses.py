"""Losses that keep a mixture of experts healthy: one balances how often each expert is chosen, one keeps router logits small.

With E experts, over the n targets of one rollout in one layer: fₑ is the share of targets that were sent to expert e, Pₑ the
mean of its score as a share of all experts' scores. Scores are exp(logits) or, where the router takes sigmoids as DeepSeek's
do, these. The balance loss is E · Σₑ fₑ Pₑ, top_k if all is even; the z-loss is the mean of logsumexp(logits)². Both are means
over layers and over the batch's targets. Balance is measured within each rollout, so that neither depends on packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.model import Packed, Watched


def router_losses(layers: Sequence[Watched], packed: Packed, *, num_targets: int) -> tuple[Tensor, Tensor]:
    """(balance, z): one pass's part of a batch of `num_targets` targets."""
    sequence, balance, squares = packed.sequence, [], []
    num_rollouts, ones = len(packed.layout.lengths), torch.ones_like(sequence, dtype=torch.float32)
    lengths = ones.new_zeros(num_rollouts).index_add(0, sequence, ones).clamp_min(1).unsqueeze(1)
    for layer in layers:
        logits, shares, chosen = (each.index_select(0, packed.rows) for each in layer)
        logits, shares = logits.float(), shares.float()
        sums = lengths.new_zeros(num_rollouts, logits.shape[1])
        is_chosen = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
        balance.append(
            (sums.index_add(0, sequence, is_chosen) * sums.index_add(0, sequence, shares) / lengths).sum() * logits.shape[1]
        )
        squares.append(logits.logsumexp(dim=-1).square().sum())
    return torch.stack(balance).mean() / num_targets, torch.stack(squares).mean() / num_targets
