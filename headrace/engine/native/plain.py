"""Steps in plain torch, on any device: one forward pass over the chunks' tokens and one token of every decoding rollout."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine.native.context import CachedRows, StepContext
from headrace.engine.native.sampler import SamplingRows, draw, uniform
from headrace.engine.native.work import Drawn
from headrace.model import EXACT_ROWS, hidden_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.cache import PagedCache
    from headrace.engine.native.work import Chunk, Slots, Work
    from headrace.model import Head, Routers
    from headrace.records import Array


class PlainRunner:
    """Computes a step when it is launched: nothing is ever under way."""

    ahead = 0
    most_draws = 1 << 30
    most_tokens = 8192

    def __init__(
        self, model: PreTrainedModel, head: Head, cache: PagedCache, slots: Slots, *, exact: bool, routers: Routers | None
    ) -> None:
        self._model, self._head, self._slots, self._exact, self._routers = model, head, slots, exact, routers
        self.cache = cache
        self._device = next(model.parameters()).device

    def begin(self, slot: int) -> None:
        """The lines are read where they are."""

    def grow(self, slot: int, index: int, block: int) -> None:
        """So is the table."""

    def settle(self) -> None:
        """Nothing is under way."""

    def rest(self) -> None:
        """Nothing runs beside the thread that steps."""

    def rouse(self) -> None:
        """Nothing was waiting."""

    def wait_warm(self) -> None:
        """Nothing gets warm."""

    def close(self) -> None:
        """Nothing is begun."""

    def in_order(self, action: Callable[[], None]) -> None:
        action()

    def collect(self, ticket: object) -> Drawn:
        assert isinstance(ticket, Drawn)
        return ticket

    @torch.no_grad()
    def launch(self, work: Work) -> Drawn:
        self.cache.copy(work.copies_before)
        drawn = self._forward(work)
        self.cache.copy(work.copies_after)
        return drawn

    def routing(self, places: Array) -> Array | None:
        routing = self.cache.routing
        if routing is None:
            return None
        rows: Array = routing.index_select(0, self._to_device(places)).cpu().numpy()
        return rows

    def _forward(self, work: Work) -> Drawn:
        slots, size = self._slots, self.cache.block_size
        chunks = sorted(work.chunks, key=lambda chunk: chunk.start > 0)  # whole prompts first
        spans = [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        owner = np.concatenate([np.repeat([chunk.slot for chunk in chunks], [len(c) for c in chunks]), work.decoding])
        owner = owner.astype(np.int64)
        position = np.concatenate([*spans, slots.length[work.decoding] - 1]).astype(np.int64)
        tokens = slots.tokens[owner, position].astype(np.int64)
        places = slots.table[owner, position // size] * size + position % size
        if self._exact:
            padding = (0, -len(owner) % EXACT_ROWS)
            tokens, position, places = np.pad(tokens, padding), np.pad(position, padding), np.pad(places, padding)
        context = StepContext(
            self.cache,
            places=self._to_device(places),
            prompt_lengths=[len(chunk) for chunk in chunks if chunk.start == 0],
            cached=self._cached_rows([chunk for chunk in chunks if chunk.start > 0], work.decoding),
            device=self._device,
            exact=self._exact,
        )
        with self._recording(context):
            hidden = hidden_states(self._model, self._to_device(tokens), self._to_device(position), context)
        last, drawing = _draw_rows(chunks, work)
        logits = self._head.logits(hidden.index_select(0, self._to_device(last)))
        numbers = torch.from_numpy(uniform(slots.seed[drawing], slots.length[drawing])).to(self._device)
        drawn = draw(logits, self._sampling_rows(drawing), numbers)
        allowed = None
        if drawn.allowed is not None:
            # A row that may draw anything is not restricted, whatever its neighbours are: it has no ids rather than all.
            allowed = [np.flatnonzero(row & ~row.all()).astype(np.int32) for row in drawn.allowed.cpu().numpy()]
        order = _order(drawing, work.slots)
        return Drawn(
            token_ids=drawn.token_ids.cpu().numpy()[order],
            logprobs=drawn.logprobs.cpu().numpy()[order],
            allowed=None if allowed is None else [allowed[row] for row in order],
        )

    def _cached_rows(self, chunks: list[Chunk], decoding: Array) -> list[CachedRows]:
        slots = self._slots
        groups = [
            (np.asarray([chunk.slot], dtype=np.int64), np.arange(chunk.start, chunk.stop).reshape(1, -1)) for chunk in chunks
        ]
        if len(decoding):
            groups.append((decoding, (slots.length[decoding] - 1).reshape(-1, 1)))
        size = self.cache.block_size
        rows = []
        for owners, positions in groups:
            blocks = math.ceil((int(positions.max()) + 1) / size)
            places = (slots.table[owners, :blocks, None] * size + np.arange(size)).reshape(len(owners), blocks * size)
            # What lies after a rollout's last token is someone else's. It may be NaN, and no mask helps: 0 × NaN is NaN.
            places = np.where(np.arange(blocks * size) <= positions[:, -1:], places, places[:, :1])
            rows.append(CachedRows(self._to_device(positions), self._to_device(places)))
        return rows

    def _recording(self, context: StepContext) -> contextlib.AbstractContextManager[object]:
        routing = self.cache.routing
        if self._routers is None or routing is None:
            return contextlib.nullcontext()

        def keep(layer: int, indices: Tensor) -> None:
            routing[:, layer].index_copy_(0, context.places, indices.to(routing.dtype))

        return self._routers.recording(keep)

    def _sampling_rows(self, drawing: Array) -> SamplingRows:
        slots = self._slots
        parameters = slots.sampling[drawing]
        temperature, top_k, top_p, min_p = self._to_device(parameters).unbind(dim=1)
        too_early = np.flatnonzero(slots.length[drawing] < slots.floor[drawing])
        drawable = range(self._head.vocabulary)  # a tokenizer may have more ids than the head
        forbidden = [(int(row), int(stop)) for row in too_early for stop in slots.stops[drawing[row]] if int(stop) in drawable]
        is_cut = bool(forbidden) or bool(
            ((parameters[:, 0] > 0) & ((parameters[:, 1] > 0) | (parameters[:, 2] < 1) | (parameters[:, 3] > 0))).any()
        )
        return SamplingRows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, forbidden=forbidden, is_cut=is_cut)

    def _to_device(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _draw_rows(chunks: list[Chunk], work: Work) -> tuple[Array, Array]:
    """Which row of the forward pass each draw is made from, and whose draw it is."""
    ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
    rows = [int(end) - 1 for chunk, end in zip(chunks, ends, strict=True) for _ in chunk.draws]
    owners = [slot for chunk in chunks for slot in chunk.draws]
    total = int(ends[-1]) if len(ends) else 0
    last = np.concatenate([np.asarray(rows, dtype=np.int64), total + np.arange(len(work.decoding))])
    return last, np.concatenate([np.asarray(owners, dtype=np.int64), work.decoding])


def _order(given: Array, wanted: Array) -> Array:
    """Where each of `wanted` stands in `given`; both hold the same slots once."""
    places = np.argsort(given, kind="stable")
    order: Array = places[np.searchsorted(given[places], wanted)]
    return order
