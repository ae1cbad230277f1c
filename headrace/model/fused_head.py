"""Logprobs straight from hidden states: logits exist a chunk of rows at a time, and are made again for the gradient.

The output embedding of a model with a vocabulary of 150,000 gives 600 kB of logits a token. Kept for a gradient, with their
softmax and its own gradient, they would be most of a trainer's memory. Here the forward pass keeps one number a row, the log of
the sum of exponentials; the backward pass makes each chunk's logits once more, turns them into their gradient and that into
those of hidden states and weight. Four products instead of three.

Whoever knows at once what the loss makes of a chunk's logprobs saves the fourth: `JudgedLogprobs` asks for it while the chunk's
logits are there. Where the sampler could choose among few tokens, only their columns are computed: `masked_head`.
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
"""Logits held at a time: 64 MiB of float32 on a CPU, 1 GiB on a GPU, where a product wants many rows to be fast."""
ROWS = 16
"""Chunks that need not hold whole sequences have a multiple of so many."""
_CACHED_ELEMENTS = 1 << 22
"""Logits that a processor keeps near while it goes over them."""
_OUT_OF_REACH = -1e30
"""The logit of a token that could not be drawn."""


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


_PLAIN = Scaling()


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
        rows, size = len(self.targets), chunk_rows(vocabulary, self.targets.device)
        if self.targets.is_cuda:  # the weight's gradient is held beside a chunk, twice
            size = max(ROWS, size * 3 // 4 // ROWS * ROWS)
        return [(start, min(rows, start + size)) for start in range(0, rows, size)]

    def mask(self, start: int, stop: int, vocabulary: int) -> Tensor | None:
        """[rows, vocabulary] bool of a chunk: what could be drawn."""
        return None if self.allowed is None else self.allowed.dense(start, stop, vocabulary)


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """How many rows of logits are held at a time."""
    return max(ROWS, _CHUNK_ELEMENTS[device.type] // vocabulary // ROWS * ROWS)


def whole_spans(counts: Sequence[int], most: int) -> list[tuple[int, int]] | None:
    """Chunks of at most `most` rows that part no sequence; `counts` are the rows of each. None where one is too long."""
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
    """A chunk's gradient of logits, in the weight's dtype, on to hidden states, weight and bias; sums are float32."""
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
    """Of one chunk."""

    logprobs: Tensor
    entropies: Tensor
    totals: Tensor
    """Log of the sum of exponentials."""
    shares: Tensor | None = None
    """The softmax, where it was made on the way."""
    scaled: Tensor | None = None
    """Logits before temperature, where a soft cap's slope will be asked of them."""


def _read_rows(logits: Tensor, wanted: Wanted, start: int, stop: int) -> _Rows:
    """Uses the logits up."""
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
        # An engine that is to agree to the last bit draws from a log-softmax.
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
    """Parts that a processor can go over several times without fetching them anew."""
    size = max(1, _CACHED_ELEMENTS // rows.shape[1])
    return [slice(begin, begin + size) for begin in range(0, len(rows), size)]


def _tempered(part: Tensor, wanted: Wanted, start: int) -> Tensor:
    """What the softmax is taken of, in place; what could not be drawn is finite, and out of reach."""
    temperatures = wanted.temperatures[start : start + len(part)]
    if not bool((temperatures == 1).all()):
        part.div_(temperatures.unsqueeze(1))
    mask = wanted.mask(start, start + len(part), part.shape[1])
    return part if mask is None else part.masked_fill_(~mask, _OUT_OF_REACH)


def _differentiated(
    logits: Tensor, wanted: Wanted, rows: _Rows, slopes: Tensor, start: int, stop: int, *, dtype: torch.dtype
) -> Tensor:
    """[rows, vocabulary] of `dtype`: the derivative of Σ slopes · logprobs by the logits. Uses logits and shares up."""
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


class Judge(Protocol):
    """Says what a loss makes of some rows."""

    def __call__(self, start: int, stop: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """[stop - start]: the derivative of the loss with respect to each logprob. Called once for each chunk, in order."""


class JudgedLogprobs(torch.autograd.Function):
    """0, whose gradient is that of the loss a judge has in mind; made in one go, with three products.

    `spans` are the chunks: a judge that looks at whole sequences needs them whole. With `gathered` the weight's gradient is
    added there, in float32, and autograd hears nothing of it.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Wanted,
        spans: list[tuple[int, int]],
        judge: Judge,
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
