"""The protocols that engines follow, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from concurrent.futures import Future

    from headrace.engine.request import Growth, Request
    from headrace.partial import Interrupt
    from headrace.records import Array, FinishReason, Rollout, Sampling, WeightUpdate


class UnusablePrompt(ValueError):
    """Nothing can be generated from a prompt; the rollout is left out and the run goes on."""


class PromptTooLong(UnusablePrompt):
    """A rollout leaves no room in the context for a single new token."""


class NotFinite(RuntimeError):
    """The model's logits for a rollout are not finite: its weights or its input make it overflow."""


class EngineDied(RuntimeError):
    """The engine is gone, or its state is unknown; its supervisor restarts it."""


class EngineAsleep(RuntimeError):
    """An engine that sleeps cannot finish rollouts in flight: it has no memory for that until it is woken."""


@dataclass(frozen=True, slots=True)
class Increment:
    """The tokens that one decode step added to a streamed rollout."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None
    """None while more may come."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine's figures between two steps."""

    version: int
    lineage: str
    running: int
    waiting: int
    slots: int
    free_blocks: int
    tokens: int
    """Sampled since it was made: a clock that only moves when work does."""
    memory_peak: int = 0
    """Most bytes its process took, of the GPU's memory where it has one; of several engines, the largest."""
    policy: str = ""
    """The policy whose weights it holds."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A generate call that has not ended, as far as the caller's side knows it."""

    rollout: Rollout
    """As it was submitted."""
    num_sampled: int
    """Tokens this call is known to have sampled."""
    oldest: int | None
    """The oldest version of its sampled tokens, of this call and earlier ones; None if there are none."""
    partial: Callable[[], Rollout]
    """What a failure would leave of it now: with `ABORT`, or as submitted where no sampled token is known."""

    @classmethod
    def of(cls, rollout: Rollout, *, num_sampled: int, first: int, partial: Callable[[], Rollout]) -> InFlight:
        """`first`: the version of the first sampled token. Versions only rise, so no later token is older, and no token of an
        earlier call is newer."""
        before = rollout.oldest_version if rollout.calls else -1
        oldest = before if before >= 0 else first if num_sampled else None
        return cls(rollout, num_sampled, oldest, partial if num_sampled else lambda: rollout)


class Engine(Protocol):
    """Generates rollouts. All calls may be made at any time, from one event loop."""

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        """The rollout with one more call's tokens. A partial one (`ABORT`) is resumed by generating it again.

        Called by the generate loop and by evaluation; cancelling the await cancels the call.
        """

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        """The same call, token by token; closing the iterator cancels it."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """[T] float32 per rollout: the logprob of each token given those before it (0 for the first), under the
        current weights and each sampled token's own temperature and sampling mask."""

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop decoding, and do with rollouts in flight what `interrupt` says. One that sleeps cannot drain, and raises."""

    async def resume(self) -> None:
        """Decode again, with the requests that were queued meanwhile."""

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = ...) -> None:
        """Receive the weights of `update`, decoding meanwhile where it can, do with rollouts in flight what `interrupt` says
        (`KEEP` if not given), and use the new weights from the next decode step on. Raises, and stays on the old version,
        if what arrived is not what the manifest says. A paused engine stays paused."""

    async def state(self) -> EngineState:
        """For the run line and for health checks."""

    async def in_flight(self) -> list[InFlight]:
        """The generate calls that have not ended, without stopping any; of engines in other processes, as last reported.
        Called when a batch has been started, to cancel what is over age, and for checkpoints."""


class InlineEngine(Engine, Protocol):
    """An engine on the launcher's event loop."""

    @property
    def peak_memory(self) -> int:
        """Bytes that generation took at most."""

    async def serve(self) -> NoReturn:
        """Decode until cancelled."""


class WeightSource(Protocol):
    """The trainer's side, as a pool uses it to deliver weights to its engines."""

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        """The update as each receiver gets it: the sender and the place may differ."""

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Send it to them while they load it; returns at once where they fetch it."""

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        """The updates that bring an engine which holds `version` of this lineage, or nothing of it, to the newest."""


class SleepingEngine(Engine, Protocol):
    """An engine that can give memory back for a while."""

    async def sleep(self, *, weights: bool = ...) -> None:
        """Free the memory of the KV cache, with `weights` that of the weights too. Called when it is paused and the trainer
        needs the memory; rollouts in flight wait, and their KV cache is computed again."""

    async def wake(self) -> None:
        """Take the memory again, with the weights as they were; nothing happens if it is awake. Called before new weights are
        loaded."""


class ForkingEngine(Engine, Protocol):
    """An engine that can continue from the middle of a rollout without computing its KV cache again."""

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """The first `at` tokens of a rollout as a new one, to be generated."""

    async def pin(self, rollout_id: str) -> None:
        """Keep the KV cache of a rollout, running or yet to run, when it ends."""

    async def unpin(self, rollout_id: str) -> None:
        """Keep it no longer."""


class ProcessEngine(SleepingEngine, ForkingEngine, Protocol):
    """An engine in a process of its own: it takes requests in batches, and can be asked what they have sampled so far."""

    after_step: Callable[[], None]
    """Set by its worker; called whenever tokens were sampled or a call has ended, in the thread where that happens."""
    died: Future[None]
    """Fails with the reason when the engine can no longer generate."""

    @property
    def num_slots(self) -> int: ...

    @property
    def policy(self) -> str: ...

    def start(self) -> None:
        """Begin to decode, or to watch over the server that does."""

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue many at once; those that cannot be generated are given to `on_refused`."""

    def cancel(self, requests: Sequence[Request]) -> None:
        """Withdraw many at once."""

    def growth(self, requests: Iterable[Request] | None = None) -> list[Growth]:
        """The tokens of these requests, or of all that run, since this was last asked. Called within `after_step`."""
