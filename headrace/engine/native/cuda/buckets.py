"""The fixed shapes a step runs in: numbers of decode rows or of prompt tokens, each with its own buffers.
The host fills a bucket's control buffer, `Bucket.run` computes the step from it and leaves the sampled tokens in `out`."""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from headrace.engine.native.cuda import sampling
from headrace.engine.native.cuda.attention import PREFILL_ROWS, DecodeContext, PrefillContext
from headrace.model import hidden_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.cuda.adapters import AdapterBank
    from headrace.engine.native.cuda.slot_state import SlotState
    from headrace.engine.native.kv_cache import PagedCache
    from headrace.engine.native.step import Chunk
    from headrace.model import Head, Routers
    from headrace.records import Array

Numbers = TypeVar("Numbers", "Array", "Tensor")

PROMPT_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DECODE_BUCKETS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def decode_buckets(slots: int) -> list[int]:
    """The numbers of rows a decode step is padded to, up to all slots."""
    more = range(1280, slots, 256)
    return sorted({*(size for size in (*_DECODE_BUCKETS, *more) if size < slots), slots})


@dataclass(frozen=True)
class PromptShape:
    tokens: int

    @property
    def sampled(self) -> int:
        return max(min(64, self.tokens), self.tokens // 8)

    @property
    def tiles(self) -> int:
        return self.tokens // 16 + min(64, self.tokens)

    @property
    def edges(self) -> list[int]:
        """Bounds of the control buffer's parts: tokens, positions, owners, tiles, sampled rows and their slots."""
        edges: list[int] = np.cumsum([0, *[self.tokens] * 3, 4 * self.tiles, *[self.sampled] * 2]).tolist()
        return edges

    def parts(self, control: Numbers) -> list[Numbers]:
        """The parts of a control buffer, on the host or the device."""
        parts = [control[start:stop] for start, stop in itertools.pairwise(self.edges)]
        parts[3] = parts[3].reshape(self.tiles, 4)
        return parts


@dataclass(eq=False)
class Bucket:
    """The buffers of one shape of step, and its graphs, with and without restricted rows."""

    control: Tensor
    out: Tensor  # [2 or 3, rows] int32: tokens, the bits of their logprobs and, if they are recorded, of their entropies
    run: Callable[[PreTrainedModel, bool], Tensor | None]  # (model, is some row restricted?) → the allowed tokens if so
    make_scratch: Callable[[], Bucket]  # a bucket of the same shape for a trial run, while this one may be in use
    graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor | None]] = field(default_factory=dict)


class Buckets:
    """All buckets of a runner, each made at its first use."""

    def __init__(
        self,
        state: SlotState,
        head: Head,
        cache: PagedCache,
        *,
        routers: dict[PreTrainedModel, Routers | None],
        bank: AdapterBank | None,
        prompt_buckets: Sequence[int],
        records_entropy: bool,
        device: torch.device,
    ) -> None:
        self._state, self._head, self._cache, self._routers, self._device = state, head, cache, routers, device
        self._bank = bank
        self._num_outputs = 3 if records_entropy else 2
        self._nobody = len(state.tokens) - 1
        self.decode_sizes = decode_buckets(self._nobody)
        self.prompt_shapes = [PromptShape(size) for size in prompt_buckets]
        self.lock = threading.Lock()  # for buckets and graphs, which the decode and the capture thread share
        self._made: dict[int | PromptShape, Bucket] = {}
        self._allowed: Tensor | None = None

    def all(self) -> list[Bucket]:
        return list(self._made.values())

    def get(self, shape: int | PromptShape) -> Bucket:
        """The bucket of decode steps with this many rows, or of prompt steps of this shape."""
        with self.lock:
            if shape not in self._made:
                self._made[shape] = self._make_prompt(shape) if isinstance(shape, PromptShape) else self._make_decode(shape)
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # another thread may use it next, on another stream
            return self._made[shape]

    def _ints(self, *shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=self._device)

    def _make_decode(self, size: int, *, is_scratch: bool = False) -> Bucket:
        """Control: number of new blocks, slot of each row, then (slot, index, block) of each new block."""
        control = self._ints(1 + 4 * size)
        control[1 : 1 + size] = self._nobody
        out = self._ints(self._num_outputs, size)
        row_slots, tokens, positions = self._ints(size), self._ints(size), self._ints(size)
        places = self._ints(size, dtype=torch.int64)
        block = self._cache.block_size

        def run(model: PreTrainedModel, is_restricted: bool) -> Tensor | None:
            state = self._state
            state.add_blocks(control[1 + size :], control[:1], most=size)
            state.feed(control[1 : 1 + size], row_slots, tokens, positions, places, block=block)
            context = DecodeContext(state.table, row_slots, positions, places, block)
            hidden = self._hidden(model, tokens, positions, row_slots, context)
            allowed = self.allowed_rows(size, is_scratch=is_scratch) if is_restricted else None
            return self._sample(hidden, row_slots, out, allowed)

        return Bucket(control, out, run, lambda: self._make_decode(size, is_scratch=True))

    def _make_prompt(self, shape: PromptShape, *, is_scratch: bool = False) -> Bucket:
        control = self._ints(shape.edges[-1])
        tokens, positions, owners, tiles, rows, slots = shape.parts(control)
        owners.fill_(self._nobody)
        slots.fill_(self._nobody)
        out = self._ints(self._num_outputs, shape.sampled)
        places = self._ints(shape.tokens, dtype=torch.int64)
        block = self._cache.block_size

        def run(model: PreTrainedModel, is_restricted: bool) -> Tensor | None:
            state = self._state
            state.find_places(owners, positions, places, block=block)
            context = PrefillContext(state.table, tiles, places, block)
            hidden = self._hidden(model, tokens, positions, owners, context)
            allowed = self.allowed_rows(shape.sampled, is_scratch=is_scratch) if is_restricted else None
            return self._sample(hidden.index_select(0, rows), slots, out, allowed)

        return Bucket(control, out, run, lambda: self._make_prompt(shape, is_scratch=True))

    def _hidden(
        self, model: PreTrainedModel, tokens: Tensor, positions: Tensor, slots: Tensor, context: DecodeContext | PrefillContext
    ) -> Tensor:
        """`slots`: of each row."""
        adding = contextlib.nullcontext() if self._bank is None else self._bank.adding(model, slots)
        with self._cache.recording(self._routers[model], context.places), adding:
            return hidden_states(model, tokens, positions, context)

    def _sample(self, hidden: Tensor, slots: Tensor, out: Tensor, allowed: Tensor | None) -> Tensor | None:
        """Sample into `out`, and if some row is restricted mark what each may sample in `allowed`."""
        head = self._head
        logits = head.product(hidden, head.weight)
        if allowed is not None:
            sampling.restrict(logits, slots, self._state, head.scaling, allowed)
        sampling.sample(logits, slots, self._state, head.scaling, out[0], *out[1:].view(torch.float32))
        return allowed

    def allowed_rows(self, rows: int, *, is_scratch: bool = False) -> Tensor:
        """One buffer for all buckets, read right after each step; a scratch bucket, on another thread, gets its own."""
        vocabulary = self._head.vocabulary
        if is_scratch:
            return torch.empty((rows, vocabulary), dtype=torch.bool, device=self._device)
        with self.lock:
            if self._allowed is None:
                most = max(self.decode_sizes[-1], self.prompt_shapes[-1].sampled)
                self._allowed = torch.empty((most, vocabulary), dtype=torch.bool, device=self._device)
            return self._allowed[:rows]


def tiles_of(chunks: Sequence[Chunk]) -> list[tuple[int, int, int, int]]:
    """(slot, first row, rows, first position) of each tile."""
    tiles, begin = [], 0
    for chunk in chunks:
        for offset in range(0, len(chunk), PREFILL_ROWS):
            tiles.append((chunk.slot, begin + offset, min(PREFILL_ROWS, len(chunk) - offset), chunk.start + offset))
        begin += len(chunk)
    return tiles


def split_chunks(chunks: Sequence[Chunk], most: PromptShape) -> list[list[Chunk]]:
    """Batches of chunks, each as many as the largest prompt bucket holds."""
    batches: list[list[Chunk]] = []
    tokens = sampled = tiles = 0
    for chunk in chunks:
        more = (len(chunk), len(chunk.sampling_slots), -(-len(chunk) // PREFILL_ROWS))
        if not batches or tokens + more[0] > most.tokens or sampled + more[1] > most.sampled or tiles + more[2] > most.tiles:
            batches.append([])
            tokens = sampled = tiles = 0
        batches[-1].append(chunk)
        tokens, sampled, tiles = tokens + more[0], sampled + more[1], tiles + more[2]
    return batches
