"""Logprob and entropy of a row of logits, and its gradient, reading the logits once each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.model.kernels.softcap import capped

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.model.fused_head import Slopes, Targets

_BLOCK = 4096  # logits that a program holds at once


@triton.jit
def _scaled(x, divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The model's own scaling of logits, before temperature."""
    if HAS_DIVISOR:
        x = x / divisor
    if HAS_FACTOR:
        x = x * factor
    if HAS_SOFTCAP:
        x = capped(x, softcap)
    return x


@triton.jit
def forward_kernel(
    logits, targets, temperatures, allowed, logprobs, entropies, totals, vocabulary, row_stride, allowed_stride,
    divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    target = tl.load(targets + row)
    top = -float("inf")
    total = 0.0
    weighed = 0.0
    wanted = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_in = at < vocabulary
        x = tl.load(logits + row * row_stride + at, mask=is_in, other=0.0)
        x = _scaled(x, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP) / temperature
        if HAS_MASK:
            is_in = is_in & (tl.load(allowed + row * allowed_stride + at, mask=is_in, other=0) != 0)
        x = tl.where(is_in, x, -float("inf"))
        wanted += tl.sum(tl.where(at == target, x, 0.0), axis=0)
        higher = tl.maximum(top, tl.max(x, axis=0))
        base = tl.maximum(higher, -1e30)
        kept = tl.exp(top - base)
        shares = tl.exp(x - base)
        total = total * kept + tl.sum(shares, axis=0)
        weighed = weighed * kept + tl.sum(tl.where(is_in, shares * x, 0.0), axis=0)
        top = higher
    whole = tl.maximum(top, -1e30) + tl.log(total)
    tl.store(logprobs + row, wanted - whole)
    tl.store(entropies + row, whole - weighed / total)
    tl.store(totals + row, whole)


@triton.jit
def backward_kernel(
    logits, targets, temperatures, allowed, totals, gradients, entropies, entropy_gradients, out, vocabulary, row_stride,
    allowed_stride, divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # the grid's first side: its second is limited to 65,535
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < vocabulary
    temperature = tl.load(temperatures + row)
    target = tl.load(targets + row)
    total = tl.load(totals + row)
    gradient = tl.load(gradients + row)
    x = tl.load(logits + row * row_stride + at, mask=is_in, other=0.0)
    y = _scaled(x, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
    logprob = y / temperature - total
    share = tl.exp(logprob)
    if HAS_MASK:
        share = tl.where(tl.load(allowed + row * allowed_stride + at, mask=is_in, other=0) != 0, share, 0.0)
    slope = gradient * (tl.where(at == target, 1.0, 0.0) - share) / temperature
    if HAS_ENTROPY:
        slope -= tl.load(entropy_gradients + row) * share * (logprob + tl.load(entropies + row)) / temperature
    if HAS_SOFTCAP:
        slope = slope * (1.0 - (y / softcap) * (y / softcap))
    if HAS_FACTOR:
        slope = slope * factor
    if HAS_DIVISOR:
        slope = slope / divisor
    tl.store(out + row * vocabulary + at, slope.to(out.dtype.element_ty), mask=is_in)


def forward_rows(logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob of each target, entropy, log of the sum of exponentials) of [rows, vocabulary] float32 logits."""
    rows, vocabulary = logits.shape
    allowed, scaling = targets.mask(vocabulary), targets.scaling
    found = [logits.new_empty(rows) for _ in range(3)]
    forward_kernel[(rows,)](
        logits, targets.ids, targets.temperatures, logits if allowed is None else allowed, *found, vocabulary, logits.stride(0),
        0 if allowed is None else allowed.stride(0), *scaling.values, **scaling.flags, HAS_MASK=allowed is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2]


def backward_rows(logits: Tensor, targets: Targets, totals: Tensor, slopes: Slopes, *, dtype: torch.dtype) -> Tensor:
    """[rows, vocabulary] of `dtype`: the gradient by the logits, which for an entropy H is −p (log p + H)."""
    rows, vocabulary = logits.shape
    allowed, scaling = targets.mask(vocabulary), targets.scaling
    out = torch.empty((rows, vocabulary), dtype=dtype, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    backward_kernel[(rows, triton.cdiv(vocabulary, block))](
        logits, targets.ids, targets.temperatures, logits if allowed is None else allowed, totals, slopes.logprobs,
        *(slopes.entropies or (totals, totals)), out, vocabulary, logits.stride(0),
        0 if allowed is None else allowed.stride(0), *scaling.values, **scaling.flags, HAS_MASK=allowed is not None,
        HAS_ENTROPY=slopes.entropies is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out
