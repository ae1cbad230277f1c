"""A vLLM server behind the engine protocol.

A token's version is known in two ways. Weights change while the server is paused, and every token sampled before has arrived by
the time it resumes (`_settle`): so earlier tokens are of the old version, later ones of the new. Some releases report the
version of every token at the end of a call. Then that counts, and tokens may come several at a time; a call that was cancelled
here gets no report, and ends before the first token of unknown version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.engine.protocol import EngineDied, EngineState
from headrace.engine.request import generate, run_to_the_end, stream
from headrace.engine.vllm.abilities import NAME_VERSION
from headrace.engine.vllm.api import VllmError, VllmGone
from headrace.engine.vllm.call_queue import CallQueue
from headrace.engine.vllm.running_call import TOGETHER
from headrace.engine.vllm.score import score
from headrace.partial import Interrupt
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from headrace.engine.protocol import Increment, InFlight
    from headrace.engine.vllm.api import ServerInfo, VllmApi
    from headrace.engine.vllm.call_queue import Limits
    from headrace.engine.vllm.handover import Handover, Staging
    from headrace.observe import Timeline
    from headrace.records import Array, Rollout, Sampling, WeightUpdate

_ARRIVAL_SECONDS = 0.2  # for ends of calls to be reported, and for calls sent before a pause to arrive
_END_SECONDS = 1.0  # for aborted calls to report their end; then their streams are closed
_ANSWER_SECONDS = 60.0  # for a drained server to answer
_HEALTH_SECONDS = 2.0  # between two health checks
_MISSED = 5  # failed health checks in a row after which the server counts as dead


class Unsupported(RuntimeError):
    """A stock vLLM cannot do this; the message names the engine that can."""


class VllmEngine(CallQueue):
    """A `ProcessEngine`, used from one event loop."""

    def __init__(
        self,
        api: VllmApi,
        about: ServerInfo,
        *,
        name: str,
        model: str,
        limits: Limits,
        staging: Staging,
        handover: Handover,
        timeline: Timeline,
        decode: Callable[[list[int]], str] | None = None,
        patience: float = 120.0,
        tells_late: bool = False,
    ) -> None:
        """`model` is the server's name for its model; `patience` the seconds it may be silent while calls run; `tells_late`: it
        was started to send several tokens at a time."""
        names = NAME_VERSION.is_in(about)
        super().__init__(api, name=name, model=model, limits=limits, timeline=timeline, names_versions=names, decode=decode)
        self._staging, self._handover, self._patience = staging, handover, patience
        self._tells_late = tells_late and not names
        self._is_retracted = False  # running calls wait without a KV cache
        self._turn, self._loading = asyncio.Lock(), asyncio.Lock()  # one at a time: pause, resume and swap; receiving updates
        self._watching: asyncio.Task[NoReturn] | None = None

    @property
    def max_unreported(self) -> int:
        """The most tokens of a rollout that may be sampled and not yet reported."""
        return TOGETHER - 1 if self._names_versions or self._tells_late else 0

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        return await generate(self, rollout, sampling)

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        return stream(self, rollout, sampling)

    async def state(self) -> EngineState:
        size = self.limits.block_size
        running = 0 if self._is_retracted else len(self._running)
        lengths = [] if self._is_retracted else [call.length for call in self._running.values()]
        return EngineState(
            version=self.version,
            lineage=self.lineage,
            running=running,
            waiting=len(self._waiting) + len(self._running) - running,
            slots=self.limits.slots,
            free_blocks=max(0, self.limits.num_blocks - sum(-(-length // size) for length in lengths)),
            tokens=self._num_sampled,
            policy=self.policy,
        )

    async def in_flight(self) -> list[InFlight]:
        calls = [*self._running.values(), *self._waiting.values()]
        return [call.in_flight(engine=self.name, policy=self.policy) for call in calls if not call.is_over]

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        async with self._turn:
            self._raise_if_dead()
            if self._is_paused and self._running:
                raise Unsupported(
                    f"{self.name}: vLLM cannot score while it keeps {len(self._running)} rollouts paused; resume it first"
                )
            if self._is_paused:
                await self._guarded(self._api.resume)
            try:
                return await self._score(rollouts)
            finally:
                if self._is_paused and not self.died.done():
                    await self._guarded(self._api.pause, "keep")

    async def _score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        whole = self.limits.num_candidates >= self.limits.vocabulary
        asked = functools.partial(score, self._api, model=self._model, salt=self.salt, may_ask_for_all=whole)
        try:
            async with asyncio.TaskGroup() as group:
                scoring = [group.create_task(asked(each)) for each in rollouts]
        except* VllmGone as gone:
            self._die(gone.exceptions[0])
            self._raise_if_dead()
        except* VllmError as refused:
            raise refused.exceptions[0] from None
        return [task.result() for task in scoring]

    # Pausing

    async def pause(self, interrupt: Interrupt) -> None:
        await self._in_turn(self._pause(interrupt))

    async def resume(self) -> None:
        await self._in_turn(self._resume())

    async def _in_turn(self, doing: Coroutine[Any, Any, None]) -> None:
        """Once started it runs to the end, even if the caller is cancelled: half of it could leave the server paused."""

        async def work() -> None:
            async with self._turn:
                await doing

        await run_to_the_end(work(), on_cancel=lambda: None)

    async def _pause(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.DRAIN:
            await self._drain()
        elif interrupt is Interrupt.ABORT:
            await self._abort()
        else:
            self._check_told(interrupt)
            if not self._is_paused:
                self._is_paused = True
                await self._guarded(self._api.pause, "keep")
                await self._settle()
            if interrupt is Interrupt.RETRACT:
                await self._guarded(self._api.drop_cache)
                self._is_retracted = True
        self._is_paused = True
        self._note()

    def _check_told(self, interrupt: Interrupt) -> None:
        """Calls can only continue over an update if every token sampled before it is known to have arrived."""
        if self._tells_late and self._running and interrupt in (Interrupt.KEEP, Interrupt.RETRACT):
            raise Unsupported(
                f"{self.name}: {interrupt.value!r} with rollouts in flight needs a vLLM that names the weights of every token "
                f"({NAME_VERSION.since}), or one started without --stream-interval; interrupt by 'abort' or 'drain'"
            )

    async def _drain(self) -> None:
        """Let running calls finish. A paused server resumes for that, and again for calls that arrive just after it paused."""
        self._is_admitting = False
        if self._is_paused:
            self._is_paused, self._heard_at = False, time.monotonic()
            await self._guarded(self._api.resume)
        while True:
            await self._pause_when_drained()
            if await self._comes_idle(_ARRIVAL_SECONDS):
                return
            self._die_if_silent()
            await self._guarded(self._api.resume)

    async def _pause_when_drained(self) -> None:
        """Rollouts may take any time while they grow; once none is left, the server has `_ANSWER_SECONDS` to answer."""
        pausing = asyncio.ensure_future(self._guarded(self._api.pause, "wait", seconds=None))
        pausing.add_done_callback(lambda task: task.cancelled() or task.exception())
        drained = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait({pausing, drained}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        try:
            await asyncio.wait_for(pausing, 0 if self.died.done() else _ANSWER_SECONDS)
        except TimeoutError:
            self._die(VllmGone(f"vLLM at {self._api.url} has drained and does not say so, log {self._api.log}"))
        self._raise_if_dead()

    async def _abort(self) -> None:
        """End running calls where they are. Calls that reached the server too late have sampled nothing, and wait again."""
        self._is_paused = True  # nothing new starts meanwhile
        await self._guarded(self._api.pause, "abort")
        if await self._comes_idle(_END_SECONDS):
            return
        for call in reversed(list(self._running.values())):
            if call.is_over:
                continue
            if call.num_known:
                self._finish(call, FinishReason.ABORT)
            else:
                self._put_back(call)
            call.end()
        self._running.clear()
        self._idle.set()

    async def _comes_idle(self, seconds: float) -> bool:
        """Whether all calls end within `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        self._raise_if_dead()
        return not self._running

    async def _resume(self) -> None:
        await self._guarded(self._api.resume)
        self._is_admitting, self._is_paused, self._is_retracted = True, False, False
        self._heard_at = time.monotonic()
        self._fill()

    async def _settle(self) -> None:
        """Wait until all sampled tokens have arrived. A paused server sends nothing new, and what it sent before arrives before
        the answer to a later health check or shortly after: so wait for two answers with no token between them."""
        quiet = missed = 0
        while quiet < 2 and self._running:
            before = self._num_sampled
            missed = 0 if await self._api.is_up() else missed + 1
            if missed >= _MISSED:
                self._die(VllmGone(f"vLLM at {self._api.url} does not answer while it is paused, log {self._api.log}"))
            self._raise_if_dead()
            await asyncio.sleep(0.002)
            quiet = quiet + 1 if self._num_sampled == before and not missed else 0

    # Weights

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        """The server keeps running while the update is received and prepared; it pauses only to load it."""
        async with self._loading:
            self._check_told(interrupt)
            if self._has_bad_cache:
                self._die(VllmGone(f"vLLM at {self._api.url}: its KV cache holds NaN; it must be restarted"))
            self._raise_if_dead()
            staging = self._staging
            with self._timeline.beside(f"receive {update.version}"):
                receiving = asyncio.to_thread(staging.receive, update, lineage=self.lineage, version=self.version)
                await run_to_the_end(receiving, on_cancel=staging.give_up)
            await run_to_the_end(self._hand_over(update, interrupt), on_cancel=lambda: None)

    async def _hand_over(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        """From this process to the server. A failure could leave half an update there, so it ends the engine."""
        try:
            await asyncio.to_thread(lambda: self._handover.prepare(self._staging.take()))
            await self._exchange(update, interrupt)
        except EngineDied:
            raise
        except Exception as error:
            self._die(error)
            raise EngineDied(f"version {update.version} did not get into the server: {error}") from error

    async def _exchange(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        async with self._turn:
            was_paused = self._is_paused
            if interrupt is Interrupt.DRAIN:
                await self._pause(interrupt)
            self._is_swapping = True
            self._note()
            try:
                if not self._is_paused or interrupt not in (Interrupt.KEEP, Interrupt.DRAIN):
                    await self._pause(interrupt)
                await self._handover.hand_over(self._api)
                if self._names_versions:
                    await self._api.name_version(f"{update.lineage}:{update.version}")
                self.version, self.lineage, self.policy = update.version, update.lineage, update.policy
                if not was_paused:
                    await self._resume()
            finally:
                self._is_swapping = False
                self._note()

    # What it cannot do

    async def sleep(self, *, weights: bool = False) -> None:
        raise Unsupported("vLLM's sleep is not supported; engine.kind = 'native' sleeps")

    async def wake(self) -> None:
        """It is always awake."""

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """Its prompt is recomputed, except for what the server's prefix cache holds."""
        return rollout.forked(at, id=id)

    async def pin(self, rollout_id: str) -> None:
        raise Unsupported("vLLM cannot be told to keep a rollout's KV cache; engine.kind = 'native' can")

    async def unpin(self, rollout_id: str) -> None:
        """Nothing is pinned."""

    # Start, watch and close

    def start(self) -> None:
        """Start to watch the server."""
        self._watching = asyncio.ensure_future(self._watch())
        self._watching.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _watch(self) -> NoReturn:
        """Runs until the server is dead, then raises the reason."""
        missed, died = 0, asyncio.wrap_future(self.died)
        while True:
            await asyncio.wait([died], timeout=_HEALTH_SECONDS)
            if died.done():
                died.exception()
            if not self._is_paused:
                self._die_if_silent()
            self._raise_if_dead()
            missed = 0 if await self._api.is_up() else missed + 1
            if missed >= _MISSED:
                self._die(VllmGone(f"vLLM at {self._api.url} does not answer, log {self._api.log}"))

    def _die_if_silent(self) -> None:
        if self._running and time.monotonic() - self._heard_at > self._patience:
            told = f"{len(self._running)} rollouts are in flight and none has grown for {self._patience:g} s"
            self._die(VllmGone(f"vLLM at {self._api.url}: {told} (engine.vllm.answer_seconds), log {self._api.log}"))

    async def close(self) -> None:
        """Cancel the calls in flight and disconnect."""
        if self._watching is not None:
            self._watching.cancel()
        for call in [*self._running.values()]:
            self.withdraw(call.request)
        self._waiting.clear()
        await asyncio.to_thread(self._handover.close)
        await self._api.close()

    async def _guarded(self, call: Callable[..., Awaitable[None]], *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """A call whose failure ends the engine, since nobody knows how much of it the server has done."""
        self._raise_if_dead()
        try:
            await call(*arguments, **options)
        except VllmError as error:
            self._die(error)
            raise EngineDied(str(error)) from error
