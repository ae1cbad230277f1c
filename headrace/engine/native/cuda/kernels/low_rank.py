"""An adapter's two matrix products; launched, and explained, by `cuda.adapters`.

The first is launched only where the linear layer's own product did not compute it. Every row has its own version, at its
`place`. A tile of rows computes each version between its lowest and highest place, with the rows of other versions set to zero:
once, where rows are sorted by version.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


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
def _matrix(up, column, is_column, rank, RANK: tl.constexpr):
    return tl.load(up + column[None, :] * RANK + rank[:, None], mask=is_column[None, :] & (rank < RANK)[:, None], other=0.0)


@triton.jit
def _with_added(
    output, between, up, matrix, place, lowest, highest, row, column, is_column, rows,
    place_stride, output_stride, between_stride, between_place_stride, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """A tile of the layer's output with what the adapter adds, rounded where separate operations round. `matrix`: its second
    matrix, if there is one version."""
    rank, is_row = tl.arange(0, RANK_PAD), row < rows
    number = output.dtype.element_ty
    at = between + row.to(tl.int64)[:, None] * between_stride + rank[None, :]
    if not IS_ONE:
        at += place[:, None] * between_place_stride
    is_wanted = is_row[:, None] & is_column[None, :]
    given = tl.load(output + row.to(tl.int64)[:, None] * output_stride + column[None, :], mask=is_wanted, other=0.0)
    is_inner = is_row[:, None] & (rank < RANK)[None, :]
    inner = tl.load(at, mask=is_inner, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(at + split * rows * between_stride, mask=is_inner, other=0.0).to(tl.float32)
    inner = inner.to(number)
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    if IS_ONE:
        total = tl.dot(inner, matrix, total, input_precision=PRECISION)
    else:
        its_up = up + lowest.to(tl.int64) * place_stride
        for version in range(lowest, highest + 1):
            its = tl.where((place == version)[:, None], inner, 0.0).to(number)
            total = tl.dot(its, _matrix(its_up, column, is_column, rank, RANK), total, input_precision=PRECISION)
            its_up += place_stride
    added = (total.to(number).to(tl.float32) * scale).to(number).to(tl.float32)
    return (given.to(tl.float32) + added).to(number)


@triton.jit
def up_kernel(
    output, between, up_0, up_1, up_2, places, out,
    rows, width_0, width_1, width_2, tiles_0, tiles_1,
    place_stride, output_stride, out_stride, between_stride, between_place_stride, part_stride, scale,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    IS_ONE: tl.constexpr, IS_GATED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """out = output + scale · (sum of the splits of `between`, at the row's place) · up. `IS_ONE`: there is one place.
    `IS_GATED`: of the two layers, silu(first) · second. `IS_EARLY`: launched before the kernel before it has ended."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    up, part, width, offset = up_0, 0, width_0, 0
    if not IS_GATED:  # noqa: SIM102  (known to the compiler)
        if tile >= tiles_0:
            up, part, width, offset, tile = up_1, 1, width_1, width_0, tile - tiles_0
            if tile >= tiles_1:
                up, part, width, offset, tile = up_2, 2, width_2, width_0 + width_1, tile - tiles_1
    rank = tl.arange(0, RANK_PAD)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    if IS_ONE:
        place, lowest, highest = row, 0, 0
        matrix = _matrix(up, column, is_column, rank, RANK)
        other = _matrix(up_1, column, is_column, rank, RANK) if IS_GATED else matrix
    else:
        place, lowest, highest = _places_of(places, row, rows)
        matrix, other = rank, rank
    if IS_EARLY:
        gdc_wait()
    found = _with_added(
        output + offset, between + part * part_stride, up, matrix, place, lowest, highest, row, column, is_column, rows,
        place_stride, output_stride, between_stride, between_place_stride, scale, RANK, RANK_PAD, SPLITS, PRECISION, IS_ONE,
    )  # fmt: skip
    if IS_GATED:
        factor = _with_added(
            output + width_0, between + part_stride, up_1, other, place, lowest, highest, row, column, is_column, rows,
            place_stride, output_stride, between_stride, between_place_stride, scale, RANK, RANK_PAD, SPLITS, PRECISION, IS_ONE,
        )  # fmt: skip
        gate = found.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(found.dtype)
        found = (gate.to(tl.float32) * factor.to(tl.float32)).to(found.dtype)
    to = out + row.to(tl.int64)[:, None] * out_stride + (offset + column)[None, :]
    tl.store(to, found, mask=(row < rows)[:, None] & is_column[None, :])
