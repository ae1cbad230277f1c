"""One step: what the scheduler plans and a runner computes. One runner is plain torch, the other CUDA graphs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.engine.native.cuda.graphs import GraphCapture
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
    allowed: list[Array] | None  # the token ids each row could have sampled, if some row was restricted


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
