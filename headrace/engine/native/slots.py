"""The state of every slot in flat arrays, so that a step's bookkeeping is a few vector operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.native.blocks import SCRATCH

if TYPE_CHECKING:
    from headrace.engine.request import Request
    from headrace.records import Array


class Slots:
    """One row per rollout being generated."""

    def __init__(self, *, slots: int, context: int, blocks: int) -> None:
        self.tokens = np.zeros((slots, context), dtype=np.int32)
        self.logprobs = np.zeros((slots, context), dtype=np.float32)
        self.versions = np.zeros((slots, context), dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)  # the length at which the call ends
        self.floor = np.zeros(slots, dtype=np.int64)  # the length below which no stop token may be sampled
        self.seed = np.zeros(slots, dtype=np.int64)
        self.sampling = np.zeros((slots, 4), dtype=np.float32)  # temperature, top-k, top-p, min-p
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        self.table = np.full((slots, blocks), SCRATCH, dtype=np.int64)
        self.is_watched = np.zeros(slots, dtype=bool)  # every token is looked at: for a stream, a sampling mask or stop strings
        self.is_truncated = np.zeros(slots, dtype=bool)  # by top-k, top-p or min-p
        self.in_flight = np.zeros(slots, dtype=np.int64)  # tokens of steps launched and not yet collected
        self.epoch = np.zeros(slots, dtype=np.int64)  # counts a slot's rollouts: tokens sampled for an earlier one are dropped

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
        self.length[slot], self.limit[slot] = length, min(self.tokens.shape[1], start + sampling.max_tokens)
        self.floor[slot] = start + sampling.min_tokens if sampling.stop_ids else 0
        self.seed[slot], self.in_flight[slot] = sampling.seed, 0
        self.epoch[slot] += 1
        self.sampling[slot] = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.is_truncated[slot] = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        self.is_watched[slot] = request.on_tokens is not None or sampling.is_truncated or bool(sampling.stop)
        self.table[slot] = SCRATCH
        self.table[slot, : len(request.blocks)] = request.blocks
        if len(sampling.stop_ids) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(sampling.stop_ids) - self.stops.shape[1])), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids
