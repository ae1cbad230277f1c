"""The engine proper: a plain object that is stepped. It owns the slots, the cache and the weights, and no thread.

Each step admits waiting rollouts into free slots, runs one forward pass over the new prompts' tokens and one token of
every running rollout, and draws one token for each. Weights change only between two steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.engine.native.cache import SCRATCH, BlockPool, PagedCache, blocks_that_fit
from headrace.engine.native.context import DecodeRows, StepContext
from headrace.engine.native.sampler import Draw, SamplingRows, draw, uniform
from headrace.engine.protocol import Increment, PromptTooLong, UnusablePrompt
from headrace.model.attention import EXACT_ROWS
from headrace.model.head import Head
from headrace.model.load import hidden_states
from headrace.types import Call, FinishReason, Rollout, SamplingMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from headrace.types import Array, Sampling


_PROMPT_ROWS = 8192
"""Prompt tokens computed in one step, but for a single longer prompt."""


@dataclass(eq=False, slots=True)
class Request:
    """One generate call inside the engine."""

    rollout: Rollout
    sampling: Sampling
    on_done: Callable[[Rollout], None]
    """Called once, between two steps, with the lengthened rollout."""
    on_tokens: Callable[[Increment], None] | None = None
    """Called after every step, for a stream."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    started: float = 0.0
    masks: list[Array] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did, for the time budget."""

    prompt_rows: int
    decode_rows: int


class EngineCore:
    """Slots are rows of flat arrays, so that a step's bookkeeping is a handful of vector operations."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        slots: int,
        context: int,
        block_size: int = 16,
        num_blocks: int = 0,
        exact: bool = False,
    ) -> None:
        self.model, self.name, self.context, self.exact = model, name, context, exact
        self.version, self.lineage, self.policy = 0, "", "policy"
        self.num_slots = slots
        self.num_drawn = 0
        self.is_admitting = True
        self._device = next(model.parameters()).device
        self._head = Head(model, exact=exact)
        self._blocks_per_slot = math.ceil(context / block_size)
        num_blocks = num_blocks or min(slots * self._blocks_per_slot + 1, blocks_that_fit(model, block_size))
        if num_blocks < self._blocks_per_slot + 1:
            raise ValueError(
                f"engine.kv_blocks = {num_blocks}: one rollout of {context} tokens needs {self._blocks_per_slot + 1}; "
                f"lower model.context"
            )
        self._cache = PagedCache(num_blocks=num_blocks, block_size=block_size)
        self._pool = BlockPool(num_blocks)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._masked: set[int] = set()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._tokens = np.zeros((slots, context), dtype=np.int32)
        self._logprobs = np.zeros((slots, context), dtype=np.float32)
        self._versions = np.zeros((slots, context), dtype=np.int32)
        self._length = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._floor = np.zeros(slots, dtype=np.int64)
        self._seed = np.zeros(slots, dtype=np.int64)
        self._sampling = np.zeros((slots, 4), dtype=np.float32)
        self._stops = np.zeros((slots, 1), dtype=np.int64)
        self._table = np.full((slots, self._blocks_per_slot), SCRATCH, dtype=np.int64)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        return len(self._pool)

    @property
    def has_work(self) -> bool:
        return bool(self._running) or bool(self._waiting and self.is_admitting)

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted by a later step."""
        length = len(request.rollout)
        if length >= self.context:
            raise PromptTooLong(f"rollout {request.rollout.id!r} has {length} tokens; the context is {self.context}")
        if length == 0:
            raise UnusablePrompt(f"rollout {request.rollout.id!r} is empty; a prompt has at least one token")
        if request.rollout.finish_reason is FinishReason.ABORT:
            self._waiting.appendleft(request)  # interrupted by new weights: it goes on before anything new begins
        else:
            self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; its slot and blocks are free at once."""
        if request.slot >= 0:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def abort_running(self) -> None:
        """End every running rollout where it is, with `ABORT`."""
        for request in list(self._running.values()):
            self._finish(request, FinishReason.ABORT)

    @torch.no_grad()
    def step(self) -> Step:
        """One forward pass and one token for every rollout in it."""
        decoding = np.fromiter(self._running, dtype=np.int64, count=len(self._running))
        admitted = self._admit()
        prompts = np.asarray([request.slot for request in admitted], dtype=np.int64)
        slots = np.concatenate([prompts, decoding])
        prompt_lengths = [int(length) for length in self._length[prompts]]
        drawn = self._forward(slots, prompt_lengths, decoding)
        self._record(slots, drawn)
        return Step(prompt_rows=sum(prompt_lengths), decode_rows=len(decoding))

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        rows = 0
        while self._waiting and self._free_slots and self.is_admitting:
            request = self._waiting[0]
            length, sampling = len(request.rollout), request.sampling
            rows += length
            if admitted and rows > _PROMPT_ROWS:
                break
            limit = min(self.context, length + sampling.max_tokens)
            needed = math.ceil(limit / self._cache.block_size)
            if needed > len(self._pool):
                break
            self._waiting.popleft()
            request.slot, request.blocks, request.started = self._free_slots.pop(), self._pool.take(needed), time.time()
            slot = request.slot
            self._running[slot] = request
            if sampling.is_truncated:
                self._masked.add(slot)
            self._tokens[slot, :length] = request.rollout.token_ids
            self._length[slot], self._limit[slot], self._floor[slot] = length, limit, length + sampling.min_tokens
            self._seed[slot] = sampling.seed
            self._sampling[slot] = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            self._table[slot] = SCRATCH
            self._table[slot, :needed] = request.blocks
            self._set_stops(slot, sampling.stop_ids)
            admitted.append(request)
        return admitted

    def _set_stops(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self._stops.shape[1]:
            wider = np.full((self.num_slots, len(stop_ids)), -1, dtype=np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stop_ids)] = stop_ids

    def _forward(self, slots: Array, prompt_lengths: list[int], decoding: Array) -> Draw:
        """Rows: every token of the admitted prompts, the last token of each running rollout, padding."""
        num_prompts, size = len(prompt_lengths), self._cache.block_size
        owner = np.concatenate([np.repeat(slots[:num_prompts], prompt_lengths), decoding])
        position = np.concatenate([*(np.arange(length) for length in prompt_lengths), self._length[decoding] - 1]).astype(
            np.int64
        )
        tokens = self._tokens[owner, position].astype(np.int64)
        places = self._table[owner, position // size] * size + position % size
        if self.exact:
            padding = (0, -len(owner) % EXACT_ROWS)
            tokens, position, places = np.pad(tokens, padding), np.pad(position, padding), np.pad(places, padding)
        last = np.concatenate([np.cumsum(prompt_lengths) - 1, sum(prompt_lengths) + np.arange(len(decoding))]).astype(np.int64)
        context = StepContext(
            self._cache,
            places=self._to_device(places),
            prompt_lengths=prompt_lengths,
            decode=self._decode_rows(decoding) if len(decoding) else None,
            device=self._device,
            exact=self.exact,
        )
        hidden = hidden_states(self.model, self._to_device(tokens), self._to_device(position), context)
        logits = self._head.logits(hidden.index_select(0, self._to_device(last)))
        numbers = torch.from_numpy(uniform(self._seed[slots], self._length[slots])).to(self._device)
        return draw(logits, self._sampling_rows(slots), numbers)

    def _decode_rows(self, decoding: Array) -> DecodeRows:
        size = self._cache.block_size
        blocks = math.ceil(int(self._length[decoding].max()) / size)
        places = self._table[decoding, :blocks, None] * size + np.arange(size)
        return DecodeRows(
            positions=self._to_device(self._length[decoding] - 1),
            places=self._to_device(places.reshape(len(decoding), blocks * size)),
        )

    def _sampling_rows(self, slots: Array) -> SamplingRows:
        temperature, top_k, top_p, min_p = self._to_device(self._sampling[slots]).unbind(dim=1)
        too_early = np.flatnonzero(self._length[slots] < self._floor[slots])
        forbidden = [(int(row), int(stop)) for row in too_early for stop in self._stops[slots[row]] if stop >= 0]
        parameters = self._sampling[slots]
        is_cut = bool(forbidden) or bool(
            ((parameters[:, 0] > 0) & ((parameters[:, 1] > 0) | (parameters[:, 2] < 1) | (parameters[:, 3] > 0))).any()
        )
        return SamplingRows(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, forbidden=forbidden, is_cut=is_cut)

    def _record(self, slots: Array, drawn: Draw) -> None:
        token_ids, logprobs = drawn.token_ids.cpu().numpy(), drawn.logprobs.cpu().numpy()
        at = self._length[slots]
        self._tokens[slots, at] = token_ids
        self._logprobs[slots, at] = logprobs
        self._versions[slots, at] = self.version
        self._length[slots] = at + 1
        self.num_drawn += len(slots)
        if self._masked:
            self._record_masks(slots, None if drawn.allowed is None else drawn.allowed.cpu().numpy())
        is_stop = (self._stops[slots] == token_ids[:, None]).any(axis=1)
        is_full = self._length[slots] >= self._limit[slots]
        finished = is_stop | is_full
        for row in np.flatnonzero(finished):
            reason = FinishReason.STOP if is_stop[row] else FinishReason.LENGTH
            self._tell(slots[row], token_ids[row], logprobs[row], reason)
            self._finish(self._running[int(slots[row])], reason)
        for row in np.flatnonzero(~finished):
            self._tell(slots[row], token_ids[row], logprobs[row], None)

    def _record_masks(self, slots: Array, allowed: Array | None) -> None:
        """What each cut request could have drawn; in a step that cut nothing, nothing was kept from it."""
        for row, slot in enumerate(slots):
            if int(slot) in self._masked:
                ids = np.zeros(0) if allowed is None else np.flatnonzero(allowed[row])
                self._running[int(slot)].masks.append(np.asarray(ids, dtype=np.int32))

    def _tell(self, slot: int, token_id: int, logprob: float, reason: FinishReason | None) -> None:
        request = self._running[int(slot)]
        if request.on_tokens is not None:
            request.on_tokens(Increment((int(token_id),), (float(logprob),), (self.version,), reason))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        lengthened = self._lengthen(request, reason)
        self._release(request)
        request.on_done(lengthened)

    def _release(self, request: Request) -> None:
        self._running.pop(request.slot)
        self._masked.discard(request.slot)
        self._free_slots.append(request.slot)
        self._pool.give_back(request.blocks)
        request.slot, request.blocks = -1, []

    def _lengthen(self, request: Request, reason: FinishReason) -> Rollout:
        """The request's rollout with what its slot holds appended: the one place a version is written."""
        rollout, slot = request.rollout, request.slot
        start, stop = len(rollout), int(self._length[slot])
        added = stop - start
        call = Call(
            start=start,
            stop=stop,
            engine=self.name,
            sampling=request.sampling,
            finish_reason=reason,
            started=request.started,
            finished=time.time(),
        )
        mask = rollout.sampling_mask
        if mask is not None or request.masks:
            old = [np.zeros(0, np.int32)] * start if mask is None else [mask.row(index) for index in range(start)]
            new = request.masks or [np.zeros(0, np.int32)] * added
            mask = SamplingMask.from_rows([*old, *new])
        return rollout.lengthened(
            call,
            token_ids=self._tokens[slot, start:stop],
            logprobs=self._logprobs[slot, start:stop],
            versions=self._versions[slot, start:stop],
            policy=self.policy,
            lineage=self.lineage,
            sampling_mask=mask,
        )

    def _to_device(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
