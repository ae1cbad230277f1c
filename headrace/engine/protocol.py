"""The seam every engine is reached through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from headrace.partial import Interrupt
    from headrace.records import Array, FinishReason, Rollout, Sampling, WeightUpdate


class UnusablePrompt(ValueError):
    """Nothing can be generated from a prompt; the rollout is left out, the run goes on."""


class PromptTooLong(UnusablePrompt):
    """A rollout leaves no room in the context for a single new token."""


class NotFinite(RuntimeError):
    """The model's logits for a rollout are not numbers: its weights or its input make it overflow."""


class EngineDied(RuntimeError):
    """It is gone, or nobody can tell what it runs; whoever supervises it begins it anew."""


class EngineAsleep(RuntimeError):
    """It was asked to finish what is in flight, and has no memory to do it with until it is woken."""


@dataclass(frozen=True, slots=True)
class Increment:
    """What one decode step added to a streamed rollout."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None
    """None while more may come."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """A look at an engine between two steps."""

    version: int
    lineage: str
    running: int
    waiting: int
    slots: int
    free_blocks: int
    tokens: int
    """Drawn since it was made: a clock that only moves when work does."""
    memory_peak: int = 0
    """Bytes its process has come to take at most, of the GPU's memory where it has one; of several engines, the largest."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A generate call that has not ended, as far as it is known where it was made."""

    rollout: Rollout
    """As it was when it was asked for."""
    num_drawn: int
    """Tokens this call is known to have drawn."""
    oldest: int | None
    """The oldest version that one of its tokens, drawn in this call or before, is known to be of; None if there is none."""
    partial: Callable[[], Rollout]
    """What a fault would leave of it now: with `ABORT`, or as it was asked for where nothing is known to be drawn."""

    @classmethod
    def of(cls, rollout: Rollout, *, num_drawn: int, first: int, partial: Callable[[], Rollout]) -> InFlight:
        """`first`: the version of the first token drawn. Engines never go back, so no later one is older, and none of an
        earlier call is younger."""
        before = rollout.oldest_version if rollout.calls else -1
        oldest = before if before >= 0 else first if num_drawn else None
        return cls(rollout, num_drawn, oldest, partial if num_drawn else lambda: rollout)


class Engine(Protocol):
    """Lengthens rollouts. All calls may be made at any time, from one event loop."""

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        """The rollout with one more call's tokens. A partial one (`ABORT`) is resumed by generating it again.

        Called by the generate loop and by evaluation; cancelling the await gives the slot back.
        """

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        """The same call, token by token; closing the iterator cancels it."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """[T] float32 per rollout: the logprob of each token given those before it (0 for the first), under the
        current weights and each sampled token's own temperature and sampling mask."""

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop decoding, doing with what is in flight as `interrupt` says. An engine that sleeps cannot drain, and says so."""

    async def resume(self) -> None:
        """Decode again; requests made while paused were queued."""

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = ...) -> None:
        """Receive the weights of `update`, decoding on meanwhile where it can, do with what is in flight as `interrupt` says
        (`KEEP` if not given), and hold the new weights from the next decode step on. Raises, and stays on the old version,
        if what arrived is not what the manifest says. A paused engine stays paused."""

    async def state(self) -> EngineState:
        """A look at it, for the run line and for health."""

    async def in_flight(self) -> list[InFlight]:
        """The generate calls that have not ended. Nothing is stopped for it, and of engines in other processes it says what
        they have told. Called when a batch has been begun, to cancel what is over age, and for checkpoints."""


class WeightSource(Protocol):
    """What a pool asks the trainer's side for when it brings weights to its engines."""

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        """The update as each of them is to get it: from where, and from whom, may differ."""

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Move it to them while they load it; returns at once where they come for it."""

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        """What brings an engine that holds `version` of this life, or nothing of it, to the newest that is held."""


class SleepingEngine(Engine, Protocol):
    """An engine that can give memory back for a while."""

    async def sleep(self, *, weights: bool = ...) -> None:
        """Give the KV cache's memory back, with `weights` that of the weights too. Called when it is paused and another needs
        the memory; what is in flight waits, and is computed again from its tokens."""

    async def wake(self) -> None:
        """Take the memory again, with the weights as they were. One that is awake stays so. Called before new weights are
        loaded."""


class ForkingEngine(Engine, Protocol):
    """An engine that can go on from the middle of a rollout without computing what came before again."""

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """The first `at` tokens of a rollout as one of its own, to be generated."""

    async def pin(self, rollout_id: str) -> None:
        """Keep the keys and values of a rollout, running or yet to run, when it ends."""

    async def unpin(self, rollout_id: str) -> None:
        """Keep them no longer."""
