"""What the scheduler, the core and the runners share: a step's plan and output, the state of the slots, what a runner does."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.native.blocks import SCRATCH
from headrace.engine.native.shaping import Shaper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.engine.native.cuda.graphs import GraphCapture
    from headrace.engine.request import HeldAdapter, Request
    from headrace.engine.shaping import TopLogprobs
    from headrace.records import Array


@dataclass(slots=True)
class Chunk:
    """A run of a rollout's tokens whose keys and values are computed in this step."""

    slot: int
    start: int
    stop: int
    sampling_slots: list[int]  # slots that sample after its last token: none before the prompt's end, several for siblings

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class StepPlan:
    """What a step computes. It samples one token for each chunk's `sampling_slots`, then one for every decoding slot."""

    chunks: list[Chunk]
    decoding: Array  # [n] int64 slots
    copies_before: list[tuple[int, int]] = field(default_factory=list)  # (from, to): the last blocks of forked prefixes
    copies_after: list[tuple[int, int]] = field(default_factory=list)  # the last blocks of prompts that siblings share

    @property
    def slots(self) -> Array:
        """[rows] int64: the slots that sample."""
        first = [slot for chunk in self.chunks for slot in chunk.sampling_slots]
        return np.concatenate([np.asarray(first, dtype=np.int64), self.decoding])

    @property
    def prompt_rows(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def decode_rows(self) -> int:
        return len(self.decoding)

    @property
    def is_empty(self) -> bool:
        """Nothing can be computed before an earlier step is collected."""
        return not self.chunks and not len(self.decoding)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, one entry per row of `StepPlan.slots`."""

    token_ids: Array  # -1 where the rollout had already ended
    logprobs: Array
    masks: list[Array] | None  # a row of a `SamplingMask` each, if some row needs one
    tops: dict[int, TopLogprobs] = field(default_factory=dict)  # by row, where they are wanted
    entropies: Array | None = None  # of the distributions sampled from, if they are recorded


class Slots:
    """One row per rollout being generated, in flat arrays: a step's bookkeeping is a few vector operations."""

    def __init__(self, *, slots: int, context: int, blocks: int, records_entropy: bool = False) -> None:
        self.tokens = np.zeros((slots, context), dtype=np.int32)
        self.logprobs = np.zeros((slots, context), dtype=np.float32)
        self.versions = np.zeros((slots, context), dtype=np.int32)
        self.entropies = np.zeros((slots, context), dtype=np.float32) if records_entropy else None
        self.length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)  # the length at which the call ends
        self.floor = np.zeros(slots, dtype=np.int64)  # the length below which no stop token may be sampled
        self.seed = np.zeros(slots, dtype=np.int64)
        self.sampling = np.zeros((slots, 4), dtype=np.float32)  # temperature, top-k, top-p, min-p
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        self.table = np.full((slots, blocks), SCRATCH, dtype=np.int64)
        self.is_watched = np.zeros(slots, dtype=bool)  # every token is looked at: for a stream, a sampling mask or stop strings
        self.is_truncated = np.zeros(slots, dtype=bool)  # by top-k, top-p or min-p
        self.needs_mask = np.zeros(slots, dtype=bool)
        self.shapers: dict[int, Shaper] = {}  # of the slots that have one; their next step waits until none is in flight
        self.held: dict[int, HeldAdapter] = {}  # of the slots whose requests keep an older version of the adapter
        self.held_version = np.full(slots, -1, dtype=np.int32)  # of those; -1 where the newest runs
        self.held_serial = np.zeros(slots, dtype=np.int64)  # of those; 0 where the newest runs
        self.in_flight = np.zeros(slots, dtype=np.int64)  # tokens of steps launched and not yet collected
        self.epoch = np.zeros(slots, dtype=np.int64)  # counts a slot's rollouts: tokens sampled for an earlier one are dropped

    def find_shapers(self, slots: Array) -> Iterator[tuple[int, int, Shaper]]:
        """(row, slot, shaper) of each row that has one."""
        return ((row, slot, self.shapers[slot]) for row, slot in enumerate(slots.tolist()) if slot in self.shapers)

    def versions_of(self, slots: Array, *, newest: int) -> Array:
        """The version of the weights that each of these slots runs."""
        held: Array = self.held_version[slots]
        return np.where(held < 0, np.int32(newest), held)

    def hold(self, slot: int, held: HeldAdapter) -> None:
        self.held[slot], self.held_version[slot], self.held_serial[slot] = held, held.version, held.serial

    def let_go(self, slot: int) -> None:
        self.held.pop(slot, None)
        self.held_version[slot], self.held_serial[slot] = -1, 0

    def is_restricted(self, slots: Array) -> Array:
        """Which slots cannot sample every token next: truncated, or too early for a stop token."""
        is_early = self.length[slots] + self.in_flight[slots] < self.floor[slots]
        is_restricted: Array = self.is_truncated[slots] | is_early
        return is_restricted

    def start(self, request: Request, token_ids: Array) -> None:
        """Fill a rollout's row. `token_ids` are those it has, including what this call had sampled before a retraction."""
        slot, sampling, saved = request.slot, request.sampling, request.saved
        start, length = len(request.rollout), len(token_ids)
        self.tokens[slot, :length] = token_ids
        if saved is not None:
            self.logprobs[slot, start:length], self.versions[slot, start:length] = saved.logprobs, saved.versions
            if self.entropies is not None:
                self.entropies[slot, start:length] = saved.entropies
        self.length[slot], self.limit[slot] = length, min(self.tokens.shape[1], start + sampling.max_tokens)
        self.floor[slot] = start + sampling.min_tokens if sampling.stop_ids else 0
        self.seed[slot], self.in_flight[slot] = sampling.seed, 0
        self.epoch[slot] += 1
        truncation = (sampling.top_k, sampling.top_p, sampling.min_p) if sampling.temperature else (0, 1, 0)
        self.sampling[slot] = (sampling.temperature, *truncation)
        if request.held is not None:
            self.hold(slot, request.held)
        if request.shaping is not None:
            self.shapers[slot] = Shaper(request, request.shaping)
        self.is_truncated[slot] = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        self.needs_mask[slot] = sampling.needs_mask
        self.is_watched[slot] = request.on_tokens is not None or sampling.needs_mask or bool(sampling.stop)
        self.table[slot] = SCRATCH
        self.table[slot, : len(request.blocks)] = request.blocks
        if len(sampling.stop_ids) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(sampling.stop_ids) - self.stops.shape[1])), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids


class Runner:
    """Computes steps. These defaults suit a runner that computes a step at its launch and reads `Slots` directly."""

    ahead = 0  # steps that may be in flight when another is launched
    max_sampled = 1 << 30  # tokens that the chunks of one step may sample
    max_prompt_tokens = 8192  # prompt tokens computed in one step
    graphs: GraphCapture | None = None  # compiles and captures steps beside serving

    def start_slot(self, slot: int) -> None:
        """Called when a slot has a new rollout, before its first step."""

    def add_block(self, slot: int, index: int, block: int) -> None:
        """Called when a running rollout gets one more block."""

    def hold_adapters(self) -> None:
        """Called when running rollouts came to keep the adapter they ran."""

    def exchanged(self) -> None:
        """Called within `in_order`, right after new weights were swapped in."""

    def launch(self, plan: StepPlan) -> object:
        """Start a step, possibly without waiting for it; the core passes the result to `collect`."""
        raise NotImplementedError

    def collect(self, launched: object) -> StepOutput:
        """Wait for a step; returns what it sampled."""
        raise NotImplementedError

    def in_order(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work is done after all steps launched so far and before the next."""
        return contextlib.nullcontext()

    def suspend(self) -> None:
        """Wait until nothing reads the cache or the weights; until `resume` nothing will, and no step is launched."""

    def resume(self) -> None:
        """Called when cache and weights are in place again."""
