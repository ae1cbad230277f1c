"""Steps in plain torch, on any device: one forward pass over the chunks' tokens and one token of every decoding rollout.
Slow and obvious: the GPU kernels are checked against it."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headrace.engine.native.sampling import entropies_of, sample, uniform
from headrace.engine.native.shaping import find_top
from headrace.engine.native.step import Runner, StepOutput
from headrace.model import EXACT_ROWS, AttentionSpec, PackedContext, adapter_of, attend, causal, hidden_states, layer_of
from headrace.records import SamplingMask

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from headrace.engine.native.kv_cache import PagedCache
    from headrace.engine.native.step import Slots, StepPlan
    from headrace.model import Head, Routers
    from headrace.records import Array

_NO_IDS = np.zeros(0, dtype=np.int32)


class CachedRows(NamedTuple):
    """Rows that attend to the KV cache, equally many of each of `batch` rollouts."""

    positions: Tensor  # [batch, rows] of the tokens in their rollouts
    places: Tensor  # [batch, keys] flat cache places of all tokens so far, padded to whole blocks with the first


class StepContext:
    """Writes the step's keys and values to the cache, then attends."""

    def __init__(
        self, cache: PagedCache, *, places: Tensor, prompt_lengths: list[int], cached: list[CachedRows], exact: bool
    ) -> None:
        """The step's rows are whole prompts of `prompt_lengths`, then those of `cached`, then padding."""
        self.places = places
        self._cache, self._cached, self._exact = cache, cached, exact
        self._num_prompt_rows = sum(prompt_lengths)
        self._prompts = PackedContext(prompt_lengths, device=places.device, exact=exact) if prompt_lengths else None
        self._allowed: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        layer = layer_of(module)
        self._cache.write(layer, self.places, key, value)
        done, parts = self._num_prompt_rows, []
        if self._prompts is not None:
            parts.append(self._prompts.attend(module, query[:done], key[:done], value[:done], spec))
        for which, rows in enumerate(self._cached):
            batch, each = rows.positions.shape
            keys, values = self._cache.read(layer, rows.places)
            queries = query[done : done + batch * each].reshape(batch, each, *query.shape[1:])
            result = attend(queries, keys, values, spec, allowed=self._visible(which, spec.sliding_window), exact=self._exact)
            parts.append(result.reshape(batch * each, *result.shape[2:]))
            done += batch * each
        if done < len(query):
            parts.append(query.new_zeros(len(query) - done, query.shape[1], value.shape[2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _visible(self, which: int, window: int | None) -> Tensor:
        if (which, window) not in self._allowed:
            rows = self._cached[which]
            keys = torch.arange(rows.places.shape[1], device=rows.places.device)
            self._allowed[which, window] = causal(rows.positions, keys, window=window)
        return self._allowed[which, window]


class PlainRunner(Runner):
    """Computes a step when it is launched: none is ever in flight."""

    def __init__(
        self, model: PreTrainedModel, head: Head, cache: PagedCache, slots: Slots, *, exact: bool, routers: Routers | None
    ) -> None:
        self._model, self._head, self._slots, self._exact, self._routers = model, head, slots, exact, routers
        self.cache = cache
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def launch(self, plan: StepPlan) -> StepOutput:
        self.cache.copy(plan.copies_before)
        output = self._forward(plan)
        self.cache.copy(plan.copies_after)
        return output

    def collect(self, launched: object) -> StepOutput:
        assert isinstance(launched, StepOutput)
        return launched

    def _forward(self, plan: StepPlan) -> StepOutput:
        slots, size = self._slots, self.cache.block_size
        whole = [chunk for chunk in plan.chunks if chunk.start == 0]
        chunks = whole + [chunk for chunk in plan.chunks if chunk.start > 0]
        groups = [(np.asarray([chunk.slot]), np.arange(chunk.start, chunk.stop).reshape(1, -1)) for chunk in chunks]
        if len(plan.decoding):
            groups.append((plan.decoding, slots.length[plan.decoding].reshape(-1, 1) - 1))
        owner = np.concatenate([np.repeat(owners, positions.shape[1]) for owners, positions in groups])
        position = np.concatenate([positions.reshape(-1) for _, positions in groups])
        tokens = slots.tokens[owner, position].astype(np.int64)
        places = slots.table[owner, position // size] * size + position % size
        if self._exact:
            padding = (0, -len(owner) % EXACT_ROWS)
            tokens, position, places = np.pad(tokens, padding), np.pad(position, padding), np.pad(places, padding)
        context = StepContext(
            self.cache,
            places=self._to_device(places),
            prompt_lengths=[len(chunk) for chunk in whole],
            cached=[self._cached_rows(*group) for group in groups[len(whole) :]],
            exact=self._exact,
        )
        with self.cache.recording(self._routers, context.places), self._adapters(owner, num_rows=len(tokens)):
            hidden = hidden_states(self._model, self._to_device(tokens), self._to_device(position), context)
        ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64).tolist()
        last = {chunk.slot: end - 1 for chunk, end in zip(chunks, ends, strict=True)}
        rows = [last[chunk.slot] for chunk in plan.chunks for _ in chunk.sampling_slots]
        rows += range(plan.prompt_rows, plan.prompt_rows + plan.decode_rows)
        return self._sample(hidden.index_select(0, self._to_device(np.asarray(rows, dtype=np.int64))), plan.slots)

    def _adapters(self, owner: Array, *, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Applies to each row the version of the adapter that its slot runs; `owner` has the slots of all rows but padding."""
        adapter, held = adapter_of(self._model), self._slots.held
        serials = np.pad(self._slots.held_serial[owner], (0, num_rows - len(owner)), mode="edge")
        if adapter is None or not serials.any():
            return contextlib.nullcontext()
        tensors = {0: adapter.own, **{each.serial: each.tensors for each in held.values()}}
        found = {serial: np.flatnonzero(serials == serial) for serial in np.unique(serials).tolist()}
        if len(found) == 1:
            return adapter.applying([(tensors[serial], None) for serial in found])
        if self._exact:
            found = {serial: np.pad(rows, (0, -len(rows) % EXACT_ROWS), mode="edge") for serial, rows in found.items()}
        return adapter.applying([(tensors[serial], self._to_device(rows)) for serial, rows in found.items()])

    def _cached_rows(self, owners: Array, positions: Array) -> CachedRows:
        size = self.cache.block_size
        blocks = math.ceil((int(positions.max()) + 1) / size)
        places = (self._slots.table[owners, :blocks, None] * size + np.arange(size)).reshape(len(owners), blocks * size)
        # What follows a rollout's last token is not its own and may be NaN; a mask does not help: 0 × NaN is NaN.
        places = np.where(np.arange(blocks * size) <= positions[:, -1:], places, places[:, :1])
        return CachedRows(self._to_device(positions), self._to_device(places))

    def _sample(self, hidden: Tensor, sampling: Array) -> StepOutput:
        """One token for each row of `hidden`; `sampling` holds their slots."""
        slots, vocabulary = self._slots, range(self._head.vocabulary)  # a tokenizer may have more ids than the head
        too_early = np.flatnonzero(slots.length[sampling] < slots.floor[sampling]).tolist()
        forbidden = [(row, stop) for row in too_early for stop in slots.stops[sampling[row]].tolist() if stop in vocabulary]
        logits = self._head.logits(hidden)
        shaped = list(slots.find_shapers(sampling)) if slots.shapers else []
        for row, slot, shaper in shaped:
            shaper.shape(logits[row], slots.tokens[slot, : slots.length[slot]])
        parameters = self._to_device(slots.sampling[sampling])
        sampled = sample(
            logits,
            parameters,
            self._to_device(uniform(slots.seed[sampling], slots.length[sampling])),
            forbidden=forbidden,
            is_restricted=bool(forbidden) or bool(slots.is_truncated[sampling].any()),
        )
        masks, needs_mask = None, slots.needs_mask[sampling]
        if sampled.allowed is not None and needs_mask.any():
            rows = zip(needs_mask, sampled.allowed.cpu().numpy(), strict=True)
            masks = [SamplingMask.make_row(row) if needs else _NO_IDS for needs, row in rows]
        tops = {row: find_top(sampled.distribution[row], shaper.num_top) for row, _, shaper in shaped if shaper.num_top}
        entropies = None if slots.entropies is None else entropies_of(sampled, parameters[:, 0]).cpu().numpy()
        return StepOutput(sampled.token_ids.cpu().numpy(), sampled.logprobs.cpu().numpy(), masks, tops, entropies)

    def _to_device(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
