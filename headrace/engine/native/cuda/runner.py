"""Steps on a GPU: one copy of control data to the device, one or two graphs, one copy of the sampled tokens back.

The GPU keeps each rollout's length, limit, stop tokens and last token, so the host launches a decode step without knowing what
the step before it sampled. The host learns one step late that a rollout has ended; its extra row computes into scratch.

Shaped rollouts (`native/shaping.py`) need the token before the next step, so they are computed in plain torch beside the rest.

A step runs in the smallest bucket that holds it: as a CUDA graph of the twin or, until that is captured, eagerly on the model.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headrace.engine.native.cuda import compiled
from headrace.engine.native.cuda.buckets import PROMPT_BUCKETS, Buckets, split_chunks, tiles_of
from headrace.engine.native.cuda.graphs import GraphCapture
from headrace.engine.native.cuda.slot_state import SLOT_FIELDS, SlotState
from headrace.engine.native.plain_runner import PlainRunner
from headrace.engine.native.step import Runner, StepOutput, StepPlan
from headrace.model import can_group_experts, find_readable_routers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.cuda.adapters import AdapterBank
    from headrace.engine.native.cuda.buckets import Bucket
    from headrace.engine.native.kv_cache import PagedCache
    from headrace.engine.native.step import Chunk, Slots
    from headrace.engine.shaping import TopLogprobs
    from headrace.model import Head, Routers
    from headrace.records import Array

_STOPS = 16
_NO_IDS = np.zeros(0, dtype=np.int32)


class _Part(NamedTuple):
    """One graph's share of a step."""

    host: Tensor  # a copy of the bucket's `out`, flat, in borrowed memory
    shape: tuple[int, ...]  # of that
    rows: int
    masks: list[Array] | None


class _ShapedRows(NamedTuple):
    """The share of a step that was not left to the kernels."""

    parts: list[_Part]
    order: Array | None  # where in the parts, of which these come first, each of the step's rows is
    tops: dict[int, TopLogprobs]


_NOT_SHAPED = _ShapedRows([], None, {})


class _StepInFlight(NamedTuple):
    """A step in flight, and the host memory lent to it."""

    parts: list[_Part]
    done: torch.cuda.Event | None
    lent: list[Tensor]
    shaped: _ShapedRows


class _Stream:
    """A CUDA stream, its events and pinned host buffers. On a CPU, where tests run the kernels, everything is synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._free: dict[int, list[Tensor]] = {}

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work is queued on this stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after everything queued so far; pass it to `wait` once."""
        if self._stream is None:
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()
            self._events.append(mark)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def borrow(self, numbers: int) -> Tensor:
        """Host memory for at least `numbers` int32, until `give_back`."""
        size = 1 << (max(numbers, 1) - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class CudaRunner(Runner):
    """Launches a step without waiting for the one before."""

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
        bank: AdapterBank | None = None,
        prompt_buckets: Sequence[int] = PROMPT_BUCKETS,
    ) -> None:
        """`twin`: made from the model before it got the routers' hooks; graphs run the twin, eager steps the model.
        `bank`: of the model's adapter, if it has one."""
        self.cache, self._slots, self._model = cache, slots, model
        self._device = next(model.parameters()).device
        self._bank = bank
        for each in (model, twin):
            compiled.attach_cache(each, cache)
            if self._bank is not None:
                self._bank.attach(each)
        self._nobody = len(slots.length)
        self._plain = PlainRunner(model, head, cache, slots, exact=False, routers=routers)  # for shaped rollouts
        self._state = SlotState.make(slots=self._nobody, blocks=slots.table.shape[1], stops=_STOPS, device=self._device)
        by_model = {model: routers, twin: find_readable_routers(twin)}
        self.buckets = Buckets(
            self._state,
            head,
            cache,
            routers=by_model,
            bank=self._bank,
            prompt_buckets=prompt_buckets,
            records_entropy=slots.entropies is not None,
            device=self._device,
        )
        self.graphs: GraphCapture = GraphCapture(
            self.buckets, self._state, twin, compiles=can_group_experts(twin), device=self._device
        )
        most = self.buckets.prompt_shapes[-1]
        self.max_prompt_tokens, self.max_sampled = most.tokens, most.sampled
        self._stream = _Stream(self._device)
        self._started: dict[int, None] = {}
        self._has_new_adapters = False  # some slot may have another one than the bank says
        self._new_blocks: dict[int, list[tuple[int, int]]] = {}
        self._lent: list[Tensor] = []

    def start_slot(self, slot: int) -> None:
        self._started[slot] = None
        self._has_new_adapters = True
        self._new_blocks.pop(slot, None)  # of the rollout before

    def add_block(self, slot: int, index: int, block: int) -> None:
        if slot not in self._started and slot not in self._slots.shapers:
            self._new_blocks.setdefault(slot, []).append((index, block))

    def hold_adapters(self) -> None:
        self._has_new_adapters = True

    def exchanged(self) -> None:
        if self._bank is not None:
            self._bank.fill_rooms()

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> _StepInFlight:
        with self._stream.entered():
            if self._started:
                self._start_slots()
            if self._bank is not None and self._has_new_adapters:
                self._place_adapters(self._bank)
            self.cache.copy(plan.copies_before)
            plan, shaped = self._run_shaped(plan) if self._slots.shapers else (plan, _NOT_SHAPED)
            batches = split_chunks(plan.chunks, self.buckets.prompt_shapes[-1])
            parts = [*shaped.parts, *(self._launch_chunks(chunks) for chunks in batches)]
            self.cache.copy(plan.copies_after)
            if len(plan.decoding):
                parts.append(self._launch_decode(plan.decoding))
            lent, self._lent = self._lent, []
            return _StepInFlight(parts, self._stream.mark(), lent, shaped)

    def _run_shaped(self, plan: StepPlan) -> tuple[StepPlan, _ShapedRows]:
        """Compute a step's shaped rollouts in plain torch and wait for them; returns the step without them."""
        shapers, is_shaped = self._slots.shapers, np.isin(plan.slots, list(self._slots.shapers))
        is_decoding = is_shaped[len(is_shaped) - plan.decode_rows :]
        shaped = StepPlan([chunk for chunk in plan.chunks if chunk.slot in shapers], plan.decoding[is_decoding])
        chunks = [chunk for chunk in plan.chunks if chunk.slot not in shapers]
        rest = StepPlan(chunks, plan.decoding[~is_decoding], copies_after=plan.copies_after)
        if shaped.is_empty:
            return rest, _NOT_SHAPED
        output, rows = self._plain.launch(shaped), np.flatnonzero(is_shaped)
        bits = [each.view(np.int32) for each in (output.logprobs, output.entropies) if each is not None]
        host = np.stack([output.token_ids.astype(np.int32), *bits])
        part = _Part(torch.from_numpy(host.reshape(-1)), host.shape, len(rows), output.masks)
        order = np.argsort(np.argsort(~is_shaped, kind="stable"))
        return rest, _ShapedRows([part], order, {int(rows[row]): top for row, top in output.tops.items()})

    def collect(self, launched: object) -> StepOutput:
        assert isinstance(launched, _StepInFlight)
        self._stream.wait(launched.done)
        parts = launched.parts
        outputs = [part.host.numpy()[: math.prod(part.shape)].reshape(part.shape)[:, : part.rows] for part in parts]
        output = np.concatenate(outputs, axis=1)
        masks = None
        if any(part.masks is not None for part in parts):
            masks = [row for part in parts for row in part.masks or [_NO_IDS] * part.rows]
        for buffer in launched.lent:
            self._stream.give_back(buffer)
        if (order := launched.shaped.order) is not None:
            output, masks = output[:, order], masks and [masks[row] for row in order.tolist()]
        tokens, logprobs, *entropies = output[0], *output[1:].view(np.float32)
        return StepOutput(tokens, logprobs, masks, launched.shaped.tops, *entropies)

    def in_order(self) -> contextlib.AbstractContextManager[object]:
        return self._stream.entered()

    def suspend(self) -> None:
        self.graphs.suspend()
        self._stream.synchronize()

    def resume(self) -> None:
        self._stream.synchronize()
        self.graphs.resume()

    def _borrow(self, numbers: int) -> Tensor:
        """Host memory for the step being launched."""
        buffer = self._stream.borrow(numbers)
        self._lent.append(buffer)
        return buffer

    def _start_slots(self) -> None:
        started, slots = list(self._started), self._slots
        self._started.clear()
        if slots.stops.shape[1] > self._state.stops.shape[1]:
            self._widen_stops(slots.stops.shape[1])
        num_stops, given_stops = self._state.stops.shape[1], slots.stops.shape[1]
        at = np.asarray(started, dtype=np.int64)
        num_blocks = int((slots.table[at] != 0).sum(axis=1).max())
        width = SLOT_FIELDS + num_stops + num_blocks
        buffer = self._borrow(len(started) * width)
        given = buffer.numpy()[: len(started) * width].reshape(len(started), width)
        given[:, 0], given[:, 1], given[:, 2], given[:, 3] = at, slots.length[at], slots.limit[at], slots.floor[at]
        given[:, 4:6] = slots.seed[at].view(np.int32).reshape(-1, 2)
        given[:, 6:10] = slots.sampling[at].view(np.int32)
        given[:, 10 : 10 + num_stops] = -1
        given[:, 10 : 10 + given_stops] = slots.stops[at]
        given[:, 10 + num_stops :] = slots.table[at, :num_blocks]
        on_device = buffer[: len(started) * width].to(self._device, non_blocking=True).view(len(started), width)
        self._state.start(on_device, num_blocks=num_blocks)

    def _place_adapters(self, bank: AdapterBank) -> None:
        self._has_new_adapters = False
        if bank.lacks_room(self._slots.held):
            self.suspend()
            while bank.lacks_room(self._slots.held):
                bank.grow()
            self.graphs.restart()
            self.resume()
        places = bank.choose_places(self._slots.held)
        if places is not None:
            buffer = self._borrow(len(places))
            buffer.numpy()[: len(places)] = places
            bank.places.copy_(buffer[: len(places)], non_blocking=True)

    def _widen_stops(self, width: int) -> None:
        """Make room for more stop tokens; graphs hold the old address and are captured again."""
        wider = torch.full((self._nobody + 1, width), -1, dtype=torch.int32, device=self._device)
        wider[:, : self._state.stops.shape[1]] = self._state.stops
        self._stream.synchronize()  # no graph is running
        self._state.stops = wider
        self.graphs.restart()

    def _launch_decode(self, decoding: Array) -> _Part:
        rows = len(decoding)
        size = next(size for size in self.buckets.decode_sizes if size >= rows)
        bucket = self.buckets.get(size)
        triples = [(slot, index, block) for slot, new in self._new_blocks.items() for index, block in new]
        self._new_blocks.clear()
        buffer = self._borrow(bucket.control.numel())
        control = buffer.numpy()
        control[0] = len(triples)
        control[1 : 1 + rows] = decoding
        control[1 + rows : 1 + size] = self._nobody
        assert len(triples) <= size, "a rollout gets at most one block a step"
        if triples:
            control[1 + size : 1 + size + 3 * len(triples)] = np.asarray(triples, dtype=np.int32).reshape(-1)
        return self._launch_bucket(bucket, buffer, decoding)

    def _launch_chunks(self, chunks: Sequence[Chunk]) -> _Part:
        tokens = sum(map(len, chunks))
        sampling = [slot for chunk in chunks for slot in chunk.sampling_slots]
        tiles = tiles_of(chunks)
        shape = next(
            each
            for each in self.buckets.prompt_shapes
            if each.tokens >= tokens and each.sampled >= len(sampling) and each.tiles >= len(tiles)
        )
        bucket = self.buckets.get(shape)
        buffer = self._borrow(bucket.control.numel())
        token_part, position_part, owner_part, tile_part, row_part, slot_part = shape.parts(buffer.numpy())
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
        row_part[: len(sampling)] = np.repeat(ends, [len(chunk.sampling_slots) for chunk in chunks])
        slot_part[: len(sampling)] = sampling
        row_part[len(sampling) :], slot_part[len(sampling) :] = 0, self._nobody
        return self._launch_bucket(bucket, buffer, np.asarray(sampling, dtype=np.int64))

    def _launch_bucket(self, bucket: Bucket, buffer: Tensor, sampling: Array) -> _Part:
        """`sampling`: the slot of each row."""
        restricted = self._slots.is_restricted(sampling)
        is_restricted, needing = bool(restricted.any()), np.flatnonzero(restricted & self._slots.needs_mask[sampling])
        bucket.control.copy_(buffer[: bucket.control.numel()], non_blocking=True)
        captured = bucket.graphs.get(is_restricted)
        if captured is None:
            if self.graphs.is_started:
                self.graphs.start(is_restricted=is_restricted)
            allowed = bucket.run(self._model, is_restricted)
        else:
            captured[0].replay()
            allowed = captured[1]
        host = self._borrow(bucket.out.numel())
        host[: bucket.out.numel()].copy_(bucket.out.view(-1), non_blocking=True)
        masks = None
        if allowed is not None and len(needing):
            masks = [_NO_IDS] * len(sampling)
            for row, mask in zip(needing.tolist(), self._mask_rows(allowed, needing), strict=True):
                masks[row] = mask
        return _Part(host, bucket.out.shape, len(sampling), masks)

    def _mask_rows(self, allowed: Tensor, needing: Array) -> list[Array]:
        """`SamplingMask.make_row` of these rows, without bringing them to the host."""
        rows = allowed.index_select(0, torch.from_numpy(needing).to(self._device))
        lists_allowed = 2 * rows.sum(dim=1, keepdim=True) <= rows.shape[1]
        ids = (rows == lists_allowed).nonzero().cpu().numpy()
        by_row = np.split(ids[:, 1].astype(np.int32), np.searchsorted(ids[:, 0], np.arange(1, len(needing))))
        return [mask if is_allowed else ~mask for mask, is_allowed in zip(by_row, lists_allowed[:, 0].tolist(), strict=True)]
