"""An adapter's two matrix products; launched, and explained, by `cuda.adapters`.

The first is launched only where the linear layer's own product did not compute it. Every row has its own version, at its
`place`. A tile of rows computes each version between its lowest and highest place, with the rows of other versions set to zero:
once, where rows are sorted by version.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places_of(places, row, rows):
    is_row = row < rows
    place = tl.load(places + row, mask=is_row, other=-1)
    return place, tl.min(tl.where(is_row, place, 1 << 30)), tl.max(place)


@triton.jit
def down_kernel(
    hidden, down_0, down_1, down_2, places, out,
    rows, width, share, hidden_stride, place_stride, out_stride, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[split, row, part] = this split's share of the inputs of `hidden` · down, in float32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, split = tl.program_id(1), tl.program_id(2)
    down = down_0
    if part == 1:
        down = down_1
    if part == 2:
        down = down_2
    place, lowest, highest = _places_of(places, row, rows)
    rank, column = tl.arange(0, RANK_PAD), tl.arange(0, TILE)
    start, stop = split * share, tl.minimum(split * share + share, width)
    total = tl.zeros((ROWS, RANK_PAD), dtype=tl.float32)
    matrix = down + lowest.to(tl.int64) * place_stride
    for version in range(lowest, highest + 1):
        is_its = place == version
        for first in range(start, stop, TILE):
            is_column = first + column < stop
            numbers = tl.load(
                hidden + row.to(tl.int64)[:, None] * hidden_stride + (first + column)[None, :],
                mask=is_its[:, None] & is_column[None, :], other=0.0,
            )  # fmt: skip
            weights = tl.load(
                matrix + rank[None, :] * width + (first + column)[:, None],
                mask=(rank < RANK)[None, :] & is_column[:, None], other=0.0,
            )  # fmt: skip
            total = tl.dot(numbers, weights, total, input_precision=PRECISION)
        matrix += place_stride
    to = out + (split.to(tl.int64) * rows + row)[:, None] * out_stride + (part * RANK_PAD + rank)[None, :]
    tl.store(to, total, mask=(row < rows)[:, None])


@triton.jit
def up_kernel(
    output, between, up_0, up_1, up_2, places, out,
    rows, width_0, width_1, width_2, tiles_0, tiles_1,
    place_stride, output_stride, out_stride, between_stride, between_place_stride, part_stride, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = output + scale · (sum of the splits of `between`, at the row's place) · up, rounded where separate operations
    round."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    up, part, width, offset = up_0, 0, width_0, 0
    if tile >= tiles_0:
        up, part, width, offset, tile = up_1, 1, width_1, width_0, tile - tiles_0
        if tile >= tiles_1:
            up, part, width, offset, tile = up_2, 2, width_2, width_0 + width_1, tile - tiles_1
    place, lowest, highest = _places_of(places, row, rows)
    is_row, rank = row < rows, tl.arange(0, RANK_PAD)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    number = out.dtype.element_ty
    inner = tl.zeros((ROWS, RANK_PAD), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = between + (split * rows + row).to(tl.int64)[:, None] * between_stride + (part * part_stride + rank)[None, :]
        at += place[:, None] * between_place_stride
        inner += tl.load(at, mask=is_row[:, None] & (rank < RANK)[None, :], other=0.0).to(tl.float32)
    inner = inner.to(number)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    matrix = up + lowest.to(tl.int64) * place_stride
    for version in range(lowest, highest + 1):
        weights = tl.load(
            matrix + column[None, :] * RANK + rank[:, None],
            mask=is_column[None, :] & (rank < RANK)[:, None], other=0.0,
        )  # fmt: skip
        its = tl.where((place == version)[:, None], inner, 0.0).to(number)
        total = tl.dot(its, weights, total, input_precision=PRECISION)
        matrix += place_stride
    is_wanted = is_row[:, None] & is_column[None, :]
    long_row = row.to(tl.int64)[:, None]
    given = tl.load(output + long_row * output_stride + (offset + column)[None, :], mask=is_wanted, other=0.0).to(tl.float32)
    added = (total.to(number).to(tl.float32) * scale).to(number).to(tl.float32)
    tl.store(out + long_row * out_stride + (offset + column)[None, :], (given + added).to(number), mask=is_wanted)
