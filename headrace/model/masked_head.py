"""Logprobs where every row allows only a few tokens: one dot product for each of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.model.fused_head import Wanted

_KEPT_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}  # weights gathered at a time


class MaskedLogprobs(torch.autograd.Function):
    """`FusedLogprobs` over the columns of the allowed tokens only."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor]:
        results = [_forward_pairs(hidden, weight, bias, wanted, pairs) for pairs in _chunks_of_pairs(wanted, weight.shape[1])]
        logprobs, entropies, totals = (torch.cat(part) for part in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, totals)
        ctx.wanted = wanted
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradients: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, totals = ctx.saved_tensors
        wanted: Wanted = ctx.wanted
        wide = torch.float32
        to_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        to_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        for pairs in _chunks_of_pairs(wanted, weight.shape[1]):
            scaled, rows, columns = pairs.scaled(hidden, weight, bias, wanted)
            temperatures = wanted.temperatures.index_select(0, pairs.rows)
            shares = torch.exp(scaled / temperatures - totals.index_select(0, pairs.rows))
            is_target = (pairs.ids == wanted.targets.index_select(0, pairs.rows)).float()
            slopes = (is_target - shares) * gradients.index_select(0, pairs.rows) / temperatures * wanted.scaling.slope(scaled)
            to_hidden.index_add_(0, pairs.rows, columns * slopes.unsqueeze(1))
            to_weight.index_add_(0, pairs.ids, rows * slopes.unsqueeze(1))
            if to_bias is not None:
                to_bias.index_add_(0, pairs.ids, slopes)
        return (
            to_hidden.to(hidden.dtype),
            to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            None,
        )


@dataclass(frozen=True)
class _Pairs:
    """(row, token) pairs of whole rows `start` to `stop`."""

    start: int
    stop: int
    rows: Tensor
    ids: Tensor

    def scaled(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """(logits before temperature, hidden state, column of the head) of each pair."""
        rows = hidden.index_select(0, self.rows).to(weight.dtype).float()
        columns = weight.index_select(0, self.ids).float()
        logits = (rows * columns).sum(dim=1)
        if bias is not None:
            logits = logits + bias.index_select(0, self.ids).float()
        return wanted.scaling.apply(logits), rows, columns


def _chunks_of_pairs(wanted: Wanted, width: int) -> list[_Pairs]:
    assert wanted.allowed is not None
    offsets = wanted.allowed.offsets.tolist()
    most = max(1, _KEPT_ELEMENTS[wanted.targets.device.type] // width)
    bounds = [0]
    for row in range(1, len(offsets)):
        if offsets[row] - offsets[bounds[-1]] > most and row - 1 > bounds[-1]:
            bounds.append(row - 1)
    bounds.append(len(offsets) - 1)
    device = wanted.targets.device
    chunks = []
    for start, stop in itertools.pairwise(bounds):
        counts = wanted.allowed.offsets[start + 1 : stop + 1] - wanted.allowed.offsets[start:stop]
        rows = torch.repeat_interleave(torch.arange(start, stop, device=device), counts)
        chunks.append(_Pairs(start, stop, rows, wanted.allowed.ids[offsets[start] : offsets[stop]]))
    return chunks


def _forward_pairs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, pairs: _Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = pairs.scaled(hidden, weight, bias, wanted)[0] / wanted.temperatures.index_select(0, pairs.rows)
    local = pairs.rows - pairs.start
    empty = scaled.new_full((pairs.stop - pairs.start,), float("-inf"))
    top = empty.scatter_reduce(0, local, scaled, "amax")
    shares = torch.exp(scaled - top.index_select(0, local))
    sums = torch.zeros_like(top).index_add_(0, local, shares)
    totals = top + sums.log()
    entropies = totals - torch.zeros_like(top).index_add_(0, local, shares * scaled) / sums
    is_target = pairs.ids == wanted.targets.index_select(0, pairs.rows)
    chosen = empty.scatter_reduce(0, local, scaled.masked_fill(~is_target, float("-inf")), "amax")
    return chosen - totals, entropies, totals
