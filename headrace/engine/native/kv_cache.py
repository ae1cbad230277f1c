"""Keys and values in fixed-size blocks, and with them the experts each token was routed to."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine.native.engine_memory import MEMORY_SHARE
from headrace.engine.native.releasable_memory import make_memory
from headrace.model import AttentionSpec, attend, hidden_states, layer_of
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from headrace.model import Routers
    from headrace.records import Array


@dataclass(frozen=True)
class CacheShape:
    """What one token stores in each layer, found by running the model once."""

    keys: tuple[tuple[int, int], ...]  # (heads, dim) by layer
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
        recorder = _ShapeRecorder()
        with torch.no_grad():
            hidden_states(model, torch.tensor([1], device=device), torch.tensor([0], device=device), recorder)
        keys, values = zip(*(shapes for _, shapes in sorted(recorder.shapes.items())), strict=True)
        return cls(keys, values, dtype=next(model.parameters()).dtype, device=device)

    def blocks_that_fit(self, block_size: int) -> int:
        """KV blocks that fit in a share of the free memory."""
        return int(MEMORY_SHARE * free_memory(self.device)) // (self.bytes_per_token * block_size)

    def choose_num_blocks(self, block_size: int, *, slots: int, context: int, most_blocks: int, max_tokens: int) -> int:
        """As many blocks as the slots can use (`most_blocks` if known), within a share of the free memory."""
        fitting = self.blocks_that_fit(block_size)
        usable = most_blocks or slots * math.ceil(context / block_size) + 1
        one = min(context, max_tokens + 1) if most_blocks else context  # longer prompts are refused one by one
        least = math.ceil(one / block_size) + 1
        if fitting < least:
            lower = "sampling.max_tokens" if most_blocks else "model.context"
            raise ConfigError(
                f"engine.kv_blocks = 0: one rollout of {one} tokens needs {least} KV blocks, and the memory that an engine may "
                f"take holds {fitting} of the {usable} it could use; free some, lower {lower}, or set engine.kv_blocks"
            )
        return min(usable, fitting)


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _ShapeRecorder:
    """An attention context that records the shapes of the key and the value that one token stores in each layer."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.shapes[layer_of(module)] = (key.shape[1], key.shape[2]), (value.shape[1], value.shape[2])
        return attend(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), spec, allowed=None)[0]


class PagedCache:
    """Keys and values [blocks × block size, kv heads, head dim] of every layer, in one piece of memory."""

    def __init__(self, shape: CacheShape, *, num_blocks: int, block_size: int, routers: Routers | None = None) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        rows = num_blocks * block_size
        self.num_bytes = rows * shape.bytes_per_token
        self.memory = make_memory(self.num_bytes, shape.device)
        memory = self.memory.tensor.view(shape.dtype)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        begin = 0
        for key, value in zip(shape.keys, shape.values, strict=True):
            for (heads, dim), tensors in ((key, self.keys), (value, self.values)):
                end = begin + rows * heads * dim
                tensors.append(memory[begin:end].view(rows, heads, dim))
                begin = end
        self.routing: Tensor | None = None  # [blocks × block size, MoE layers, top k]: cached prompts keep their routing
        if routers is not None:
            size = (rows, routers.num_layers, routers.top_k)
            self.routing = torch.zeros(size, dtype=routers.dtype, device=shape.device)
        sizes = {heads * dim for heads, dim in (*shape.keys, *shape.values)}
        kept = [*self.keys, *self.values] if len(sizes) > 1 else []
        kept += [] if self.routing is None else [self.routing]
        self._copied = [each.view(1, num_blocks, -1) for each in kept]  # [tensors, blocks, numbers]
        if len(sizes) == 1:  # all layers at once
            self._copied.append(memory.view(2 * len(shape.keys), num_blocks, -1))

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

    def read_routing(self, places: Array) -> Array:
        """[places, MoE layers, top k]: the expert ids of an MoE model at flat places."""
        assert self.routing is not None
        rows: Array = self.routing.index_select(0, torch.from_numpy(places).to(self.routing.device)).cpu().numpy()
        return rows

    def recording(self, routers: Routers | None, places: Tensor) -> contextlib.AbstractContextManager[object]:
        """Within it, a forward pass stores the experts of its tokens at these places."""
        routing = self.routing
        if routers is None or routing is None:
            return contextlib.nullcontext()

        def keep(layer: int, indices: Tensor) -> None:
            routing[:, layer].index_copy_(0, places, indices.to(routing.dtype))

        return routers.recording(keep)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to)."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.keys[0].device).unbind(dim=1)
            for tensor in self._copied:
                tensor.index_copy_(1, targets, tensor.index_select(1, sources))
