"""What the GPU keeps of each slot, so that decode steps follow each other without the host, and the calls that update it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from headrace.engine.native.cuda.kernels.slot_state import grow_kernel, lines_kernel, places_kernel, rows_kernel

if TYPE_CHECKING:
    from torch import Tensor

SLOT_FIELDS = 10
"""A new slot's row begins with slot, length, limit, floor, seed (2), sampling parameters (4); then stop tokens, then blocks."""
_WIDTH = 256  # blocks of a slot a program writes at once
_ROWS = 128  # rows of a program


@dataclass
class SlotState:
    """One row per slot; the last row is nobody's, for rows of a step without a rollout."""

    tokens: Tensor  # [slots + 1] int32: the last token, input of the next step
    lengths: Tensor  # [slots + 1] int32: tokens so far, including the last
    limits: Tensor  # [slots + 1] int32: the length at which the rollout ends
    floors: Tensor  # [slots + 1] int32: the length below which no stop token is sampled
    alive: Tensor  # [slots + 1] int32: 1 until the rollout ends
    seeds: Tensor  # [slots + 1] int64
    sampling: Tensor  # [slots + 1, 4] float32: temperature, top-k, top-p, min-p
    stops: Tensor  # [slots + 1, n] int32: stop tokens, padded with -1
    table: Tensor  # [slots + 1, blocks] int32: the KV blocks

    @classmethod
    def make(cls, *, slots: int, blocks: int, stops: int, device: torch.device | str) -> SlotState:
        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((slots + 1, *shape), fill, dtype=dtype, device=device)

        return cls(
            tokens=ints(),
            lengths=ints(fill=1),
            limits=ints(),
            floors=ints(),
            alive=ints(),
            seeds=ints(dtype=torch.int64),
            sampling=torch.zeros((slots + 1, 4), device=device),  # nobody's row is greedy: no search
            stops=ints(stops, fill=-1),
            table=ints(blocks),
        )

    def start(self, given: Tensor, *, num_blocks: int) -> None:
        """Start rollouts; each row of `given` [n, fields + stops + blocks] int32 fills a slot."""
        num_stops = self.stops.shape[1]
        lines_kernel[(given.shape[0],)](
            given, self.lengths, self.limits, self.floors, self.alive, self.seeds, self.sampling, self.stops, self.table,
            given.stride(0), num_stops, num_blocks, self.table.stride(0),
            FIELDS=SLOT_FIELDS, STOPS_PAD=triton.next_power_of_2(num_stops), WIDTH=_WIDTH, num_warps=2,
        )  # fmt: skip

    def add_blocks(self, given: Tensor, count: Tensor, *, most: int) -> None:
        """Add blocks to tables: `given` holds `count` triples (slot, index, block)."""
        grow_kernel[(triton.cdiv(most, _ROWS),)](given, count, self.table, self.table.stride(0), MOST=most, ROWS=_ROWS)

    def feed(self, slots: Tensor, row_slots: Tensor, tokens: Tensor, positions: Tensor, places: Tensor, *, block: int) -> None:
        """Find each row's slot (nobody's if it has ended), last token, position and place in the cache."""
        rows, nobody = slots.shape[0], self.tokens.shape[0] - 1
        rows_kernel[(triton.cdiv(rows, _ROWS),)](
            slots, self.tokens, self.lengths, self.alive, self.table, row_slots, tokens, positions, places,
            rows, nobody, self.table.stride(0), BLOCK=block, ROWS=_ROWS,
        )  # fmt: skip

    def find_places(self, owners: Tensor, positions: Tensor, places: Tensor, *, block: int) -> None:
        """Find the flat cache places of tokens given by slot and position."""
        rows = owners.shape[0]
        places_kernel[(triton.cdiv(rows, _ROWS),)](
            owners, positions, self.table, places, rows, self.table.stride(0), BLOCK=block, ROWS=_ROWS
        )
