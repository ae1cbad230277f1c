"""Logprobs straight from hidden states: logits exist for a chunk of rows at a time, and are recomputed for the gradient.

With a vocabulary of 150,000 one token has 600 kB of logits. Kept for the backward pass, with their softmax and its gradient,
they would take most of a trainer's memory. Here the forward pass keeps one number per row, the log of the sum of exponentials
(its total); the backward pass recomputes each chunk's logits and turns them into gradients of hidden states and weight: four
matrix products instead of three. `LogprobsWithLoss` saves the fourth by calling the loss while it has a chunk's logits. If the
sampler could choose among a few tokens only, `FewTokens` computes just their columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits held at a time: 64 MiB of float32 on a CPU; 1 GiB on a GPU, where fast products need many rows."""
_GATHERED_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}  # weights of single tokens gathered at a time
_ROWS = 16  # chunks that need not hold whole sequences have a multiple of this many rows
_CACHED_ELEMENTS = 1 << 22  # logits that stay in a CPU's cache
_OUT_OF_REACH = -1e30  # the logit of a token that could not be sampled
_FEW = 16  # if at most 1/16 of the tokens are allowed, computing their columns alone is faster than the whole product


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
class AllowedTokens:
    """A ragged sampling mask: row r allows ids[offsets[r]:offsets[r+1]], or if these are negative all but ~ids; an empty row
    allows everything."""

    offsets: Tensor
    ids: Tensor

    def __getitem__(self, span: slice) -> AllowedTokens:
        return AllowedTokens(self.offsets[span.start : span.stop + 1], self.ids)

    def is_few(self, vocabulary: int) -> bool:
        """Whether every row is restricted, and on average to few tokens."""
        counts = self.offsets.diff()
        return len(self.ids) * _FEW <= len(counts) * vocabulary and bool((counts > 0).all() & (self.ids >= 0).all())

    def pairs(self) -> tuple[Tensor, Tensor]:
        """(row, entry) of each token listed."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return rows, self.ids[self.offsets[0] : self.offsets[-1]]

    def dense(self, vocabulary: int) -> Tensor:
        """[rows, vocabulary] bool."""
        rows, ids = self.pairs()
        is_allowed = ids >= 0
        num_allowed = torch.zeros_like(self.offsets[1:]).index_add_(0, rows, is_allowed.long())
        allowed = (num_allowed == 0).unsqueeze(1).expand(-1, vocabulary).clone()
        allowed[rows, torch.where(is_allowed, ids, ~ids)] = is_allowed
        return allowed


@dataclass(frozen=True)
class Targets:
    """The target and sampling parameters of each row, and how the head scales logits; nothing here has a gradient."""

    ids: Tensor
    temperatures: Tensor
    allowed: AllowedTokens | None
    scaling: Scaling
    padding: int = 1  # products have a multiple of this many rows

    def __getitem__(self, span: slice) -> Targets:
        allowed = None if self.allowed is None else self.allowed[span]
        return replace(self, ids=self.ids[span], temperatures=self.temperatures[span], allowed=allowed)

    def mask(self, vocabulary: int) -> Tensor | None:
        """[rows, vocabulary] bool: what could be sampled."""
        return None if self.allowed is None else self.allowed.dense(vocabulary)


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Rows of logits held at a time."""
    return max(_ROWS, _CHUNK_ELEMENTS[device.type] // vocabulary // _ROWS * _ROWS)


def grouped(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive items of a total size of at most `most`; a larger item is alone."""
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > most:
            yield slice(start, place)
            start, total = place, 0
        total += size
    if total:
        yield slice(start, len(sizes))


class AllTokens:
    """The logits of some rows. On a CPU they are overwritten: by `read` with their softmax, then with their gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> None:
        self._hidden, self._weight, self._targets = hidden, weight, targets
        rows = hidden if targets.padding == 1 else F.pad(hidden, (0, 0, 0, -len(hidden) % targets.padding))
        self._logits = product(rows, weight, bias)[: len(hidden)]
        self._is_softmax = False

    @staticmethod
    def spans(weight: Tensor, targets: Targets) -> list[slice]:
        """Rows that go through the head together."""
        size = chunk_rows(weight.shape[0], weight.device)
        if weight.is_cuda:  # leaves room for two copies of the weight's gradient
            size = max(_ROWS, size * 3 // 4 // _ROWS * _ROWS)
        return [slice(start, start + size) for start in range(0, len(targets.ids), size)]

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """(logprob of the target, entropy, total) of each row."""
        if self._logits.is_cuda:
            from headrace.model.kernels.head import forward_rows

            return forward_rows(self._logits, self._targets)
        self._scale()
        self._is_softmax = True
        logprobs, entropies, totals = (self._logits.new_empty(len(self._logits)) for _ in range(3))
        for span, part, given in self._parts():
            _apply_sampling(part, given)
            totals[span] = torch.logsumexp(part, dim=-1)
            # In exact mode the engine samples from a log-softmax, and every bit must agree.
            sampled_from = torch.log_softmax(part, dim=-1) if given.padding > 1 else None
            part.sub_(totals[span].unsqueeze(1))
            logprobs[span] = (part if sampled_from is None else sampled_from).gather(1, given.ids.unsqueeze(1)).squeeze(1)
            shares = part.exp()
            entropies[span] = -torch.bmm(shares.unsqueeze(1), part.unsqueeze(2)).reshape(-1)
            part.copy_(shares)
        return logprobs.masked_fill(logprobs < _OUT_OF_REACH / 2, float("-inf")), entropies, totals

    def add_gradients(self, sums: Gradients, span: slice, totals: Tensor, slopes: Slopes) -> None:
        """Add the gradients of Σ slopes · logprobs, and of the entropies' part if they have slopes."""
        weight, wide = self._weight, torch.float32
        of_logits = self._differentiate(totals, slopes)
        rows = self._hidden.to(weight.dtype)
        if of_logits.is_cuda and of_logits.dtype != wide:
            sums.hidden[span] = of_logits @ weight
            if sums.weight is not None:
                torch.addmm(sums.weight, of_logits.t(), rows, out_dtype=wide, out=sums.weight)
        else:
            sums.hidden[span] = of_logits.to(wide) @ weight.to(wide)
            if sums.weight is not None:
                sums.weight.addmm_(of_logits.to(wide).t(), rows.to(wide))
        if sums.bias is not None:
            sums.bias.add_(of_logits.sum(dim=0, dtype=wide))

    def _differentiate(self, totals: Tensor, slopes: Slopes) -> Tensor:
        """[rows, vocabulary] in the weight's dtype: the gradient by the logits. That of an entropy H is −p (log p + H)."""
        scaling, dtype = self._targets.scaling, self._weight.dtype
        if self._logits.is_cuda:
            from headrace.model.kernels.head import backward_rows

            return backward_rows(self._logits, self._targets, totals, slopes, dtype=dtype)
        if not self._is_softmax:
            self._scale()
        for span, part, given in self._parts():
            if not self._is_softmax:
                _apply_sampling(part, given)
                part.sub_(totals[span].unsqueeze(1)).exp_()
            factors, of_entropy = (slopes.logprobs[span] / given.temperatures).unsqueeze(1), None
            if slopes.entropies is not None:
                entropies, by_entropies = (each[span].unsqueeze(1) for each in slopes.entropies)
                of_entropy = torch.xlogy(part, part).addcmul_(part, entropies)
                of_entropy.mul_(by_entropies / given.temperatures.unsqueeze(1))
            part.mul_(-factors).scatter_add_(1, given.ids.unsqueeze(1), factors)
            if of_entropy is not None:
                part.sub_(of_entropy)
            if scaling != _PLAIN:
                part.mul_(scaling.slope(self._scaled[span]))
        return self._work.to(dtype)

    def _scale(self) -> None:
        """Only a soft cap's slope needs the scaled logits again; otherwise they are overwritten."""
        scaling = self._targets.scaling
        self._scaled = scaling.apply(self._logits)
        self._work = self._scaled if scaling.softcap is None else self._scaled.clone()

    def _parts(self) -> Iterator[tuple[slice, Tensor, Targets]]:
        """Rows that stay in a CPU's cache over several passes."""
        size = max(1, _CACHED_ELEMENTS // self._work.shape[1])
        for start in range(0, len(self._work), size):
            span = slice(start, start + size)
            yield span, self._work[span], self._targets[span]


def _apply_sampling(logits: Tensor, targets: Targets) -> None:
    """Apply temperature and mask, in place; masked logits are `_OUT_OF_REACH`, which is finite."""
    if not bool((targets.temperatures == 1).all()):
        logits.div_(targets.temperatures.unsqueeze(1))
    mask = targets.mask(logits.shape[1])
    if mask is not None:
        logits.masked_fill_(~mask, _OUT_OF_REACH)


class FewTokens:
    """`AllTokens` for rows that allow only a few each: one dot product for each pair of a row and a token it allows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> None:
        assert targets.allowed is not None
        self._targets = targets
        self._rows, self._ids = targets.allowed.pairs()
        self._hidden = hidden.index_select(0, self._rows).to(weight.dtype).float()
        self._columns = weight.index_select(0, self._ids).float()
        logits = (self._hidden * self._columns).sum(dim=1)
        if bias is not None:
            logits = logits + bias.index_select(0, self._ids).float()
        self._temperatures = targets.temperatures.index_select(0, self._rows)
        self._scaled = targets.scaling.apply(logits)
        self._logits = self._scaled / self._temperatures
        self._is_target = self._ids == targets.ids.index_select(0, self._rows)

    @staticmethod
    def spans(weight: Tensor, targets: Targets) -> list[slice]:
        assert targets.allowed is not None
        most = max(1, _GATHERED_ELEMENTS[weight.device.type] // weight.shape[1])
        return list(grouped(targets.allowed.offsets.diff().tolist(), most))

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        logits, rows = self._logits, self._rows
        empty = logits.new_full(self._targets.ids.shape, float("-inf"))
        top = empty.scatter_reduce(0, rows, logits, "amax")
        shares = torch.exp(logits - top.index_select(0, rows))
        sums = torch.zeros_like(top).index_add_(0, rows, shares)
        totals = top + sums.log()
        entropies = totals - torch.zeros_like(top).index_add_(0, rows, shares * logits) / sums
        chosen = empty.scatter_reduce(0, rows, logits.masked_fill(~self._is_target, float("-inf")), "amax")
        return chosen - totals, entropies, totals

    def add_gradients(self, sums: Gradients, span: slice, totals: Tensor, slopes: Slopes) -> None:
        logprobs = self._logits - totals.index_select(0, self._rows)
        shares = logprobs.exp()
        slopes_of_pairs = (self._is_target.float() - shares) * slopes.logprobs.index_select(0, self._rows)
        if slopes.entropies is not None:
            entropies, by_entropies = (each.index_select(0, self._rows) for each in slopes.entropies)
            slopes_of_pairs -= shares * (logprobs + entropies) * by_entropies
        of_logits = slopes_of_pairs / self._temperatures * self._targets.scaling.slope(self._scaled)
        to_hidden = torch.zeros(sums.hidden[span].shape, dtype=torch.float32, device=totals.device)
        sums.hidden[span] = to_hidden.index_add_(0, self._rows, self._columns * of_logits.unsqueeze(1))
        if sums.weight is not None:
            sums.weight.index_add_(0, self._ids, self._hidden * of_logits.unsqueeze(1))
        if sums.bias is not None:
            sums.bias.index_add_(0, self._ids, of_logits)


class Slopes(NamedTuple):
    """A loss's derivatives by the logprob of each row and, if it uses them, by entropies, which come with their values."""

    logprobs: Tensor
    entropies: tuple[Tensor, Tensor] | None = None  # values, derivatives

    @classmethod
    def of(cls, by_logprobs: Tensor, by_entropies: Tensor | None, entropies: Tensor) -> Slopes:
        return cls(by_logprobs.contiguous(), None if by_entropies is None else (entropies, by_entropies.contiguous()))


class Gradients(NamedTuple):
    """Of hidden states; and of weight and bias, summed over chunks in float32, unless the weight is frozen."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, is_frozen: bool, gathered: Tensor | None = None
    ) -> Gradients:
        if gathered is None and not is_frozen:
            gathered = torch.zeros_like(weight, dtype=torch.float32)
        return cls(torch.empty_like(hidden), gathered, None if bias is None else torch.zeros_like(bias, dtype=torch.float32))


class Logprobs(torch.autograd.Function):
    """(logprob of each target, entropy of each row)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  (autograd's own)
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        chunk: type[AllTokens | FewTokens],
    ) -> tuple[Tensor, Tensor]:
        spans = chunk.spans(weight, targets)
        parts = [chunk(hidden[span], weight, bias, targets[span]).read() for span in spans]
        logprobs, entropies, totals = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, totals, entropies)
        ctx.targets, ctx.chunk, ctx.spans = targets, chunk, spans
        ctx.set_materialize_grads(False)  # no zeros for entropies that the loss does not use
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropies: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, totals, entropies = ctx.saved_tensors
        by_logprobs = torch.zeros_like(totals) if by_logprobs is None else by_logprobs
        sums = Gradients.zeros(hidden, weight, bias, is_frozen=not ctx.needs_input_grad[1])
        for span in ctx.spans:
            chunk = ctx.chunk(hidden[span], weight, bias, ctx.targets[span])
            of_span = by_entropies if by_entropies is None else by_entropies[span]
            chunk.add_gradients(sums, span, totals[span], Slopes.of(by_logprobs[span], of_span, entropies[span]))
        to_weight = None if sums.weight is None else sums.weight.to(weight.dtype)
        return sums.hidden, to_weight, None if sums.bias is None else sums.bias.to(bias.dtype), None, None


class LossGradient(Protocol):
    """A loss, by its derivative."""

    def __call__(self, start: int, stop: int, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        """[stop - start] each: the loss's derivative by logprobs, and by entropies if it uses them. `LogprobsWithLoss` calls it
        once per chunk, in order."""


class LogprobsWithLoss(torch.autograd.Function):
    """Returns 0 with the gradient of the judge's loss: computed in the forward pass, with three products. `spans` are the
    chunks, of whole sequences. The weight's gradient is added to `gathered`, if given, in float32 and bypassing autograd."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        spans: Sequence[slice],
        judge: LossGradient,
        gathered: Tensor | None,
    ) -> Tensor:
        sums = Gradients.zeros(hidden, weight, bias, is_frozen=not ctx.needs_input_grad[1], gathered=gathered)
        for span in spans:
            chunk = AllTokens(hidden[span], weight, bias, targets[span])
            logprobs, entropies, totals = chunk.read()
            slopes = Slopes.of(*judge(span.start, span.stop, logprobs, entropies), entropies)
            chunk.add_gradients(sums, span, totals, slopes)
        ctx.save_for_backward(sums.hidden, sums.weight if gathered is None else None, sums.bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        sums = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if total is None else (total * gradient).to(dtype) for total, dtype in sums), *[None] * 4)
