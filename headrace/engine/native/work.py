"""What the scheduler asks of whoever computes, and what comes back. One `Runner` is plain torch, the other CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.engine.native.blocks import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Array, Sampling


class Slots:
    """One line per rollout being generated, in flat arrays, so that a step's bookkeeping is a few vector operations."""

    def __init__(self, *, slots: int, context: int, blocks: int) -> None:
        self.tokens = np.zeros((slots, context), dtype=np.int32)
        self.logprobs = np.zeros((slots, context), dtype=np.float32)
        self.versions = np.zeros((slots, context), dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.floor = np.zeros(slots, dtype=np.int64)
        self.seed = np.zeros(slots, dtype=np.int64)
        self.sampling = np.zeros((slots, 4), dtype=np.float32)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)
        self.table = np.full((slots, blocks), SCRATCH, dtype=np.int64)
        self.is_watched = np.zeros(slots, dtype=bool)
        """Whoever asked wants more than its end: each token, a mask, a stop string."""
        self.is_cut = np.zeros(slots, dtype=bool)
        """Some tokens cannot be drawn, or not yet."""
        self.is_truncated = np.zeros(slots, dtype=bool)
        """By top-k, top-p or min-p: in every draw."""
        self.flying = np.zeros(slots, dtype=np.int64)
        """Draws under way that have not been collected."""
        self.epoch = np.zeros(slots, dtype=np.int64)
        """Counts the rollouts a slot has held: what was drawn for an earlier one is nobody's."""

    def is_cut_now(self, slots: Array) -> Array:
        """Whose next draw cannot be any token: a stop token may be too early now and not later."""
        is_early = self.length[slots] + self.flying[slots] < self.floor[slots]
        is_cut: Array = self.is_cut[slots] & (self.is_truncated[slots] | is_early)
        return is_cut

    def begin(self, slot: int, sampling: Sampling, *, length: int, start: int, limit: int, blocks: Sequence[int]) -> None:
        """A rollout's line; its tokens are there already. `start` is its length before this call."""
        self.length[slot], self.limit[slot], self.floor[slot] = length, limit, start + sampling.min_tokens
        self.seed[slot], self.flying[slot] = sampling.seed, 0
        self.sampling[slot] = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self.is_cut[slot] = sampling.is_truncated or (sampling.min_tokens > 0 and bool(sampling.stop_ids))
        self.is_truncated[slot] = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        self.table[slot] = SCRATCH
        self.table[slot, : len(blocks)] = blocks
        if len(sampling.stop_ids) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(sampling.stop_ids)), -1, dtype=np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(sampling.stop_ids)] = sampling.stop_ids


@dataclass(slots=True)
class Chunk:
    """A run of a rollout's tokens whose keys and values are computed in this step."""

    slot: int
    start: int
    stop: int
    draws: list[int]
    """Slots that draw their next token after the chunk's last one: none before the prompt is complete, several when
    siblings share it."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Work:
    """One step. Rows of the draw are, in order, each chunk's draws, then one for every decoding slot."""

    chunks: list[Chunk]
    decoding: Array
    """[n] int64 slots that add one token each."""
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    """Blocks copied before anything is computed: the last block of a forked beginning."""
    copies_after: list[tuple[int, int]] = field(default_factory=list)
    """Blocks copied after the chunks are computed: the last block of a prompt that siblings share."""

    @property
    def slots(self) -> Array:
        """[rows] int64: who draws."""
        first = [slot for chunk in self.chunks for slot in chunk.draws]
        return np.concatenate([np.asarray(first, dtype=np.int64), self.decoding])

    @property
    def prompt_rows(self) -> int:
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class Drawn:
    """One entry per row of the work."""

    token_ids: Array
    """-1 where the rollout had ended before."""
    logprobs: Array
    allowed: list[Array] | None
    """What each row could have drawn, where some row was cut."""


class Runner(Protocol):
    """Computes steps. `launch` may return before a step is done; `collect` waits for it."""

    ahead: int
    """Steps that may be under way when another is launched."""
    most_draws: int
    """Rows that the chunks of one step may draw."""
    most_tokens: int
    """Prompt tokens computed in one step."""

    def begin(self, slot: int) -> None:
        """A slot's line is new; told before the work it takes part in."""

    def grow(self, slot: int, index: int, block: int) -> None:
        """A rollout has one block more."""

    def launch(self, work: Work) -> object:
        """Begin a step; the answer is given to `collect`."""

    def collect(self, ticket: object) -> Drawn:
        """What a step drew."""

    def routing(self, places: Array) -> Array | None:
        """[places, MoE layers, top k] of what these flat places of the cache hold, for models that route."""

    def in_order(self, action: Callable[[], None]) -> None:
        """Do something between what was launched and what will be."""

    def wait_warm(self) -> None:
        """Until nothing is being compiled or captured."""

    def close(self) -> None:
        """Compile and capture no more."""

    def settle(self) -> None:
        """Wait until nothing is being computed."""

    def rest(self) -> None:
        """Wait until nothing reads the cache or the weights, and see that nothing does until `rouse`; no step is launched."""

    def rouse(self) -> None:
        """They are there again."""
