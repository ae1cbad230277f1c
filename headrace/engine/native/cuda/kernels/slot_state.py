"""The state of the slots; launched, and explained, by `cuda.slot_state`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lines_kernel(
    given, lengths, limits, floors, alive, seeds, sampling, stops, table, width, num_stops, num_blocks, table_width,
    FIELDS: tl.constexpr, STOPS_PAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one new row to its slot."""
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
def grow_kernel(given, count, table, table_width, MOST: tl.constexpr, ROWS: tl.constexpr):
    """Write `count` new blocks into the table; the host passes `count` with them."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_given = entry < tl.minimum(tl.load(count), MOST)
    slot = tl.load(given + entry * 3, mask=is_given, other=0).to(tl.int64)
    index = tl.load(given + entry * 3 + 1, mask=is_given, other=0)
    tl.store(table + slot * table_width + index, tl.load(given + entry * 3 + 2, mask=is_given, other=0), mask=is_given)


@triton.jit
def rows_kernel(
    slots, tokens, lengths, alive, table, row_slots, row_tokens, row_positions, row_places, rows, nobody, table_width,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Inputs of each row of a decode step."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    slot = tl.load(slots + row, mask=is_row, other=nobody).to(tl.int64)
    slot = tl.where(tl.load(alive + slot) != 0, slot, nobody)  # an ended rollout writes to scratch
    position = tl.where(slot == nobody, 0, tl.load(lengths + slot) - 1)
    block = tl.load(table + slot * table_width + position // BLOCK).to(tl.int64)
    tl.store(row_slots + row, slot.to(tl.int32), mask=is_row)
    tl.store(row_tokens + row, tl.load(tokens + slot), mask=is_row)
    tl.store(row_positions + row, position, mask=is_row)
    tl.store(row_places + row, block * BLOCK + position % BLOCK, mask=is_row)


@triton.jit
def places_kernel(owners, positions, table, places, rows, table_width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The cache place of each token of a prompt step."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    slot = tl.load(owners + row, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=is_row, other=0)
    block = tl.load(table + slot * table_width + position // BLOCK, mask=is_row, other=0).to(tl.int64)
    tl.store(places + row, block * BLOCK + position % BLOCK, mask=is_row)
