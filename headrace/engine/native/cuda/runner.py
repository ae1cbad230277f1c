"""Steps on a GPU: control goes up in one copy, one or two graphs run, what was drawn comes down in one copy.

The GPU keeps each rollout's length, limit, stop tokens and last token itself, so a decode step needs nothing the step
before it drew, and the host prepares the next while this one runs. A rollout that has ended, which the host learns a step
late, computes into scratch.

Work runs in buckets: so many rows of decode, so many tokens of prompts. Until a bucket's graph is captured, by a thread
beside the one that decodes, its work is run eagerly over the model itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from headrace.engine.native.cuda import attention, compiled, lines, sampling
from headrace.engine.native.cuda.ops import DecodeContext, PrefillContext
from headrace.engine.native.cuda.queue import Queue
from headrace.engine.native.cuda.state import SlotState
from headrace.engine.native.work import Drawn
from headrace.model import find_readable_routers, hidden_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.cache import PagedCache
    from headrace.engine.native.work import Chunk, Slots, Work
    from headrace.model import Head, Routers
    from headrace.records import Array

log = logging.getLogger("headrace.engine")
Numbers = TypeVar("Numbers", "Array", "Tensor")

_STOPS = 16
_PROMPT_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_DECODE_BUCKETS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def decode_buckets(slots: int) -> list[int]:
    """Numbers of rows a decode step may have, up to all slots."""
    more = range(1280, slots, 256)
    return sorted({*(size for size in (*_DECODE_BUCKETS, *more) if size < slots), slots})


@dataclass(frozen=True)
class _PromptShape:
    """What a prompt bucket holds."""

    tokens: int

    @property
    def draws(self) -> int:
        return max(min(64, self.tokens), self.tokens // 8)

    @property
    def tiles(self) -> int:
        return self.tokens // 16 + min(64, self.tokens)

    @property
    def control(self) -> int:
        """int32 numbers of its control buffer: tokens, positions, owners, tiles, rows and slots of draws."""
        return 3 * self.tokens + 4 * self.tiles + 2 * self.draws


@dataclass(eq=False)
class _Bucket:
    """The buffers of one kind of step, and its graphs, with and without cut rows."""

    control: Tensor
    out: Tensor
    """[2, rows] int32: tokens, and the bits of their logprobs."""
    run: Callable[[PreTrainedModel, bool], Tensor | None]
    """Computes a step from the control buffer; what the cut rows may draw."""
    graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor | None]]


@dataclass(eq=False)
class _Part:
    """One graph's share of a step."""

    host: Tensor
    """[2 × bucket] int32, as the bucket's `out`, in borrowed memory."""
    size: int
    rows: int
    allowed: list[Array] | None


@dataclass(eq=False)
class _Ticket:
    """A step under way, and the host memory lent to it."""

    parts: list[_Part]
    done: torch.cuda.Event | None
    lent: list[Tensor]


class CudaRunner:
    """A step is launched without waiting for the one before."""

    ahead = 1

    def __init__(
        self,
        model: PreTrainedModel,
        twin: PreTrainedModel,
        head: Head,
        cache: PagedCache,
        slots: Slots,
        *,
        routers: Routers | None,
        prompt_buckets: Sequence[int] = _PROMPT_BUCKETS,
    ) -> None:
        """`twin` is the model's, made before anything was hooked to it; the model itself runs what is not captured yet."""
        self.cache, self._slots, self._head = cache, slots, head
        self._device = next(model.parameters()).device
        self._model, self._twin = model, twin
        self._routers = {model: routers, twin: find_readable_routers(twin)}
        self._compile = routers is None
        for each in (model, twin):
            compiled.attach_cache(each, cache)
        self._state = SlotState.make(slots=len(slots.length), blocks=slots.table.shape[1], stops=_STOPS, device=self._device)
        self._nobody = len(slots.length)
        self._scaling = head.scaling
        self._queue = Queue(self._device)
        self._prompt_shapes = [_PromptShape(size) for size in prompt_buckets]
        self.most_tokens, self.most_draws = self._prompt_shapes[-1].tokens, self._prompt_shapes[-1].draws
        self._decode_sizes = decode_buckets(len(slots.length))
        self._decode: dict[int, _Bucket] = {}
        self._prompt: dict[int, _Bucket] = {}
        self._new: dict[int, None] = {}
        self._grown: dict[int, list[tuple[int, int]]] = {}
        self._lent: list[Tensor] = []
        self._lock = threading.Lock()
        self._allowed: Tensor | None = None
        self._pool: Any = None
        self._is_started: set[bool] = set()
        self._is_closing = False
        self._warming: threading.Thread | None = None
        self._turn = threading.Condition()
        """Of the thread that captures and the one that decodes, which may have the memory given back."""
        self._is_resting = self._is_capturing = False

    # Told by the scheduler

    def begin(self, slot: int) -> None:
        self._new[slot] = None
        self._grown.pop(slot, None)  # blocks of whoever was there

    def grow(self, slot: int, index: int, block: int) -> None:
        if slot not in self._new:
            self._grown.setdefault(slot, []).append((index, block))

    # A step

    @torch.no_grad()
    def launch(self, work: Work) -> _Ticket:
        with self._queue.entered():
            if self._new:
                self._set_lines()
            self.cache.copy(work.copies_before)
            parts = [self._launch_chunks(chunks) for chunks in _batches(work.chunks, self._prompt_shapes[-1])]
            self.cache.copy(work.copies_after)
            if len(work.decoding):
                parts.append(self._launch_decode(work.decoding))
            lent, self._lent = self._lent, []
            return _Ticket(parts, self._queue.mark(), lent)

    def collect(self, ticket: object) -> Drawn:
        assert isinstance(ticket, _Ticket)
        self._queue.wait(ticket.done)
        tokens: list[Array] = []
        logprobs: list[Array] = []
        allowed: list[Array] = []
        is_cut = False
        for part in ticket.parts:
            numbers = part.host.numpy()[: 2 * part.size].reshape(2, part.size)[:, : part.rows].copy()
            tokens.append(numbers[0])
            logprobs.append(numbers[1].view(np.float32))
            is_cut |= part.allowed is not None
            allowed += part.allowed if part.allowed is not None else [_NOTHING] * part.rows
        for buffer in ticket.lent:
            self._queue.give_back(buffer)
        return Drawn(np.concatenate(tokens), np.concatenate(logprobs), allowed if is_cut else None)

    def settle(self) -> None:
        self._queue.settle()

    def rest(self) -> None:
        """Waits for the capture under way, the first of which compiles the model's layers; the next waits for `rouse`."""
        with self._turn:
            self._is_resting = True
            self._turn.wait_for(lambda: not self._is_capturing)
        self._queue.settle()

    def rouse(self) -> None:
        with self._turn:
            self._is_resting = False
            self._turn.notify_all()

    def routing(self, places: Array) -> Array | None:
        if self.cache.routing is None:
            return None
        with self._queue.entered():
            index = torch.from_numpy(np.ascontiguousarray(places)).to(self._device)
            rows: Array = self.cache.routing.index_select(0, index).cpu().numpy()
        return rows

    def in_order(self, action: Callable[[], None]) -> None:
        """Do something on the GPU after what was launched and before what will be."""
        with self._queue.entered():
            action()

    def _borrow(self, numbers: int) -> Tensor:
        """Host memory of the step being launched."""
        buffer = self._queue.borrow(numbers)
        self._lent.append(buffer)
        return buffer

    def _set_lines(self) -> None:
        new, slots = list(self._new), self._slots
        self._new.clear()
        if slots.stops.shape[1] > self._state.stops.shape[1]:
            self._widen_stops(slots.stops.shape[1])
        num_stops, given_stops = self._state.stops.shape[1], slots.stops.shape[1]
        at = np.asarray(new, dtype=np.int64)
        num_blocks = int((slots.table[at] != 0).sum(axis=1).max())
        width = lines.LINE_FIELDS + num_stops + num_blocks
        buffer = self._borrow(len(new) * width)
        given = buffer.numpy()[: len(new) * width].reshape(len(new), width)
        given[:, 0], given[:, 1], given[:, 2], given[:, 3] = at, slots.length[at], slots.limit[at], slots.floor[at]
        given[:, 4:6] = slots.seed[at].view(np.int32).reshape(-1, 2)
        given[:, 6:10] = slots.sampling[at].view(np.int32)
        given[:, 10 : 10 + num_stops] = -1
        given[:, 10 : 10 + given_stops] = slots.stops[at]
        given[:, 10 + num_stops :] = slots.table[at, :num_blocks]
        on_device = buffer[: len(new) * width].to(self._device, non_blocking=True).view(len(new), width)
        lines.set_lines(on_device, self._state, num_blocks=num_blocks)

    def _widen_stops(self, width: int) -> None:
        """More stop tokens than there was room for: the graphs that hold the old address are captured again."""
        wider = torch.full((self._nobody + 1, width), -1, dtype=torch.int32, device=self._device)
        wider[:, : self._state.stops.shape[1]] = self._state.stops
        self._queue.settle()  # none of them is running
        with self._lock:
            self._state.stops = wider
            for bucket in (*self._decode.values(), *self._prompt.values()):
                bucket.graphs.clear()
            started, self._is_started = self._is_started, set()
        for is_cut in sorted(started):
            self.start_warming(is_cut=is_cut)

    def _launch_decode(self, decoding: Array) -> _Part:
        rows = len(decoding)
        size = next(size for size in self._decode_sizes if size >= rows)
        bucket = self._decode_bucket(size)
        triples = [(slot, index, block) for slot, grown in self._grown.items() for index, block in grown]
        self._grown.clear()
        buffer = self._borrow(bucket.control.numel())
        control = buffer.numpy()
        control[0] = len(triples)
        control[1 : 1 + rows] = decoding
        control[1 + rows : 1 + size] = self._nobody
        assert len(triples) <= size, "a rollout grows by at most one block a step"
        if triples:
            control[1 + size : 1 + size + 3 * len(triples)] = np.asarray(triples, dtype=np.int32).reshape(-1)
        return self._launch_bucket(bucket, buffer, decoding)

    def _launch_chunks(self, chunks: Sequence[Chunk]) -> _Part:
        tokens = sum(map(len, chunks))
        draws = [slot for chunk in chunks for slot in chunk.draws]
        tiles = _tiles(chunks)
        shape = next(s for s in self._prompt_shapes if s.tokens >= tokens and s.draws >= len(draws) and s.tiles >= len(tiles))
        bucket = self._prompt_bucket(shape)
        buffer = self._borrow(bucket.control.numel())
        token_part, position_part, owner_part, tile_part, row_part, slot_part = _prompt_parts(buffer.numpy(), shape)
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk)
            token_part[begin:end] = self._slots.tokens[chunk.slot, chunk.start : chunk.stop]
            position_part[begin:end] = np.arange(chunk.start, chunk.stop)
            owner_part[begin:end] = chunk.slot
            begin = end
        token_part[begin:], position_part[begin:], owner_part[begin:] = 0, 0, self._nobody
        tile_part[: len(tiles)], tile_part[len(tiles) :] = tiles, 0
        ends = np.cumsum([len(chunk) for chunk in chunks]) - 1
        row_part[: len(draws)] = np.repeat(ends, [len(chunk.draws) for chunk in chunks])
        slot_part[: len(draws)] = draws
        row_part[len(draws) :], slot_part[len(draws) :] = 0, self._nobody
        return self._launch_bucket(bucket, buffer, np.asarray(draws, dtype=np.int64))

    def _launch_bucket(self, bucket: _Bucket, buffer: Tensor, drawing: Array) -> _Part:
        """`drawing`: the slots of its rows."""
        cut = np.flatnonzero(self._slots.is_cut_now(drawing))
        is_cut, rows = len(cut) > 0, len(drawing)
        bucket.control.copy_(buffer[: bucket.control.numel()], non_blocking=True)
        captured = bucket.graphs.get(is_cut)
        if captured is None:
            if self._is_started:
                self.start_warming(is_cut=is_cut)
            allowed = bucket.run(self._model, is_cut)
        else:
            captured[0].replay()
            allowed = captured[1]
        host = self._borrow(bucket.out.numel())
        host[: bucket.out.numel()].copy_(bucket.out.view(-1), non_blocking=True)
        masks = None
        if allowed is not None:
            ids = allowed.index_select(0, torch.from_numpy(cut).to(self._device)).nonzero().cpu().numpy()
            of_cut = np.split(ids[:, 1].astype(np.int32), np.searchsorted(ids[:, 0], np.arange(1, len(cut))))
            masks = [_NOTHING] * rows
            for row, mask in zip(cut.tolist(), of_cut, strict=True):
                masks[row] = mask
        return _Part(host, bucket.out.shape[1], rows, masks)

    # Buckets

    def _decode_bucket(self, size: int) -> _Bucket:
        with self._lock:
            if size not in self._decode:
                self._decode[size] = self._make_decode_bucket(size)
                self._wait_for_device()  # another thread may use it next, on another stream
            return self._decode[size]

    def _prompt_bucket(self, shape: _PromptShape) -> _Bucket:
        with self._lock:
            if shape.tokens not in self._prompt:
                self._prompt[shape.tokens] = self._make_prompt_bucket(shape)
                self._wait_for_device()
            return self._prompt[shape.tokens]

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _ints(self, *shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=self._device)

    def _make_decode_bucket(self, size: int, *, is_scratch: bool = False) -> _Bucket:
        control = self._ints(1 + 4 * size)
        control[1 : 1 + size] = self._nobody
        out = self._ints(2, size)
        row_slots, tokens, positions = self._ints(size), self._ints(size), self._ints(size)
        places = self._ints(size, dtype=torch.int64)
        block = self.cache.block_size

        def run(model: PreTrainedModel, is_cut: bool) -> Tensor | None:
            state = self._state
            lines.grow(control[1 + size :], control[:1], state, most=size)
            lines.feed(control[1 : 1 + size], state, row_slots, tokens, positions, places, block=block)
            context = DecodeContext(state.table, row_slots, positions, places, block)
            hidden = self._hidden(model, tokens, positions, context)
            allowed = self._allowed_rows(size, is_scratch=is_scratch) if is_cut else None
            return self._draw(hidden, row_slots, out, allowed)

        return _Bucket(control, out, run, {})

    def _make_prompt_bucket(self, shape: _PromptShape, *, is_scratch: bool = False) -> _Bucket:
        control = self._ints(shape.control)
        tokens, positions, owners, tiles, rows, slots = _prompt_parts(control, shape)
        owners.fill_(self._nobody)
        slots.fill_(self._nobody)
        out = self._ints(2, shape.draws)
        places = self._ints(shape.tokens, dtype=torch.int64)
        block = self.cache.block_size

        def run(model: PreTrainedModel, is_cut: bool) -> Tensor | None:
            state = self._state
            lines.find_places(owners, positions, state, places, block=block)
            context = PrefillContext(state.table, tiles, places, block)
            hidden = self._hidden(model, tokens, positions, context)
            allowed = self._allowed_rows(shape.draws, is_scratch=is_scratch) if is_cut else None
            return self._draw(hidden.index_select(0, rows), slots, out, allowed)

        return _Bucket(control, out, run, {})

    def _hidden(
        self, model: PreTrainedModel, tokens: Tensor, positions: Tensor, context: DecodeContext | PrefillContext
    ) -> Tensor:
        routers, routing = self._routers[model], self.cache.routing
        if routers is None or routing is None:
            return hidden_states(model, tokens, positions, context)

        def keep(layer: int, indices: Tensor) -> None:
            routing[:, layer].index_copy_(0, context.places, indices.to(routing.dtype))

        with routers.recording(keep):
            return hidden_states(model, tokens, positions, context)

    def _draw(self, hidden: Tensor, slots: Tensor, out: Tensor, allowed: Tensor | None) -> Tensor | None:
        """Into `out`; what the rows may draw goes into `allowed` if some are cut."""
        logits = self._head.product(hidden, self._head.weight)
        if allowed is not None:
            sampling.cut(logits, slots, self._state, self._scaling, allowed)
        sampling.draw(logits, slots, self._state, self._scaling, out[0], out[1].view(torch.float32))
        return allowed

    def _allowed_rows(self, rows: int, *, is_scratch: bool = False) -> Tensor:
        """What cut rows may draw: one buffer for all buckets, since it is read right after each. What is only tried, in a
        thread beside the one that reads, gets its own."""
        vocabulary = self._head.vocabulary
        if is_scratch:
            return torch.empty((rows, vocabulary), dtype=torch.bool, device=self._device)
        with self._lock:
            if self._allowed is None:
                most = max(self._decode_sizes[-1], self.most_draws)
                self._allowed = torch.empty((most, vocabulary), dtype=torch.bool, device=self._device)
            return self._allowed[:rows]

    # Graphs, captured beside the thread that decodes

    def start_warming(self, *, is_cut: bool = False) -> None:
        """Compile the layers and capture the graphs, in a thread of its own; steps run eagerly meanwhile. Those of steps with
        cut rows are captured once there are such rows."""
        before = self._warming
        if is_cut not in self._is_started:
            self._is_started.add(is_cut)
            self._warming = threading.Thread(target=self._warm, args=(before, is_cut), name="warm", daemon=True)
            self._warming.start()

    def wait_warm(self) -> None:
        if self._warming is not None:
            self._warming.join()

    def close(self) -> None:
        """Capture no more."""
        with self._turn:
            self._is_closing = True
            self._turn.notify_all()
        self.wait_warm()

    def _warm(self, before: threading.Thread | None, is_cut: bool) -> None:
        if before is not None:
            before.join()
        try:
            with torch.no_grad():
                self._capture_all(is_cut=is_cut)
        except Exception:
            log.warning("this model's steps could not be captured as CUDA graphs; it is served eagerly", exc_info=True)

    def _capture_all(self, *, is_cut: bool) -> None:
        torch.cuda.set_device(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            if self._compile:
                compiled.compile_layers(self._twin)
        decode = [self._decode_bucket(size) for size in reversed(self._decode_sizes)]
        prompt = [self._prompt_bucket(shape) for shape in reversed(self._prompt_shapes)]
        if is_cut:
            self._allowed_rows(0)  # made now, so that no graph makes it
        # cuBLAS has a workspace for each stream, and a graph keeps that of the stream it was captured on: nothing else may run
        # on it while the graph is replayed, or two products spoil each other's sums, or wait for each other for ever.
        tried_on, captured_on = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        began = time.perf_counter()
        for bucket in (decode[0], prompt[0], *decode[1:], *prompt[1:]):
            with self._capturing():
                if self._is_closing:
                    return
                if is_cut not in bucket.graphs:
                    self._capture_compiled(bucket, tried_on, captured_on, is_cut=is_cut)
        log.info("captured %d graphs in %.1f s", len(decode) + len(prompt), time.perf_counter() - began)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Within it weights and cache are where they were: it waits while they are given back, and `rest` waits for it."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_closing or not self._is_resting)
            self._is_capturing = True
        try:
            yield
        finally:
            with self._turn:
                self._is_capturing = False
                self._turn.notify_all()

    def _capture_compiled(self, bucket: _Bucket, *streams: torch.cuda.Stream, is_cut: bool) -> None:
        try:
            self._capture(bucket, *streams, is_cut=is_cut)
        except Exception:
            if not self._compile:
                raise
            log.warning("this model's layers could not be compiled; its graphs hold them as they are", exc_info=True)
            compiled.undo_compile(self._twin)
            self._compile = False
            self._capture(bucket, *streams, is_cut=is_cut)

    def _capture(self, bucket: _Bucket, tried_on: torch.cuda.Stream, captured_on: torch.cuda.Stream, *, is_cut: bool) -> None:
        """Run once in buffers of the bucket's shape that nobody reads, every row nobody's; then capture with the real ones."""
        scratch, model, stops = self._scratch(bucket), self._twin, self._state.stops
        tried_on.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(tried_on):
            scratch.run(model, is_cut)
        tried_on.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=captured_on, capture_error_mode="thread_local"):
            allowed = bucket.run(model, is_cut)
        with self._lock:
            if self._state.stops is stops:  # or it points at memory that is nobody's: it will be captured again
                bucket.graphs[is_cut] = (graph, allowed)

    def _scratch(self, bucket: _Bucket) -> _Bucket:
        """A bucket of the same shape to try things in, while the real one may be in use."""
        for size, each in self._decode.items():
            if each is bucket:
                return self._make_decode_bucket(size, is_scratch=True)
        tokens = next(tokens for tokens, each in self._prompt.items() if each is bucket)
        return self._make_prompt_bucket(_PromptShape(tokens), is_scratch=True)


_NOTHING = np.zeros(0, dtype=np.int32)


def _prompt_parts(control: Numbers, shape: _PromptShape) -> list[Numbers]:
    """Of a prompt bucket's control buffer, on either side: tokens, positions, owners, tiles, rows and slots of draws."""
    edges = np.cumsum([0, *[shape.tokens] * 3, 4 * shape.tiles, *[shape.draws] * 2]).tolist()
    parts = [control[start:stop] for start, stop in itertools.pairwise(edges)]
    parts[3] = parts[3].reshape(shape.tiles, 4)
    return parts


def _tiles(chunks: Sequence[Chunk]) -> list[tuple[int, int, int, int]]:
    """(slot, first row, rows, first position) of each run of query rows."""
    tiles, begin, size = [], 0, attention.PREFILL_ROWS
    for chunk in chunks:
        for offset in range(0, len(chunk), size):
            tiles.append((chunk.slot, begin + offset, min(size, len(chunk) - offset), chunk.start + offset))
        begin += len(chunk)
    return tiles


def _batches(chunks: Sequence[Chunk], most: _PromptShape) -> list[list[Chunk]]:
    """Chunks that go together: what the largest prompt bucket holds."""
    size = attention.PREFILL_ROWS
    batches: list[list[Chunk]] = []
    tokens = draws = tiles = 0
    for chunk in chunks:
        more = (len(chunk), len(chunk.draws), -(-len(chunk) // size))
        if not batches or tokens + more[0] > most.tokens or draws + more[1] > most.draws or tiles + more[2] > most.tiles:
            batches.append([])
            tokens = draws = tiles = 0
        batches[-1].append(chunk)
        tokens, draws, tiles = tokens + more[0], draws + more[1], tiles + more[2]
    return batches
