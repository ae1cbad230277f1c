"""Logprobs straight from hidden states: logits exist a chunk of rows at a time, and are made again for the gradient.

The output embedding of a model with a vocabulary of 150,000 gives 600 kB of logits a token. Kept for a gradient, with their
softmax and its own gradient, they would be most of a trainer's memory. Here the forward pass keeps one number a row, the log of
the sum of exponentials; the backward pass makes each chunk's logits once more, turns them into their gradient and that into
those of hidden states and weight. Four products instead of three.

Where the sampler could choose among few tokens, only their columns are computed: `kept_logprobs`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.model.head import AllowedTokens

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits held at a time: 64 MiB of float32 on a CPU, 1 GiB on a GPU, where a product wants many rows to be fast."""
_KEPT_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Weights gathered at a time where only kept columns are computed."""
ROWS = 16
"""Chunks begin at multiples of it."""


@dataclass(frozen=True)
class Scaling:
    """What a model's configuration does to its logits: divided, multiplied, then capped softly."""

    divisor: float | None = None
    factor: float | None = None
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def values(self) -> tuple[float, float, float]:
        """As arguments of a kernel, which is told by `flags` which of them count."""
        return self.divisor or 1.0, self.factor or 1.0, self.softcap or 1.0

    @property
    def flags(self) -> dict[str, bool]:
        named = {"DIVISOR": self.divisor, "FACTOR": self.factor, "SOFTCAP": self.softcap}
        return {f"HAS_{name}": value is not None for name, value in named.items()}

    def slope(self, scaled: Tensor) -> Tensor | float:
        """d scaled / d logit, from what `apply` gave."""
        slope = (1.0 if self.factor is None else self.factor) / (1.0 if self.divisor is None else self.divisor)
        return slope if self.softcap is None else slope * (1 - (scaled / self.softcap).square())


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, vocabulary] float32 logits. Of bfloat16 numbers too: rounded to bfloat16, a logit of 20 would be off by up to a
    sixteenth, and engine and trainer would round it differently."""
    if weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias)
    hidden = hidden.to(weight.dtype)
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:  # products of bfloat16 are slow on most CPUs, and missing on some
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(hidden.float(), weight.float())
    return logits if bias is None else logits + bias.float()


@dataclass(frozen=True)
class Wanted:
    """What is wanted of each row, and how the head treats logits; nothing here has a gradient."""

    targets: Tensor
    temperatures: Tensor
    allowed: AllowedTokens | None
    scaling: Scaling
    padding: int = 1
    """Products are made with a multiple of so many rows."""

    def chunks(self, vocabulary: int) -> list[tuple[int, int]]:
        rows = len(self.targets)
        size = max(ROWS, _CHUNK_ELEMENTS[self.targets.device.type] // vocabulary // ROWS * ROWS)
        return [(start, min(rows, start + size)) for start in range(0, rows, size)]

    def mask(self, start: int, stop: int, vocabulary: int) -> Tensor | None:
        """[rows, vocabulary] bool of a chunk: what could be drawn."""
        return None if self.allowed is None else self.allowed.dense(start, stop, vocabulary)


class FusedLogprobs(torch.autograd.Function):
    """(logprob of each target, entropy of each row); the gradient of the first, and none of the second."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (autograd's own)
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor]:
        vocabulary = weight.shape[0]
        chunks = wanted.chunks(vocabulary)
        parts = [_forward_chunk(hidden, weight, bias, wanted, *chunk) for chunk in chunks]
        logprobs, entropies, totals = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, totals)
        ctx.wanted = wanted
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradients: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, totals = ctx.saved_tensors
        wanted: Wanted = ctx.wanted
        wide = torch.float32
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        to_bias = None if bias is None else torch.zeros(bias.shape, dtype=wide, device=bias.device)
        for start, stop in wanted.chunks(weight.shape[0]):
            slopes = _backward_chunk(hidden, weight, bias, wanted, totals, gradients, start, stop)
            rows = hidden[start:stop].to(weight.dtype)
            if slopes.is_cuda and slopes.dtype != wide:
                to_hidden[start:stop] = slopes @ weight
                torch.addmm(to_weight, slopes.t(), rows, out_dtype=wide, out=to_weight)
            else:
                to_hidden[start:stop] = slopes.to(wide) @ weight.to(wide)
                to_weight.addmm_(slopes.to(wide).t(), rows.to(wide))
            if to_bias is not None:
                to_bias += slopes.sum(dim=0, dtype=wide)
        return to_hidden, to_weight.to(weight.dtype), None if to_bias is None else to_bias.to(bias.dtype), None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, start: int, stop: int) -> Tensor:
    rows = hidden[start:stop]
    if wanted.padding > 1:
        rows = F.pad(rows, (0, 0, 0, -len(rows) % wanted.padding))
    return product(rows, weight, bias)[: stop - start]


def _forward_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(hidden, weight, bias, wanted, start, stop)
    mask = wanted.mask(start, stop, weight.shape[0])
    targets, temperatures = wanted.targets[start:stop], wanted.temperatures[start:stop]
    if logits.is_cuda:
        from headrace.model.head_rows import forward_rows

        return forward_rows(logits, targets, temperatures, mask, wanted.scaling)
    scaled = wanted.scaling.apply(logits) / temperatures.unsqueeze(1)
    if mask is not None:
        scaled = scaled.masked_fill(~mask, float("-inf"))
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = targets.unsqueeze(1)
    totals = torch.logsumexp(scaled, dim=-1)
    return logprobs.gather(1, chosen).squeeze(1), entropy_of(logprobs), totals


def entropy_of(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(dim=-1)


def _backward_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Wanted,
    totals: Tensor,
    gradients: Tensor,
    start: int,
    stop: int,
) -> Tensor:
    """[rows, vocabulary] in the weight's dtype."""
    logits = _logits(hidden, weight, bias, wanted, start, stop)
    mask = wanted.mask(start, stop, weight.shape[0])
    span = slice(start, stop)
    targets, temperatures = wanted.targets[span], wanted.temperatures[span]
    if logits.is_cuda:
        from headrace.model.head_rows import backward_rows

        return backward_rows(
            logits, targets, temperatures, mask, totals[span], gradients[span].contiguous(), wanted.scaling, dtype=weight.dtype
        )
    scaled = wanted.scaling.apply(logits)
    shares = torch.exp(scaled / temperatures.unsqueeze(1) - totals[span].unsqueeze(1))
    if mask is not None:
        shares = shares.masked_fill(~mask, 0.0)
    slopes = shares.neg_().scatter_add_(1, targets.unsqueeze(1), torch.ones_like(shares[:, :1]))
    slopes *= (gradients[span] / temperatures).unsqueeze(1) * wanted.scaling.slope(scaled)
    return slopes.to(weight.dtype)


class KeptLogprobs(torch.autograd.Function):
    """The same where every row could draw only a few tokens: what is computed is one product of two vectors for each."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor]:
        results = [_forward_kept(hidden, weight, bias, wanted, kept) for kept in _kept_chunks(wanted, weight.shape[1])]
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
        for kept in _kept_chunks(wanted, weight.shape[1]):
            scaled, rows, columns = kept.scaled(hidden, weight, bias, wanted)
            temperatures = wanted.temperatures.index_select(0, kept.rows)
            shares = torch.exp(scaled / temperatures - totals.index_select(0, kept.rows))
            is_target = (kept.ids == wanted.targets.index_select(0, kept.rows)).float()
            slopes = (is_target - shares) * gradients.index_select(0, kept.rows) / temperatures * wanted.scaling.slope(scaled)
            to_hidden.index_add_(0, kept.rows, columns * slopes.unsqueeze(1))
            to_weight.index_add_(0, kept.ids, rows * slopes.unsqueeze(1))
            if to_bias is not None:
                to_bias.index_add_(0, kept.ids, slopes)
        return (
            to_hidden.to(hidden.dtype),
            to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            None,
        )


@dataclass(frozen=True)
class _Kept:
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


def _kept_chunks(wanted: Wanted, width: int) -> list[_Kept]:
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
        chunks.append(_Kept(start, stop, rows, wanted.allowed.ids[offsets[start] : offsets[stop]]))
    return chunks


def _forward_kept(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, kept: _Kept
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = kept.scaled(hidden, weight, bias, wanted)[0] / wanted.temperatures.index_select(0, kept.rows)
    local = kept.rows - kept.start
    empty = scaled.new_full((kept.stop - kept.start,), float("-inf"))
    top = empty.scatter_reduce(0, local, scaled, "amax")
    shares = torch.exp(scaled - top.index_select(0, local))
    sums = torch.zeros_like(top).index_add_(0, local, shares)
    totals = top + sums.log()
    entropies = totals - torch.zeros_like(top).index_add_(0, local, shares * scaled) / sums
    is_target = kept.ids == wanted.targets.index_select(0, kept.rows)
    chosen = empty.scatter_reduce(0, local, scaled.masked_fill(~is_target, float("-inf")), "amax")
    return chosen - totals, entropies, totals
