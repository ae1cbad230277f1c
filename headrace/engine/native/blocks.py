"""Which KV blocks are free, which are shared, and which hold something that may be used again.

Every running rollout holds a reference to the blocks of its tokens. A full block is never written again, so any number may
share it. Two ways lead back to a block:

- The prefix cache finds a full block by its token ids and the block before it, back to a root that names the weights, (lineage,
  version) or an adapter that requests hold: versions never mix.
- A rollout that has left its slot is kept by its id, for its next turn and for its forks, up to its last computed token and
  whatever weights computed it, but with the same adapter.

Unreferenced blocks that either leads to are idle: they stay until a running rollout needs them, least recently used first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterable

    from headrace.engine.request import HeldAdapter
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
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached or kept blocks that nobody references
        self._kept: OrderedDict[str, Computed] = OrderedDict()  # of rollouts without a slot, by id
        self._keepers: dict[int, set[str]] = {}  # the kept rollouts that a block belongs to

    def __len__(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Blocks for the caller alone: free ones, then the oldest of the idle. What they hold stays readable for the step that
        is being planned, which copies blocks before it writes any."""
        assert count <= len(self), f"{count} blocks wanted, {len(self)} free"
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        if block in self._key_of:
            del self._cached[self._key_of.pop(block)]
        for rollout_id in list(self._keepers.get(block, ())):
            self._drop(rollout_id)
        return block

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
                if block in self._key_of or block in self._keepers:
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

    def keep(self, rollout_id: str, computed: Computed) -> None:
        """Keep the blocks of a rollout that leaves its slot, from when they are given back until one of them is needed."""
        self._drop(rollout_id)
        self._kept[rollout_id] = computed
        for block in computed.blocks:
            self._keepers.setdefault(block, set()).add(rollout_id)
        if len(self._kept) > self.num_blocks:  # only if many share all their blocks
            self._drop(next(iter(self._kept)))

    def kept(self, rollout_id: str) -> Computed:
        """What is left of a rollout without a slot, perhaps nothing."""
        return self._kept.get(rollout_id, NOTHING)

    def release(self, rollout_id: str) -> None:
        """It will not continue: its blocks are taken next, the last first, unless another kept rollout has them too."""
        blocks = self.kept(rollout_id).blocks
        self._drop(rollout_id)
        for block in blocks:
            if block in self._idle and block not in self._keepers:
                self._idle.move_to_end(block, last=False)

    def _drop(self, rollout_id: str) -> None:
        for block in self._kept.pop(rollout_id, NOTHING).blocks:
            self._keepers[block].discard(rollout_id)
            if not self._keepers[block]:
                del self._keepers[block]
                if block in self._idle and block not in self._key_of:
                    del self._idle[block]
                    self._free.append(block)

    def forget_prefixes(self, *, but: Iterable[Hashable] = ()) -> set[Hashable]:
        """Empty the prefix cache, except of what starts from these roots; referenced and kept blocks stay with their holders.
        Returns these roots and the numbers of the blocks that stay in the cache."""
        left = set(but)
        if not left:
            self._cached.clear()
            self._key_of.clear()
        for key, (block, number) in list(self._cached.items()):  # a block comes after the one before it
            if key[0] in left:
                left.add(number)
            else:
                del self._cached[key], self._key_of[block]
        gone = {name: replace(each, chain=None) for name, each in self._kept.items() if each.chain not in left}
        self._kept.update(gone)
        for block in [each for each in reversed(self._idle) if each not in self._keepers and each not in self._key_of]:
            del self._idle[block]
            self._free.append(block)
        return left

    def forget_kept(self, *, but: Container[str] = ()) -> None:
        """Keep no rollout but these; blocks in the prefix cache stay there."""
        for rollout_id in [each for each in self._kept if each not in but]:
            self._drop(rollout_id)

    def hold(self, held: HeldAdapter) -> None:
        """What the newest adapter has computed is from now on this one's."""
        newest = {name: computed for name, computed in self._kept.items() if not computed.adapter}
        self._kept.update((name, replace(computed, adapter=held.serial)) for name, computed in newest.items())


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens, and the blocks that hold their keys and values."""

    token_ids: Array
    blocks: list[int]
    num_tokens: int
    chain: Hashable = None
    """Number of the last full block in the prefix cache; None if its blocks mix versions."""
    adapter: int = 0
    """Serial number of the adapter that its rollout held; 0 if none."""


NOTHING = Computed(np.zeros(0, dtype=np.int32), [], 0)
