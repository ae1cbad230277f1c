"""Checksums of all tensors of an arena in one launch, and whether each of them holds only finite numbers.

The values are those of `weights.checksum`, which says what a checksum is. Each program reads one block of one tensor and
adds its share to the tensor's sum. Addition of integers wraps and has no order, so the result does not depend on which
program comes first.

Importing this file imports Triton; only whoever has a GPU does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK = 4096
"""Words a program reads: 32 KiB."""
_WORD = 8
"""Bytes."""
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0 << 48}
"""The exponent of a number as a mask. All ones there are infinity or not a number."""


@triton.jit
def _sum_kernel(
    words: tl.tensor, starts: tl.tensor, sizes: tl.tensor, owners: tl.tensor, firsts: tl.tensor,
    sums: tl.tensor, is_odd: tl.tensor,
    EXPONENTS: tl.constexpr, BELOW_SIGNS: tl.constexpr, SIGNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    place = (program - tl.load(firsts + tensor)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + tl.load(starts + tensor) + place, mask=place < tl.load(sizes + tensor), other=0)
    tl.atomic_add(sums + tensor, tl.sum(word * (place * 2 + 1), axis=0))
    if EXPONENTS != 0:
        # Zero in the lane of a number whose exponent is all ones. Adding all that is below a lane's sign then carries into
        # the sign of every other lane, and out of none.
        missing = (word & EXPONENTS) ^ EXPONENTS
        odd = ((missing + BELOW_SIGNS) & SIGNS) != SIGNS
        if tl.max(odd.to(tl.int32), axis=0) != 0:
            tl.store(is_odd + tensor, 1)


def inspect_flat(flat: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """(checksum, whether all numbers are finite) of each tensor, given as (first, one past the last) element of `flat`.

    Every tensor begins at a multiple of eight bytes and is followed by zeros up to the next one. Integers are finite.
    """
    size = flat.element_size()
    starts = torch.tensor([start * size // _WORD for start, _ in spans], dtype=torch.int64)
    sizes = torch.tensor([-(-(stop - start) * size // _WORD) for start, stop in spans], dtype=torch.int64)
    blocks = (sizes + _BLOCK - 1) // _BLOCK
    owners = torch.repeat_interleave(torch.arange(len(spans), dtype=torch.int32), blocks)
    firsts = (blocks.cumsum(0) - blocks).to(torch.int32)
    sums = torch.zeros(len(spans), dtype=torch.int64, device=flat.device)
    is_odd = torch.zeros(len(spans), dtype=torch.int32, device=flat.device)
    if len(owners):
        table = [part.to(flat.device) for part in (starts, sizes, owners, firsts)]
        exponents, below, signs = _lanes(flat.dtype)
        _sum_kernel[(len(owners),)](
            flat.view(torch.int64), *table, sums, is_odd,
            EXPONENTS=exponents, BELOW_SIGNS=below, SIGNS=signs, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return [total & 0x7FFFFFFFFFFFFFFF for total in sums.tolist()], [not odd for odd in is_odd.tolist()]


def _lanes(dtype: torch.dtype) -> tuple[int, int, int]:
    """Masks over a word of several numbers: the exponents, all below the signs, the signs. Zeros where none is checked."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return 0, 0, 0
    bits = dtype.itemsize * 8
    exponents, ones = (sum(lane << shift for shift in range(0, 64, bits)) for lane in (exponent, 1))
    below = ones * ((1 << (bits - 1)) - 1)
    return exponents, below, ~below
