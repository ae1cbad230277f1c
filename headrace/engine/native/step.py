"""One step: what the scheduler plans, what a runner computes. One runner is plain torch, the other CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.records import Array


@dataclass(slots=True)
class Chunk:
    """A run of a rollout's tokens whose keys and values are computed in this step."""

    slot: int
    start: int
    stop: int
    sampling_slots: list[int]
    """Slots that sample their next token after the chunk's last one: none before the prompt is complete, several when
    siblings share it."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class StepPlan:
    """What a step computes. It samples one token for each chunk's `sampling_slots`, then one for every decoding slot."""

    chunks: list[Chunk]
    decoding: Array
    """[n] int64 slots that add one token each."""
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    """Blocks (from, to) copied before anything is computed: the last block of a forked prefix."""
    copies_after: list[tuple[int, int]] = field(default_factory=list)
    """Blocks copied after the chunks are computed: the last block of a prompt that siblings share."""

    @property
    def slots(self) -> Array:
        """[rows] int64: the slots that sample."""
        first = [slot for chunk in self.chunks for slot in chunk.sampling_slots]
        return np.concatenate([np.asarray(first, dtype=np.int64), self.decoding])

    @property
    def prompt_rows(self) -> int:
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, one entry per row of `StepPlan.slots`."""

    token_ids: Array
    """-1 where the rollout had ended before."""
    logprobs: Array
    allowed: list[Array] | None
    """The token ids each row could have sampled, where some row was restricted."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did, for the time budget."""

    prompt_rows: int
    decode_rows: int


class Runner:
    """Computes steps. This base serves runners that compute a step when it is launched and read the slots where they are."""

    ahead = 0
    """Steps that may be in flight when another is launched."""
    max_sampled = 1 << 30
    """Tokens that the chunks of one step may sample."""
    max_prompt_tokens = 8192
    """Prompt tokens computed in one step."""

    def start_slot(self, slot: int) -> None:
        """A slot was filled anew; called before the first step it takes part in."""

    def add_block(self, slot: int, index: int, block: int) -> None:
        """A rollout has one more block."""

    def launch(self, plan: StepPlan) -> object:
        """Start a step, possibly without waiting for it; what it returns is given to `collect`."""
        raise NotImplementedError

    def collect(self, launched: object) -> StepOutput:
        """What a step sampled; waits for it."""
        raise NotImplementedError

    def routing(self, places: Array) -> Array:
        """[places, MoE layers, top k] expert ids kept at these flat places of the cache of an MoE model."""
        raise NotImplementedError

    def run_in_order(self, action: Callable[[], None]) -> None:
        """Run `action` after the steps that were launched and before those that will be."""
        action()

    def synchronize(self) -> None:
        """Wait until nothing is being computed."""

    def suspend(self) -> None:
        """Wait until nothing reads the cache or the weights, and keep it so until `resume`; no step is launched meanwhile."""

    def resume(self) -> None:
        """Cache and weights are in place again."""

    def wait_warm(self) -> None:
        """Wait until nothing is being compiled or captured."""

    def close(self) -> None:
        """Compile and capture no more."""
