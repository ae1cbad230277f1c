"""Pinned rollouts: their KV blocks outlive them, so that forks go on from any of their tokens without computing them again.

A pin holds memory only until something else needs it. No run pins anything yet; `ForkingEngine` promises it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.native.blocks import BlockPool
    from headrace.records import Array


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens, and the blocks that hold their keys and values."""

    token_ids: Array
    blocks: list[int]
    num_tokens: int


class Pins:
    """By rollout id, the longest unused first; None for one that has left nothing yet, or whose blocks were dropped."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.by_id: OrderedDict[str, Computed | None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return sum(len(computed.blocks) for computed in self.by_id.values() if computed is not None)

    def pin(self, rollout_id: str) -> None:
        """Keep a rollout's blocks when it leaves its slot, until it is unpinned or memory is short."""
        self.by_id.setdefault(rollout_id, None)

    def unpin(self, rollout_id: str) -> None:
        self._give_back(self.by_id.pop(rollout_id, None))

    def clear(self) -> None:
        for rollout_id in list(self.by_id):
            self.unpin(rollout_id)

    def keep(self, rollout_id: str, computed: Computed) -> None:
        """A pinned rollout leaves its slot."""
        self._pool.share(computed.blocks)
        self._give_back(self.by_id[rollout_id])
        self.by_id[rollout_id] = computed

    def drop_one(self) -> bool:
        """Free the blocks of one; a fork of it computes its tokens again. False if none holds any."""
        for rollout_id, computed in self.by_id.items():
            if computed is not None:
                self._give_back(computed)
                self.by_id[rollout_id] = None
                self.by_id.move_to_end(rollout_id)
                return True
        return False

    def _give_back(self, computed: Computed | None) -> None:
        if computed is not None:
            self._pool.give_back(computed.blocks)
