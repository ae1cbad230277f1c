"""Keys and values in fixed-size blocks, handed out from a free list."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from headrace.model.attention import AttentionSpec, PackedContext, attend
from headrace.model.load import hidden_states

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SCRATCH = 0
"""The block that rows without a rollout write to; never handed out."""


_MEMORY_SHARE = 0.4
"""Of the memory free when the engine starts; the rest is for the trainer and for computing."""


def blocks_that_fit(model: PreTrainedModel, block_size: int) -> int:
    """KV blocks that a share of the free memory holds, by the shapes the model's layers really produce."""
    device = next(model.parameters()).device
    meter = _Meter()
    with torch.no_grad():
        hidden_states(model, torch.tensor([1], device=device), torch.tensor([0], device=device), meter)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_MEMORY_SHARE * free) // (meter.bytes_per_token * block_size)


class _Meter(PackedContext):
    """Adds up what one token leaves in the cache."""

    def __init__(self) -> None:
        super().__init__([1])
        self.bytes_per_token = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.bytes_per_token += key.nbytes + value.nbytes
        return attend(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), spec, allowed=None)[0]


class BlockPool:
    """Which blocks are free. A block belongs to at most one rollout."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, SCRATCH, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))


class PagedCache:
    """[blocks × block size, kv heads, head dim] of keys and of values for each layer.

    A layer's tensors are made when it first writes, so that its shapes are whatever the model really produces.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one key and value per row at flat places (block × block size + offset)."""
        if layer not in self._layers:
            rows = self.num_blocks * self.block_size
            self._layers[layer] = (
                torch.zeros(rows, *key.shape[1:], dtype=key.dtype, device=key.device),
                torch.zeros(rows, *value.shape[1:], dtype=value.dtype, device=value.device),
            )
        keys, values = self._layers[layer]
        keys.index_copy_(0, places, key)
        values.index_copy_(0, places, value)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Gather [batch, keys, heads, dim] from [batch, keys] flat places."""
        keys, values = self._layers[layer]
        flat, shape = places.reshape(-1), places.shape
        return (
            keys.index_select(0, flat).reshape(*shape, *keys.shape[1:]),
            values.index_select(0, flat).reshape(*shape, *values.shape[1:]),
        )
