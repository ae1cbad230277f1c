"""Logprobs straight from hidden states: logits exist for a chunk of rows at a time, and are recomputed for the gradient.

With a vocabulary of 150,000 one token has 600 kB of logits. Kept for the backward pass, with their softmax and its gradient,
they would take most of a trainer's memory. Here the forward pass keeps one number per row, the log of the sum of exponentials;
the backward pass recomputes each chunk's logits and turns them into gradients of hidden states and weight: four matrix
products instead of three. `LogprobsWithLoss` saves the fourth by calling the loss while it has a chunk's logits. If the sampler
could choose among a few tokens only, `masked_head` computes just their columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.model.head import AllowedTokens

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits held at a time: 64 MiB of float32 on a CPU; 1 GiB on a GPU, where fast products need many rows."""
ROWS = 16  # chunks that need not hold whole sequences have a multiple of this many rows
_CACHED_ELEMENTS = 1 << 22  # logits that stay in a CPU's cache
_OUT_OF_REACH = -1e30  # the logit of a token that could not be sampled


@dataclass(frozen=True)
class Scaling:
    """How a model's configuration scales logits: divided, multiplied, then soft-capped."""

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
        """Kernel arguments; `flags` says which of them apply."""
        return self.divisor or 1.0, self.factor or 1.0, self.softcap or 1.0

    @property
    def flags(self) -> dict[str, bool]:
        named = {"DIVISOR": self.divisor, "FACTOR": self.factor, "SOFTCAP": self.softcap}
        return {f"HAS_{name}": value is not None for name, value in named.items()}

    def slope(self, scaled: Tensor) -> Tensor | float:
        """d scaled / d logit, from the result of `apply`."""
        slope = (1.0 if self.factor is None else self.factor) / (1.0 if self.divisor is None else self.divisor)
        return slope if self.softcap is None else slope * (1 - (scaled / self.softcap).square())


_PLAIN = Scaling()


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, vocabulary] float32 logits, also of a bfloat16 model: bfloat16 would round a logit of 20 by up to 1/16, and engine
    and trainer would round differently."""
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
    """The target and sampling parameters of each row, and how the head scales logits; nothing here has a gradient."""

    targets: Tensor
    temperatures: Tensor
    allowed: AllowedTokens | None
    scaling: Scaling
    padding: int = 1  # products have a multiple of this many rows

    def chunks(self, vocabulary: int) -> list[tuple[int, int]]:
        rows, size = len(self.targets), chunk_rows(vocabulary, self.targets.device)
        if self.targets.is_cuda:  # leaves room for two copies of the weight's gradient
            size = max(ROWS, size * 3 // 4 // ROWS * ROWS)
        return [(start, min(rows, start + size)) for start in range(0, rows, size)]

    def mask(self, start: int, stop: int, vocabulary: int) -> Tensor | None:
        """[rows, vocabulary] bool of a chunk: what could be sampled."""
        return None if self.allowed is None else self.allowed.dense(start, stop, vocabulary)


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of logits held at a time."""
    return max(ROWS, _CHUNK_ELEMENTS[device.type] // vocabulary // ROWS * ROWS)


def whole_spans(counts: Sequence[int], most: int) -> list[tuple[int, int]] | None:
    """Chunks of at most `most` rows that split no sequence (of `counts` rows each); None if one is too long."""
    spans: list[tuple[int, int]] = []
    start = stop = 0
    for count in counts:
        if count > most:
            return None
        if stop + count - start > most:
            spans.append((start, stop))
            start = stop
        stop += count
    return [*spans, (start, stop)] if stop > start else spans


class FusedLogprobs(torch.autograd.Function):
    """(logprob of each target, entropy of each row); only the first has a gradient."""

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
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        to_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for start, stop in wanted.chunks(weight.shape[0]):
            logits = _logits(hidden, weight, bias, wanted, start, stop)
            slopes = gradients[start:stop].contiguous()
            rows = _Rows(logprobs=slopes, entropies=slopes, totals=totals[start:stop])
            of_logits = _differentiated(logits, wanted, rows, slopes, start, stop, dtype=weight.dtype)
            _add_products(hidden, weight, of_logits, start, stop, to_hidden, to_weight, to_bias)
        return to_hidden, to_weight.to(weight.dtype), None if to_bias is None else to_bias.to(bias.dtype), None


def _add_products(
    hidden: Tensor,
    weight: Tensor,
    of_logits: Tensor,
    start: int,
    stop: int,
    to_hidden: Tensor,
    to_weight: Tensor,
    to_bias: Tensor | None,
) -> None:
    """Add a chunk's gradient of logits, in the weight's dtype, to those of hidden states, weight and bias, in float32."""
    rows, wide = hidden[start:stop].to(weight.dtype), torch.float32
    if of_logits.is_cuda and of_logits.dtype != wide:
        to_hidden[start:stop] = of_logits @ weight
        torch.addmm(to_weight, of_logits.t(), rows, out_dtype=wide, out=to_weight)
    else:
        to_hidden[start:stop] = of_logits.to(wide) @ weight.to(wide)
        to_weight.addmm_(of_logits.to(wide).t(), rows.to(wide))
    if to_bias is not None:
        to_bias += of_logits.sum(dim=0, dtype=wide)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, start: int, stop: int) -> Tensor:
    rows = hidden[start:stop]
    if wanted.padding > 1:
        rows = F.pad(rows, (0, 0, 0, -len(rows) % wanted.padding))
    return product(rows, weight, bias)[: stop - start]


def _forward_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _read_rows(_logits(hidden, weight, bias, wanted, start, stop), wanted, start, stop)
    return rows.logprobs, rows.entropies, rows.totals


@dataclass(frozen=True)
class _Rows:
    logprobs: Tensor
    entropies: Tensor
    totals: Tensor  # log of the sum of exponentials
    shares: Tensor | None = None  # the softmax, if it was computed on the way
    scaled: Tensor | None = None  # logits before temperature, if a soft cap's slope needs them


def _read_rows(logits: Tensor, wanted: Wanted, start: int, stop: int) -> _Rows:
    """Overwrites the logits."""
    if logits.is_cuda:
        from headrace.model.head_rows import forward_rows

        mask = wanted.mask(start, stop, logits.shape[1])
        given = (wanted.targets[start:stop], wanted.temperatures[start:stop], mask, wanted.scaling)
        return _Rows(*forward_rows(logits, *given))
    scaled = wanted.scaling.apply(logits)
    shares = scaled if wanted.scaling.softcap is None else scaled.clone()
    logprobs, entropies, totals = (logits.new_empty(len(logits)) for _ in range(3))
    for span in _in_cache(logits):
        part = _tempered(shares[span], wanted, start + span.start)
        totals[span] = torch.logsumexp(part, dim=-1)
        # In exact mode the engine samples from a log-softmax, and every bit must agree.
        drawn = torch.log_softmax(part, dim=-1) if wanted.padding > 1 else None
        part.sub_(totals[span].unsqueeze(1))
        targets = wanted.targets[start + span.start : start + span.start + len(part)].unsqueeze(1)
        logprobs[span] = (part if drawn is None else drawn).gather(1, targets).squeeze(1)
        exponentials = part.exp()
        entropies[span] = -torch.bmm(exponentials.unsqueeze(1), part.unsqueeze(2)).reshape(-1)
        part.copy_(exponentials)
    logprobs = logprobs.masked_fill(logprobs < _OUT_OF_REACH / 2, float("-inf"))
    return _Rows(logprobs, entropies, totals, shares, None if shares is scaled else scaled)


def _in_cache(rows: Tensor) -> list[slice]:
    """Slices of rows that stay in a CPU's cache over several passes."""
    size = max(1, _CACHED_ELEMENTS // rows.shape[1])
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


def _tempered(part: Tensor, wanted: Wanted, start: int) -> Tensor:
    """Apply temperature and mask, in place; masked logits are `_OUT_OF_REACH`, which is finite."""
    temperatures = wanted.temperatures[start : start + len(part)]
    if not bool((temperatures == 1).all()):
        part.div_(temperatures.unsqueeze(1))
    mask = wanted.mask(start, start + len(part), part.shape[1])
    return part if mask is None else part.masked_fill_(~mask, _OUT_OF_REACH)


def _differentiated(
    logits: Tensor, wanted: Wanted, rows: _Rows, slopes: Tensor, start: int, stop: int, *, dtype: torch.dtype
) -> Tensor:
    """[rows, vocabulary] of `dtype`: the gradient of Σ slopes · logprobs by the logits. Overwrites logits and shares."""
    targets, temperatures, scaling = wanted.targets[start:stop], wanted.temperatures[start:stop], wanted.scaling
    if logits.is_cuda:
        from headrace.model.head_rows import backward_rows

        mask = wanted.mask(start, stop, logits.shape[1])
        return backward_rows(logits, targets, temperatures, mask, rows.totals, slopes, scaling, dtype=dtype)
    found, scaled = rows.shares, rows.scaled
    is_made = found is not None
    if found is None:
        scaled = scaling.apply(logits)
        found = scaled if scaling.softcap is None else scaled.clone()
    for span in _in_cache(found):
        part = found[span]
        if not is_made:
            _tempered(part, wanted, start + span.start).sub_(rows.totals[span].unsqueeze(1)).exp_()
        factors = (slopes[span] / temperatures[span]).unsqueeze(1)
        part.mul_(-factors).scatter_add_(1, targets[span].unsqueeze(1), factors)
        if scaling != _PLAIN:
            part.mul_(scaling.slope(part if scaled is None else scaled[span]))
    return found.to(dtype)


class LossGradient(Protocol):
    """A loss, by its derivative."""

    def __call__(self, start: int, stop: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """[stop - start]: the loss's derivative by each logprob. `LogprobsWithLoss` calls it once per chunk, in order."""


class LogprobsWithLoss(torch.autograd.Function):
    """Returns 0 with the gradient of the judge's loss: computed in the forward pass, with three products. `spans` are the
    chunks, of whole sequences. The weight's gradient is added to `gathered`, if given, in float32 and bypassing autograd."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
        spans: list[tuple[int, int]],
        judge: LossGradient,
        gathered: Tensor | None,
    ) -> Tensor:
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if gathered is None else gathered
        to_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for start, stop in spans:
            logits = _logits(hidden, weight, bias, wanted, start, stop)
            rows = _read_rows(logits, wanted, start, stop)
            slopes = judge(start, stop, rows.logprobs, rows.entropies).contiguous()
            of_logits = _differentiated(logits, wanted, rows, slopes, start, stop, dtype=weight.dtype)
            _add_products(hidden, weight, of_logits, start, stop, to_hidden, to_weight, to_bias)
        ctx.save_for_backward(to_hidden, None if gathered is not None else to_weight, to_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        to_hidden, to_weight, to_bias = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        return (
            to_hidden * gradient,
            None if to_weight is None else (to_weight * gradient).to(dtype),
            None if to_bias is None else (to_bias * gradient).to(bias_dtype),
            *[None] * 4,
        )
