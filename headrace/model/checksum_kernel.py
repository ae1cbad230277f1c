"""Checksums of an arena's tensors in one launch per dtype, and whether each holds only finite numbers.

The values are those of `weights.checksum`. Each program adds one block's share to its tensor's sum; integers wrap, so the
order of programs does not matter. Imports Triton: import it only for a GPU.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.model.arena import Arena
    from headrace.records import Array

_TILE, _TILES, _WARPS = 1024, 16, 4  # a program reads 16 tiles of 1,024 words, 128 KiB, and reduces across threads once
_BLOCK = _TILE * _TILES
_WORD = 8  # bytes
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0 << 48}
"""Masks of the exponent; all ones there mean infinity or NaN."""


@triton.jit
def _sum_kernel(
    words: tl.tensor, starts: tl.tensor, sizes: tl.tensor, owners: tl.tensor, firsts: tl.tensor,
    skipped: tl.tensor, sums: tl.tensor, is_odd: tl.tensor,
    EXPONENTS: tl.constexpr, BELOW_SIGNS: tl.constexpr, SIGNS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start, size = tl.load(starts + tensor), tl.load(sizes + tensor)
    first = (program - tl.load(firsts + tensor)).to(tl.int64) * (TILE * TILES)
    before = tl.load(skipped + tensor)
    total = tl.zeros([TILE], dtype=tl.int64)
    even = tl.full([TILE], SIGNS, dtype=tl.int64)
    for tile in range(TILES):
        place = first + tile * TILE + tl.arange(0, TILE)
        word = tl.load(words + start + place, mask=place < size, other=0)
        total += word * ((before + place) * 2 + 1)
        if EXPONENTS != 0:
            # A lane is 0 if its exponent is all ones. Adding the mask below the signs then carries into the sign of every
            # other lane, and never into the next lane.
            even &= ((word & EXPONENTS) ^ EXPONENTS) + BELOW_SIGNS
    tl.atomic_add(sums + tensor, tl.sum(total, axis=0))
    if EXPONENTS != 0:  # noqa: SIM102  (known when it is compiled; what follows is not)
        if tl.max(((even & SIGNS) != SIGNS).to(tl.int32), axis=0) != 0:
            tl.store(is_odd + tensor, 1)


class FlatTables:
    """Which block belongs to which tensor of an arena, on its device; valid for every arena of the same layout. Every tensor
    starts at a multiple of eight bytes and is followed by zeros up to the next. Integers count as finite. `first_words`: of
    tensors that are a range of a larger one, the place of their first word in it."""

    def __init__(self, arena: Arena, first_words: Mapping[str, int] = MappingProxyType({})) -> None:
        device = arena.memory.device
        self._found = torch.zeros(2, len(arena.slots), dtype=torch.int64, device=device)
        self._tables: dict[torch.dtype, tuple[Tensor, ...]] = {}  # the kernel's arguments after `words`, by dtype
        places: list[int] = []
        for dtype in arena.flat:
            slots = {place: slot for place, slot in enumerate(arena.slots.values()) if slot.dtype == dtype}
            before = [first_words.get(name, 0) for name, slot in arena.slots.items() if slot.dtype == dtype]
            starts = torch.tensor([slot.start * dtype.itemsize // _WORD for slot in slots.values()], dtype=torch.int64)
            num_words = [-(-(slot.stop - slot.start) * dtype.itemsize // _WORD) for slot in slots.values()]
            sizes = torch.tensor(num_words, dtype=torch.int64)
            blocks = (sizes + _BLOCK - 1) // _BLOCK
            owners = torch.repeat_interleave(torch.arange(len(slots), dtype=torch.int32), blocks)
            firsts = (blocks.cumsum(0) - blocks).to(torch.int32)
            sums, is_odd = self._found[:, len(places) : len(places) + len(slots)]
            skipped = torch.tensor(before, dtype=torch.int64)
            self._tables[dtype] = (*(table.to(device) for table in (starts, sizes, owners, firsts, skipped)), sums, is_odd)
            places += slots
        self._order = np.argsort(np.asarray(places, dtype=np.int64))

    def inspect(self, arena: Arena) -> tuple[Array, str | None]:
        """(uint64 checksums in the order of the slots, name of the first tensor with NaN or infinity). Not thread-safe."""
        self._found.zero_()
        for dtype, table in self._tables.items():
            owners = table[2]
            if len(owners):
                exponents, below, signs = _lanes(dtype)
                _sum_kernel[(len(owners),)](
                    arena.flat[dtype].view(torch.int64), *table,
                    EXPONENTS=exponents, BELOW_SIGNS=below, SIGNS=signs, TILE=_TILE, TILES=_TILES, num_warps=_WARPS,
                )  # fmt: skip
        sums, is_odd = self._found.cpu().numpy()[:, self._order]
        odd = np.flatnonzero(is_odd)
        return sums.astype(np.uint64), list(arena.slots)[odd[0]] if len(odd) else None


def _lanes(dtype: torch.dtype) -> tuple[int, int, int]:
    """Masks over a word of several numbers: exponents, all bits below the signs, signs. Zeros for integers."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return 0, 0, 0
    bits = dtype.itemsize * 8
    exponents, ones = (sum(lane << shift for shift in range(0, 64, bits)) for lane in (exponent, 1))
    below = ones * ((1 << (bits - 1)) - 1)
    return exponents, below, ~below
