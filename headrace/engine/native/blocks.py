"""Which KV blocks are free, which are shared, and which hold a cached prefix.

Every rollout and every pin holds a reference to the blocks of its tokens. A full block is never written again, so any number
may share it. The prefix cache finds a full block by its token ids and the block before it, back to a root that names the
weights, (lineage, version): versions never mix. Unreferenced blocks stay cached until needed, least recently used first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from headrace.records import Array

SCRATCH = 0  # rows without a rollout write to this block; it is never handed out


class BlockPool:
    """Blocks 1 to `num_blocks` - 1; block 0 is scratch."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH, -1))
        self._references = [0] * num_blocks
        self._numbers = itertools.count(1)
        self._cached: dict[tuple[Hashable, bytes], tuple[int, int]] = {}  # (block, its number in the key of the one after it)
        self._key_of: dict[int, tuple[Hashable, bytes]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks that nobody references

    def __len__(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Blocks for the caller alone, evicted from the prefix cache where none is free."""
        assert count <= len(self), f"{count} blocks wanted, {len(self)} free"
        split = max(0, len(self._free) - count)
        taken = self._free[split:][::-1]
        del self._free[split:]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            del self._cached[self._key_of.pop(block)]
            taken.append(block)
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each, a sequence's last block first, so that its start stays cached longest."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was given back too often"
            if self._references[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, root: Hashable, pieces: Iterable[bytes]) -> tuple[list[int], Hashable]:
        """(blocks of the longest cached prefix of a sequence of full blocks, number of the last or `root`)."""
        found: list[int] = []
        number = root
        for piece in pieces:
            cached = self._cached.get((number, piece))
            if cached is None:
                break
            block, number = cached
            found.append(block)
        return found, number

    def remember(self, block: int, after: Hashable, piece: bytes) -> int:
        """Cache a full block by its tokens and the number of the block before it; returns its own number."""
        key = (after, piece)
        if key not in self._cached:
            self._cached[key] = block, next(self._numbers)
            self._key_of[block] = key
        return self._cached[key][1]

    def forget_all(self) -> None:
        """Empty the prefix cache; referenced blocks stay with their holders."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._cached.clear()
        self._key_of.clear()


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens, and the blocks that hold their keys and values."""

    token_ids: Array
    blocks: list[int]
    num_tokens: int


_NOTHING = Computed(np.zeros(0, dtype=np.int32), [], 0)


class Pins:
    """Rollouts whose blocks are kept after they leave their slot, until memory runs short: a fork continues from any of their
    tokens without computing them again. No run pins anything yet; the engine protocol promises it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.by_id: OrderedDict[str, Computed] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        return sum(len(computed.blocks) for computed in self.by_id.values())

    def get(self, rollout_id: str) -> Computed:
        """What is kept of a rollout, perhaps nothing."""
        return self.by_id.get(rollout_id, _NOTHING)

    def pin(self, rollout_id: str) -> None:
        """Keep a rollout's blocks when it leaves its slot, until it is unpinned or memory runs short."""
        self.by_id.setdefault(rollout_id, _NOTHING)

    def unpin(self, rollout_id: str) -> None:
        self._pool.give_back(self.by_id.pop(rollout_id, _NOTHING).blocks)

    def clear(self) -> None:
        for rollout_id in list(self.by_id):
            self.unpin(rollout_id)

    def keep(self, rollout_id: str, computed: Computed) -> None:
        """Called when a pinned rollout leaves its slot."""
        self._pool.share(computed.blocks)
        self._pool.give_back(self.by_id[rollout_id].blocks)
        self.by_id[rollout_id] = computed

    def drop_one(self) -> bool:
        """Free the blocks of one pin; its forks compute them again. False if no pin holds any."""
        for rollout_id, computed in self.by_id.items():
            if computed.blocks:
                self.unpin(rollout_id)
                self.pin(rollout_id)  # the last in line
                return True
        return False
