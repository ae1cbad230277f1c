"""Small kernels that keep the slots' lines on the GPU: new lines, new blocks, and what the rows of a step are fed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.native.cuda.state import SlotState

LINE_FIELDS = 10
"""Slot, length, limit, floor, two halves of the seed, four sampling parameters; then stop tokens, then blocks."""
_WIDTH = 256
_ROWS = 128


@triton.jit
def _lines_kernel(
    given, lengths, limits, floors, alive, seeds, sampling, stops, table, width, num_stops, num_blocks, table_width,
    FIELDS: tl.constexpr, STOPS_PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    line = given + tl.program_id(0).to(tl.int64) * width
    slot = tl.load(line).to(tl.int64)
    tl.store(lengths + slot, tl.load(line + 1))
    tl.store(limits + slot, tl.load(line + 2))
    tl.store(floors + slot, tl.load(line + 3))
    tl.store(alive + slot, 1)
    low, high = tl.load(line + 4).to(tl.uint32, bitcast=True), tl.load(line + 5)
    tl.store(seeds + slot, (high.to(tl.int64) << 32) | low.to(tl.int64))
    field = tl.arange(0, 4)
    tl.store(sampling + slot * 4 + field, tl.load(line + 6 + field).to(tl.float32, bitcast=True))
    stop = tl.arange(0, STOPS_PAD)
    is_stop = stop < num_stops
    tl.store(stops + slot * num_stops + stop, tl.load(line + FIELDS + stop, mask=is_stop, other=-1), mask=is_stop)
    for start in range(0, num_blocks, WIDTH):
        block = start + tl.arange(0, WIDTH)
        is_block = block < num_blocks
        taken = tl.load(line + FIELDS + num_stops + block, mask=is_block, other=0)
        tl.store(table + slot * table_width + block, taken, mask=is_block)


@triton.jit
def _grow_kernel(given, count, table, table_width, MOST: tl.constexpr, ROWS: tl.constexpr):
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_given = entry < tl.minimum(tl.load(count), MOST)
    slot = tl.load(given + entry * 3, mask=is_given, other=0).to(tl.int64)
    index = tl.load(given + entry * 3 + 1, mask=is_given, other=0)
    tl.store(table + slot * table_width + index, tl.load(given + entry * 3 + 2, mask=is_given, other=0), mask=is_given)


@triton.jit
def _rows_kernel(
    slots, tokens, lengths, alive, table, row_slots, row_tokens, row_positions, row_places, rows, nobody, table_width,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    slot = tl.load(slots + row, mask=is_row, other=nobody).to(tl.int64)
    slot = tl.where(tl.load(alive + slot) != 0, slot, nobody)  # one that has ended writes to scratch
    position = tl.where(slot == nobody, 0, tl.load(lengths + slot) - 1)
    block = tl.load(table + slot * table_width + position // BLOCK).to(tl.int64)
    tl.store(row_slots + row, slot.to(tl.int32), mask=is_row)
    tl.store(row_tokens + row, tl.load(tokens + slot), mask=is_row)
    tl.store(row_positions + row, position, mask=is_row)
    tl.store(row_places + row, block * BLOCK + position % BLOCK, mask=is_row)


@triton.jit
def _places_kernel(owners, positions, table, places, rows, table_width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    slot = tl.load(owners + row, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=is_row, other=0)
    block = tl.load(table + slot * table_width + position // BLOCK, mask=is_row, other=0).to(tl.int64)
    tl.store(places + row, block * BLOCK + position % BLOCK, mask=is_row)


def set_lines(given: Tensor, state: SlotState, *, num_blocks: int) -> None:
    """Begin rollouts: each row of `given` [n, fields + stops + blocks] int32 is a slot's line."""
    num_stops = state.stops.shape[1]
    _lines_kernel[(given.shape[0],)](
        given, state.lengths, state.limits, state.floors, state.alive, state.seeds, state.sampling, state.stops, state.table,
        given.stride(0), num_stops, num_blocks, state.table.stride(0),
        FIELDS=LINE_FIELDS, STOPS_PAD=triton.next_power_of_2(num_stops), WIDTH=_WIDTH, num_warps=2,
    )  # fmt: skip


def grow(given: Tensor, count: Tensor, state: SlotState, *, most: int) -> None:
    """More blocks: `given` holds `count` triples of slot, index, block."""
    _grow_kernel[(triton.cdiv(most, _ROWS),)](given, count, state.table, state.table.stride(0), MOST=most, ROWS=_ROWS)


def feed(
    slots: Tensor, state: SlotState, row_slots: Tensor, row_tokens: Tensor, row_positions: Tensor, row_places: Tensor, *, block: int
) -> None:
    """What each row decodes: its slot (nobody's if it has ended), last token, position, and place in the cache."""
    rows, nobody = slots.shape[0], state.tokens.shape[0] - 1
    _rows_kernel[(triton.cdiv(rows, _ROWS),)](
        slots, state.tokens, state.lengths, state.alive, state.table, row_slots, row_tokens, row_positions, row_places,
        rows, nobody, state.table.stride(0), BLOCK=block, ROWS=_ROWS,
    )  # fmt: skip


def find_places(owners: Tensor, positions: Tensor, state: SlotState, places: Tensor, *, block: int) -> None:
    """Flat places in the cache of tokens given by slot and position."""
    rows = owners.shape[0]
    _places_kernel[(triton.cdiv(rows, _ROWS),)](
        owners, positions, state.table, places, rows, state.table.stride(0), BLOCK=block, ROWS=_ROWS
    )
