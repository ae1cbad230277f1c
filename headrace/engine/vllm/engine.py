"""A vLLM server behind the engine protocol.

As many calls are at the server as it has slots, each a stream of its own; the others wait here. So what runs and what waits is
known, an interruption reaches exactly what has begun, and what a lost server leaves is known to the last piece that came.

Which weights drew a token is known twice. Weights change while the server stands still, and what it had drawn by then has come
before it goes on (`_settle`): so what comes before is of the old version and what comes after of the new one. Where a server
names the version of every token at the end of a call, that is what counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from headrace.engine import asking
from headrace.engine.protocol import EngineState, InFlight, NotFinite, PromptTooLong, UnusablePrompt
from headrace.engine.vllm.abilities import NAME_VERSION
from headrace.engine.vllm.api import VllmError, VllmGone, VllmRefused
from headrace.engine.vllm.call import RunningCall
from headrace.engine.vllm.score import score
from headrace.partial import Interrupt
from headrace.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from headrace.engine.protocol import Increment
    from headrace.engine.request import Growth, Request
    from headrace.engine.vllm.api import About, Piece, VllmApi
    from headrace.engine.vllm.weights import Staging
    from headrace.observe import Timeline
    from headrace.types import Array, Rollout, Sampling, WeightUpdate

_DRAIN_SECONDS = 3600.0
_ARRIVAL_SECONDS = 0.2
"""For what has ended to be heard of, and for what was sent before a pause to arrive."""
_END_SECONDS = 1.0
"""For aborted calls to say so; after that they are cut off here."""
_PULSE = 2.0
"""Seconds between two looks at whether the server is well."""
_MISSED = 5
"""Looks in a row that may fail before it counts as dead."""


class EngineDied(RuntimeError):
    """The server is gone, or nobody can tell what it runs."""


class Unsupported(RuntimeError):
    """A stock vLLM cannot do it; the message names the engine that can."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the server was started with, or says of itself."""

    slots: int
    context: int
    vocabulary: int
    block_size: int = 16
    num_blocks: int = 0
    num_candidates: int = 0
    """The most logprobs a token may come with."""


class VllmEngine:
    """An `Engine`, used from one event loop. `start` or `serve` has it watch over the server."""

    def __init__(
        self,
        api: VllmApi,
        about: About,
        *,
        name: str,
        model: str,
        limits: Limits,
        staging: Staging,
        timeline: Timeline,
        decode: Callable[[list[int]], str] | None = None,
        patience: float = 120.0,
    ) -> None:
        """`model` is the name the server knows its model by; `patience` the seconds it may be silent over calls in flight."""
        self.name, self.limits = name, limits
        self.version, self.lineage, self.policy = -1, "", ""
        self.after_step: Callable[[], None] = lambda: None
        self.died: Future[None] = Future()
        """Fails with what ended it."""
        self._api, self._model, self._staging, self._timeline = api, model, staging, timeline
        self._decode, self._patience = decode, patience
        self._names_versions = NAME_VERSION.is_in(about)
        self._waiting: OrderedDict[Request, RunningCall] = OrderedDict()
        self._running: dict[Request, RunningCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_paused, self._is_admitting = False, True
        self._is_poisoned = False
        """Its keys and values may hold what is not a number, and vLLM computes with those of freed blocks, at no weight."""
        self._is_retracted = False
        """What has begun waits without keys and values."""
        self._turn = asyncio.Lock()
        """Of whoever pauses, resumes or loads: one at a time."""
        self._num_drawn = self._num_begun = 0
        self._watching: asyncio.Task[NoReturn] | None = None
        self._heard_at = time.monotonic()
        self._note()

    # Calls

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        return await asking.generate(self, rollout, sampling)

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        return asking.stream(self, rollout, sampling)

    def begin(self, request: Request) -> None:
        """Queue it; raises where it cannot be generated."""
        if self.died.done():
            raise EngineDied("the server has ended") from self.died.exception()
        self._check(request)
        self._waiting[request] = RunningCall(request)
        self._fill()

    def withdraw(self, request: Request) -> None:
        """Its stream is closed, by which the server ends it."""
        self._waiting.pop(request, None)
        call = self._running.get(request)
        if call is not None:
            call.end()

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue many at once."""
        for request in requests:
            try:
                self.begin(request)
            except ValueError as error:
                on_refused(request, error)

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.withdraw(request)

    def _check(self, request: Request) -> None:
        rollout, limits = request.rollout, self.limits
        length = len(rollout)
        if length >= limits.context:
            raise PromptTooLong(f"rollout {rollout.id!r} has {length} tokens; the context is {limits.context}")
        if length == 0:
            raise UnusablePrompt(f"rollout {rollout.id!r} is empty; a prompt has at least one token")
        highest = int(rollout.token_ids.max())
        if highest >= limits.vocabulary:
            raise UnusablePrompt(f"rollout {rollout.id!r} holds token {highest}; the vocabulary has {limits.vocabulary}")
        if request.sampling.stop and self._decode is None:
            raise UnusablePrompt(f"rollout {rollout.id!r} has stop strings; this engine was given no tokenizer")

    def _fill(self) -> None:
        """Send as many as there are slots for."""
        while self._waiting and len(self._running) < self.limits.slots and self._is_admitting and not self._is_paused:
            request, call = self._waiting.popitem(last=False)
            self._running[request] = call
            self._idle.clear()
            request.started = time.time()
            self._num_begun += 1
            call.task = asyncio.ensure_future(self._run(call, f"{self.name}-{self._num_begun}"))
        self._note()

    async def _run(self, call: RunningCall, name: str) -> None:
        request = call.request
        try:
            await self._read(call, name)
        except asyncio.CancelledError:
            if not call.is_over:  # by whoever ends this process
                raise
        except VllmRefused as error:
            _fail(request, UnusablePrompt(f"rollout {request.rollout.id!r}: {error}"))
        except NotFinite as error:
            self._is_poisoned = True
            _fail(request, error)
        except VllmError as error:
            self._die(error)
        finally:
            if self._running.get(request) is call:
                del self._running[request]
            if not self._running:
                self._idle.set()
            self._fill()
            self.after_step()

    async def _read(self, call: RunningCall, name: str) -> None:
        request, limits = call.request, self.limits
        rollout, sampling = request.rollout, request.sampling
        pieces = self._api.generate(
            rollout.token_ids.tolist(),
            sampling,
            name=name,
            max_tokens=min(sampling.max_tokens, limits.context - len(rollout)),
            seed=call.seed,
            salt=f"{self.lineage}:{self.version}",
            num_candidates=call.num_candidates(limits.vocabulary, limits.num_candidates),
            model=self._model,
        )
        async with contextlib.aclosing(pieces):  # whatever ends it here, its stream is closed and the server hears of it
            async for piece in pieces:
                self._heard_at = time.monotonic()
                if self._take(call, piece):
                    break

    def _take(self, call: RunningCall, piece: Piece) -> bool:
        """Append what came; whether the call is over."""
        self._num_drawn += len(piece.token_ids)
        reason = call.take(
            piece, version=self.version, lineage=self.lineage, decode=self._decode, vocabulary=self.limits.vocabulary
        )
        if reason is None:
            self.after_step()
            return False
        if piece.spans is not None and self._names_versions:
            call.stamp(piece.spans)
        self._finish(call, reason)
        return True

    def _finish(self, call: RunningCall, reason: FinishReason) -> None:
        call.is_over = True
        del self._running[call.request]
        call.request.on_done(
            call.lengthened(reason, engine=self.name, policy=self.policy, lineage=call.lineage or self.lineage)
        )

    # What is in flight

    @property
    def num_slots(self) -> int:
        return self.limits.slots

    async def state(self) -> EngineState:
        size = self.limits.block_size
        is_retracted = self._is_retracted
        running = 0 if is_retracted else len(self._running)
        taken = (
            0
            if is_retracted
            else sum(-(-(len(call.request.rollout) + call.num_drawn) // size) for call in self._running.values())
        )
        return EngineState(
            version=self.version,
            lineage=self.lineage,
            running=running,
            waiting=len(self._waiting) + len(self._running) - running,
            slots=self.limits.slots,
            free_blocks=max(0, self.limits.num_blocks - taken),
            tokens=self._num_drawn,
        )

    async def in_flight(self) -> list[InFlight]:
        calls = [*self._running.values(), *self._waiting.values()]
        return [call.in_flight(engine=self.name, policy=self.policy) for call in calls if not call.is_over]

    def growth(self, requests: Iterable[Request] | None = None) -> list[Growth]:
        """News of these requests, or of all that run, since the last news of each."""
        calls = self._running.values() if requests is None else [self._running[r] for r in requests if r in self._running]
        return [grown for call in calls if (grown := call.growth()) is not None]

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        async with self._turn:
            if self._is_paused and self._running:
                raise Unsupported(
                    f"{self.name}: vLLM cannot score while it keeps {len(self._running)} rollouts paused; resume it first"
                )
            if self._is_paused:
                await self._guarded(self._api.resume)
            try:
                salt = f"{self.lineage}:{self.version}"
                whole = self.limits.num_candidates >= self.limits.vocabulary
                scoring = (score(self._api, each, model=self._model, salt=salt, may_ask_for_all=whole) for each in rollouts)
                return await asyncio.gather(*scoring)
            finally:
                if self._is_paused:
                    await self._guarded(self._api.pause, "keep")

    # Pausing and weights

    async def pause(self, interrupt: Interrupt) -> None:
        async with self._turn:
            await self._pause(interrupt)

    async def resume(self) -> None:
        async with self._turn:
            await self._resume()

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        """Received and written while the server goes on; it stands still only while it reads them."""
        staging = self._staging
        if self._is_poisoned:
            self._die(VllmGone(f"vLLM at {self._api.url}: its cache holds what is not a number; it must be started anew"))
        self._raise_if_dead()
        with self._timeline.beside(f"receive {update.version}"):
            receiving = asyncio.to_thread(staging.receive, update, lineage=self.lineage, version=self.version)
            await asking.to_its_end(receiving, give_up=staging.give_up)
        folder = await asyncio.to_thread(staging.write)
        async with self._turn:
            was_paused = self._is_paused
            if not was_paused or interrupt is not Interrupt.KEEP:
                await self._pause(interrupt)
            try:
                with self._timeline.during("swap"):
                    await self._exchange(folder, update)
            finally:
                if not was_paused and not self.died.done():
                    await self._resume()
                self._note()

    async def _exchange(self, folder: str, update: WeightUpdate) -> None:
        """Half an update is none that can be named: whatever fails here ends the engine."""
        try:
            await self._api.reload(folder)
            if self._names_versions:
                await self._api.name_version(f"{update.lineage}:{update.version}")
        except VllmError as error:
            self._die(error)
            raise EngineDied(f"version {update.version} did not get into the server: {error}") from error
        self.version, self.lineage, self.policy = update.version, update.lineage, update.policy

    async def _pause(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.DRAIN:
            await self._drain()
        elif interrupt is Interrupt.ABORT:
            await self._abort()
        else:
            if not self._is_paused:
                self._is_paused = True
                await self._guarded(self._api.pause, "keep")
                await self._settle()
            if interrupt is Interrupt.RETRACT:
                await self._guarded(self._api.drop_cache)
                self._is_retracted = True
        self._is_paused = True
        self._note()

    async def _drain(self) -> None:
        """What has begun finishes; one that was paused goes on for that, and so does what reached the server after it had
        stopped to take anything new."""
        self._is_admitting = False
        while True:
            if self._is_paused:
                await self._guarded(self._api.resume)
            await self._guarded(self._api.pause, "wait", seconds=_DRAIN_SECONDS)
            self._is_paused = True
            if await self._comes_idle(_ARRIVAL_SECONDS):
                return

    async def _abort(self) -> None:
        """What has begun ends where it is. What reached the server too late to hear of it has not begun, and waits again."""
        self._is_paused = True  # nothing new begins meanwhile
        await self._guarded(self._api.pause, "abort")
        if await self._comes_idle(_END_SECONDS):
            return
        for call in reversed(list(self._running.values())):
            if call.num_drawn:
                self._finish(call, FinishReason.ABORT)
            else:
                self._waiting[call.request] = RunningCall(call.request)
                self._waiting.move_to_end(call.request, last=False)
            call.end()
        self._running.clear()
        self._idle.set()

    async def _comes_idle(self, seconds: float) -> bool:
        """Whether nothing runs within so long."""
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
        """Until all that was drawn has come. A server that stands still says nothing new; what it has said is on its way, and
        passes before an answer that is asked for later does, or shortly after it: so until two answers with nothing between."""
        quiet = 0
        while quiet < 2 and self._running:
            before = self._num_drawn
            if not await self._api.is_up():
                self._die(VllmGone(f"vLLM at {self._api.url} does not answer while it is paused, log {self._api.log}"))
            self._raise_if_dead()
            await asyncio.sleep(0.002)
            quiet = quiet + 1 if self._num_drawn == before else 0

    # What it cannot do

    async def sleep(self, *, weights: bool = False) -> None:
        raise Unsupported("vLLM's sleep is not driven here; engine.kind = 'native' sleeps")

    async def wake(self) -> None:
        """It never sleeps."""

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """The first `at` tokens; the server's prefix cache spares what it still holds of them."""
        return rollout.forked(at, id=id)

    async def pin(self, rollout_id: str) -> None:
        raise Unsupported("vLLM cannot be told to keep a rollout's keys and values; engine.kind = 'native' can")

    async def unpin(self, rollout_id: str) -> None:
        """Nothing is pinned."""

    # Its life

    def start(self) -> None:
        """Begin to watch over the server, beside everything else."""
        self._watching = asyncio.ensure_future(self.serve())
        self._watching.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def serve(self) -> NoReturn:
        """Watch over the server; raises what it died of."""
        missed = 0
        while True:
            waiting = asyncio.wrap_future(self.died)
            await asyncio.wait([waiting], timeout=_PULSE)
            self._raise_if_dead()
            missed = 0 if await self._api.is_up() else missed + 1
            if missed >= _MISSED:
                self._die(VllmGone(f"vLLM at {self._api.url} does not answer, log {self._api.log}"))
            is_silent = self._running and not self._is_paused and time.monotonic() - self._heard_at > self._patience
            if is_silent:
                told = f"{len(self._running)} rollouts are in flight and none has grown for {self._patience:g} s"
                self._die(VllmGone(f"vLLM at {self._api.url}: {told} (engine.vllm.answer_seconds), log {self._api.log}"))

    async def close(self) -> None:
        """Give up what is in flight."""
        if self._watching is not None:
            self._watching.cancel()
        for call in [*self._running.values()]:
            self.withdraw(call.request)
        self._waiting.clear()
        await asyncio.to_thread(self._staging.close)

    def _die(self, error: Exception) -> None:
        if self.died.done():
            return
        self.died.set_exception(error)
        dead = EngineDied(str(error))
        for call in [*self._running.values(), *self._waiting.values()]:
            call.end()
            _fail(call.request, dead)
        self._waiting.clear()
        self._idle.set()

    def _raise_if_dead(self) -> None:
        if self.died.done():
            error = self.died.exception()
            raise EngineDied(str(error)) from error

    async def _guarded(self, call: Callable[..., Awaitable[None]], *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """A call of which nobody knows what it did where it failed: the engine ends with it."""
        self._raise_if_dead()
        try:
            await call(*arguments, **options)
        except VllmError as error:
            self._die(error)
            raise EngineDied(str(error)) from error

    def _note(self) -> None:
        """What its time goes to from now on."""
        self._timeline.count(occupied=len(self._running), slots=self.limits.slots)
        self._timeline.enter("wait-weights" if self._is_paused else "decode" if self._running else "wait-gate")


def _fail(request: Request, error: Exception) -> None:
    if request.on_failed is None:
        raise error
    request.on_failed(error)
