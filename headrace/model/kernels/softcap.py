"""A soft cap: softcap · tanh(x ÷ softcap), which keeps its digits where it is nearly x itself."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(x, softcap):
    """For small ratios, where 1 − exp(…) would lose digits, the first terms of the series are used instead."""
    ratio = x / softcap
    square = ratio * ratio
    near = ratio * (1.0 - square * (0.33333333333 - square * (0.13333333333 - square * 0.05396825397)))
    shrunk = tl.exp(-2.0 * tl.abs(ratio))
    far = tl.where(ratio >= 0, 1.0, -1.0) * (1.0 - shrunk) / (1.0 + shrunk)
    return softcap * tl.where(square < 0.02, near, far)
