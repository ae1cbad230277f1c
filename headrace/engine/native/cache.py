"""Keys and values in fixed-size blocks, and beside them which experts each token went to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine.native.demand import MEMORY_SHARE
from headrace.engine.native.memory import make_memory
from headrace.model import AttentionSpec, PackedContext, attend, hidden_states, layer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from headrace.model import Routers


@dataclass(frozen=True)
class CacheShape:
    """What one token leaves in each layer, found by running the model once."""

    keys: tuple[tuple[int, int], ...]
    """(heads, dim) by layer."""
    values: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        numbers = sum(heads * dim for heads, dim in (*self.keys, *self.values))
        return numbers * self.dtype.itemsize

    @classmethod
    def of(cls, model: PreTrainedModel) -> CacheShape:
        device = next(model.parameters()).device
        meter = _Meter(device)
        with torch.no_grad():
            hidden_states(model, torch.tensor([1], device=device), torch.tensor([0], device=device), meter)
        layers = range(len(meter.keys))
        return cls(
            keys=tuple(meter.keys[layer] for layer in layers),
            values=tuple(meter.values[layer] for layer in layers),
            dtype=next(model.parameters()).dtype,
            device=device,
        )

    def blocks_that_fit(self, block_size: int) -> int:
        """KV blocks that a share of the free memory holds."""
        return int(MEMORY_SHARE * free_memory(self.device)) // (self.bytes_per_token * block_size)


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Meter(PackedContext):
    """Notes what one token leaves in each layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device=device)
        self.keys: dict[int, tuple[int, int]] = {}
        self.values: dict[int, tuple[int, int]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        layer = layer_of(module)
        self.keys[layer] = (key.shape[1], key.shape[2])
        self.values[layer] = (value.shape[1], value.shape[2])
        return attend(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), spec, allowed=None)[0]


class PagedCache:
    """[blocks × block size, kv heads, head dim] of keys and of values for each layer, all in one piece of memory."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_blocks: int,
        block_size: int,
        routers: Routers | None = None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        rows = num_blocks * block_size
        self.num_bytes = rows * shape.bytes_per_token
        self.memory = make_memory(self.num_bytes, shape.device)
        memory = self.memory.tensor.view(shape.dtype)
        sizes = {heads * dim for heads, dim in (*shape.keys, *shape.values)}
        self._whole = memory.view(2 * len(shape.keys), num_blocks, -1) if len(sizes) == 1 else None
        """Every layer's blocks at once, where all are of one size."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        begin = 0
        for key, value in zip(shape.keys, shape.values, strict=True):
            for (heads, dim), kept in ((key, self.keys), (value, self.values)):
                end = begin + rows * heads * dim
                kept.append(memory[begin:end].view(rows, heads, dim))
                begin = end
        self.routing: Tensor | None = None
        """[blocks × block size, MoE layers, top k]: kept with the blocks, so that cached prompts keep theirs."""
        if routers is not None:
            size = (rows, routers.num_layers, routers.top_k)
            self.routing = torch.zeros(size, dtype=routers.dtype, device=shape.device)

    @property
    def _beside(self) -> list[Tensor]:
        return [] if self.routing is None else [self.routing]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one key and value per row at flat places (block × block size + offset)."""
        self.keys[layer].index_copy_(0, places, key.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(0, places, value.to(self.values[layer].dtype))

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Gather [batch, keys, heads, dim] from [batch, keys] flat places."""
        keys, values = self.keys[layer], self.values[layer]
        flat, shape = places.reshape(-1), places.shape
        return (
            keys.index_select(0, flat).reshape(*shape, *keys.shape[1:]),
            values.index_select(0, flat).reshape(*shape, *values.shape[1:]),
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, each (from, to)."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs, device=self.keys[0].device).unbind(dim=1)
        if self._whole is not None:
            self._whole.index_copy_(1, targets, self._whole.index_select(1, sources))
        for tensor in [*([] if self._whole is not None else [*self.keys, *self.values]), *self._beside]:
            blocks = tensor.view(self.num_blocks, self.block_size, *tensor.shape[1:])
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))
