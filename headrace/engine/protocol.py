"""The protocols that engines follow, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from concurrent.futures import Future

    from headrace.engine.request import HeldAdapter, Request, SampledSince
    from headrace.engine.shaping import Shaping, TopLogprobs
    from headrace.partial import Interrupt
    from headrace.records import Array, FinishReason, Rollout, Sampling, WeightUpdate


OnTokens: TypeAlias = "Callable[[Increment], None]"


class UnusablePrompt(ValueError):
    """Nothing can be generated from this prompt; the run leaves the rollout out and goes on."""


class PromptTooLong(UnusablePrompt):
    """The rollout leaves no room in the context for a new token."""


class NotFinite(RuntimeError):
    """The model's logits for a rollout are not finite: its weights or its input make it overflow."""


class EngineDied(RuntimeError):
    """The engine is gone, or its state is unknown; its supervisor restarts it."""


class EngineAsleep(RuntimeError):
    """A sleeping engine cannot finish rollouts in flight: it has no memory for them until it wakes."""


@dataclass(frozen=True, slots=True)
class Increment:
    """The tokens that one decode step added to a streamed rollout."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason | None
    """None while more tokens may come."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Of each token, if they were asked for."""


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
    """Sampled since it was made: a clock that only advances while it works."""
    memory_peak: int = 0
    """Peak bytes of its process, in GPU memory if it uses a GPU; of several engines, the largest."""
    policy: str = ""


class InFlight(NamedTuple):
    """A generate call in flight, as the caller's side knows it. Light: its tokens are copied only by `partial`."""

    rollout: Rollout
    """As submitted."""
    num_sampled: int
    """Tokens this call is known to have sampled."""
    oldest: int | None
    """The oldest version of its sampled tokens, earlier calls included; None if there are none."""
    partial: Callable[[], Rollout]
    """The rollout as a failure would leave it now: with `ABORT`, or as submitted if no sampled token is known. May be called
    later and in any thread."""

    @classmethod
    def of(cls, rollout: Rollout, *, num_sampled: int, first: int, partial: Callable[[], Rollout]) -> InFlight:
        """`first` is the version of this call's first token. Versions only rise, so earlier calls have the oldest."""
        before = rollout.oldest_version if rollout.calls else -1
        oldest = before if before >= 0 else first if num_sampled else None
        return cls(rollout, num_sampled, oldest, partial if num_sampled else lambda: rollout)


class Engine(Protocol):
    """Generates rollouts. Any call may be made at any time, from one event loop."""

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens | None = ...) -> Rollout:
        """The rollout with one more call's tokens. To resume a partial one (`ABORT`), generate it again. Called by the generate
        loop and by evaluation; cancelling the await cancels the call. `on_tokens` is told of the tokens as they come."""

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        """The same call, token by token; closing the iterator cancels it."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        """[T] float32 per rollout: the logprob of each token given those before it (0 for the first), under the
        current weights and each sampled token's own temperature and sampling mask."""

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop decoding and apply `interrupt` to rollouts in flight. Raises `EngineAsleep` if they cannot drain."""

    async def resume(self) -> None:
        """Decode again, with the requests that were queued meanwhile."""

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = ...) -> None:
        """Receive the weights of `update`, if possible while decoding, apply `interrupt` (default `KEEP`) to rollouts in
        flight, and use the new weights from the next decode step on. If what arrives does not match the manifest, raise and
        keep the old version. A paused engine stays paused."""

    def release(self, rollout_ids: Sequence[str]) -> None:
        """These will not be continued: what is kept for their next turns may go. Called when an episode of several turns has
        ended, and with leases when any has; without it, they go when memory is needed and they are the oldest. The lease
        of a rollout that is never released ends after `MOST_LEASES` other rollouts have ended."""

    async def state(self) -> EngineState:
        """For the run line and for health checks."""

    async def in_flight(self) -> list[InFlight]:
        """The generate calls in flight, without stopping any; for engines in other processes, as last reported. Called when a
        batch has been started, to cancel rollouts that are too old, and for checkpoints."""


class ServedEngine(Engine, Protocol):
    """An engine behind `headrace serve`."""

    def stream(
        self, rollout: Rollout, sampling: Sampling, *, shaping: Shaping | None = ..., held: HeldAdapter | None = ...
    ) -> AsyncIterator[Increment]:
        """As any engine's; `shaping` says what goes beyond `sampling`, `held` is the adapter to use instead of its own."""

    async def score(self, rollouts: Sequence[Rollout], *, held: HeldAdapter | None = ...) -> list[Array]:
        """As any engine's, with the adapter `held` instead of its own."""


class InlineEngine(Engine, Protocol):
    """An engine on the launcher's event loop."""

    @property
    def peak_memory(self) -> int:
        """Peak bytes used by generation."""

    async def serve(self) -> NoReturn:
        """Decode until cancelled."""


class WeightSource(Protocol):
    """The trainer's side, which a pool uses to deliver weights to its engines."""

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        """The update as each receiver gets it; senders and locations may differ."""

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Send it while they load it; returns at once if they fetch it themselves."""

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        """The updates that bring an engine from `version` of this lineage (None: it holds nothing of it) to the newest."""


class SleepingEngine(Engine, Protocol):
    """An engine that can give memory back for a while."""

    async def sleep(self, *, weights: bool = ...) -> None:
        """Free the memory of the KV cache and, with `weights`, that of the weights. Called while it is paused, when the trainer
        needs the memory; rollouts in flight wait, and their KV cache is recomputed."""

    async def wake(self) -> None:
        """Take the memory back, with the weights as they were; no effect if awake. Called before new weights are loaded."""


class RequestQueue(Protocol):
    """What `generate` and `stream` (`request`) need of an engine."""

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue many at once; `on_refused` gets those that cannot be generated."""

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel many at once and free what they hold; requests that have ended are ignored."""


class ProcessEngine(SleepingEngine, RequestQueue, Protocol):
    """An engine in its own process: it takes requests in batches, and reports what they have sampled so far."""

    after_step: Callable[[], None]
    """Set by its worker; called when tokens were sampled or a call has ended, in the thread where that happened."""
    died: Future[None]
    """Fails with the reason when the engine can no longer generate."""

    @property
    def num_slots(self) -> int: ...

    @property
    def policy(self) -> str: ...

    def start(self) -> None:
        """Start decoding, or start to watch the server that does."""

    async def take_back(self, count: int) -> list[Request]:
        """Withdraw up to so many requests that have not started, those queued last, and return them."""

    def growth(self, requests: Iterable[Request] | None = None, *, least: float = 0.0) -> list[SampledSince]:
        """The tokens that these requests (default: all running) have sampled since they were last returned, of those that have
        grown by more than this share of what was returned before. Called within `after_step`."""
