"""Small kernels that keep the slots' lines on the GPU: new lines, new blocks, and what the rows of a step are fed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from headrace.engine.native.cuda.kernels.lines import grow_kernel, lines_kernel, places_kernel, rows_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.native.cuda.state import SlotState

LINE_FIELDS = 10
"""Slot, length, limit, floor, two halves of the seed, four sampling parameters; then stop tokens, then blocks."""
_WIDTH = 256
"""Blocks of a line a program writes at once."""
_ROWS = 128
"""Rows one program serves."""


def set_lines(given: Tensor, state: SlotState, *, num_blocks: int) -> None:
    """Begin rollouts: each row of `given` [n, fields + stops + blocks] int32 is a slot's line."""
    num_stops = state.stops.shape[1]
    lines_kernel[(given.shape[0],)](
        given, state.lengths, state.limits, state.floors, state.alive, state.seeds, state.sampling, state.stops, state.table,
        given.stride(0), num_stops, num_blocks, state.table.stride(0),
        FIELDS=LINE_FIELDS, STOPS_PAD=triton.next_power_of_2(num_stops), WIDTH=_WIDTH, num_warps=2,
    )  # fmt: skip


def grow(given: Tensor, count: Tensor, state: SlotState, *, most: int) -> None:
    """More blocks: `given` holds `count` triples of slot, index, block."""
    grow_kernel[(triton.cdiv(most, _ROWS),)](given, count, state.table, state.table.stride(0), MOST=most, ROWS=_ROWS)


def feed(
    slots: Tensor,
    state: SlotState,
    row_slots: Tensor,
    row_tokens: Tensor,
    row_positions: Tensor,
    row_places: Tensor,
    *,
    block: int,
) -> None:
    """What each row decodes: its slot (nobody's if it has ended), last token, position, and place in the cache."""
    rows, nobody = slots.shape[0], state.tokens.shape[0] - 1
    rows_kernel[(triton.cdiv(rows, _ROWS),)](
        slots, state.tokens, state.lengths, state.alive, state.table, row_slots, row_tokens, row_positions, row_places,
        rows, nobody, state.table.stride(0), BLOCK=block, ROWS=_ROWS,
    )  # fmt: skip


def find_places(owners: Tensor, positions: Tensor, state: SlotState, places: Tensor, *, block: int) -> None:
    """Flat places in the cache of tokens given by slot and position."""
    rows = owners.shape[0]
    places_kernel[(triton.cdiv(rows, _ROWS),)](
        owners, positions, state.table, places, rows, state.table.stride(0), BLOCK=block, ROWS=_ROWS
    )
