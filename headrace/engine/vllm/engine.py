"""A vLLM server behind the engine protocol.

As many calls run at the server as it has slots, each a stream of its own; the others wait here. So the engine knows what runs
and what waits, an interrupt reaches exactly the calls that have started, and when the server is lost, every call is known up to
the last piece received.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from headrace.engine.protocol import EngineDied, EngineState, NotFinite, UnusablePrompt
from headrace.engine.request import MOST_LEASES, generate, run_to_the_end, stream
from headrace.engine.vllm.api import VllmError, VllmGone, VllmRefused
from headrace.engine.vllm.call import TOGETHER, VllmCall
from headrace.engine.vllm.handover import saved_form
from headrace.engine.vllm.score import MOST_SCORED, score
from headrace.engine.vllm.server_checks import NAME_VERSION
from headrace.model import WeightError, adapter_of, check_order
from headrace.partial import Interrupt
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from transformers import PreTrainedModel

    from headrace.engine.protocol import Increment, InFlight, OnTokens
    from headrace.engine.request import Request, SampledSince
    from headrace.engine.vllm.api import ServerInfo, VllmApi
    from headrace.engine.vllm.handover import Handover
    from headrace.model import Routers, StagedWeights
    from headrace.observe import Timeline
    from headrace.records import Array, Rollout, Sampling, WeightUpdate
    from headrace.sync import WeightSync

_END_SECONDS = 1.0  # for aborted calls to report their end; then their streams are closed
_HEALTH_SECONDS = 2.0  # between two health checks


class Unsupported(RuntimeError):
    """A stock vLLM cannot do this; the message names the engine that can."""


class Lease(NamedTuple):
    """The adapter that a rollout's calls name."""

    adapter: str
    version: int
    salt: str


class VllmEngine:
    """A `ProcessEngine`, used from one event loop."""

    def __init__(
        self,
        api: VllmApi,
        about: ServerInfo,
        *,
        name: str,
        slots: int,
        context: int,
        vocabulary: int,
        model: PreTrainedModel,
        staged: StagedWeights,
        sync: WeightSync,
        handover: Handover,
        timeline: Timeline,
        decode: Callable[[list[int]], str] | None = None,
        end_ids: Sequence[int] = (),
        patience: float = 120.0,
        tells_late: bool = False,
        records_entropy: bool = False,
        routers: Routers | None = None,
        keeps_leases: bool = False,
    ) -> None:
        """`staged` is where updates of `model` arrive; `end_ids`: the model's own stop tokens, which vLLM forbids with a call's
        `stop_ids` as long as `min_tokens` does; `patience`: the seconds the server may be silent while calls run; `tells_late`:
        it was started to send several tokens at a time; `records_entropy`: of each token's distribution; `routers`: of the
        model, if the experts of each token are recorded; `keeps_leases`: a rollout keeps its adapter until it is released."""
        self.api, self.name, self.decode = api, name, decode
        self.num_slots, self.context, self.vocabulary, self.end_ids = slots, context, vocabulary, end_ids
        self.names_versions = NAME_VERSION.is_in(about)  # it reports the version of every token
        self.records_entropy, self.routers = records_entropy, routers
        self.version, self.lineage, self.policy = -1, "", ""
        self.after_step: Callable[[], None] = lambda: None
        self.died: Future[None] = Future()  # fails with the reason when the engine can no longer generate
        self._model, self._staged, self._sync = model, staged, sync
        self._trains = adapter_of(model)  # the adapter, if updates are of one
        self._handover, self._timeline, self._patience = handover, timeline, patience
        self._tells_late = tells_late and not self.names_versions
        self.max_unreported = TOGETHER - 1 if self.names_versions or tells_late else 0
        """The most tokens of a rollout that may be sampled and not yet reported."""
        self._keeps_leases = keeps_leases
        self._leases: dict[str, Lease] = {}  # by rollout
        self._waiting: dict[Request, VllmCall] = {}
        self._running: dict[Request, VllmCall] = {}
        self._is_admitting = True  # waiting calls may be sent
        self._is_paused = False  # the server stands still
        self.is_aborting = False  # running calls end, and send nothing more
        self._is_retracted = False  # running calls wait without a KV cache
        self._has_bad_cache = False  # its KV cache may hold NaN, for good: vLLM multiplies freed blocks by 0, which keeps NaN
        self._turn, self._loading = asyncio.Lock(), asyncio.Lock()  # one at a time: pause, resume and swap; receiving updates
        self._num_sampled, self._heard_at = 0, time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._note()

    @property
    def salt(self) -> str:
        """Keeps new calls from using prefixes that older weights cached."""
        return f"{self.lineage}:{self.version}"

    @property
    def adapter(self) -> str:
        """What new rollouts name as their model; empty if all weights are trained."""
        return self._handover.adapter

    def lease(self, rollout: Rollout) -> Lease:
        """What samples a rollout's next call: the newest, unless it keeps what it began with."""
        newest = Lease(self.adapter, self.version, self.salt)
        if not self._keeps_leases:
            return newest
        kept = self._leases.pop(rollout.id, newest) if rollout.num_sampled else newest
        self._leases[rollout.id] = kept
        if len(self._leases) > MOST_LEASES:
            del self._leases[next(iter(self._leases))]
        return kept

    async def state(self) -> EngineState:
        running = 0 if self._is_retracted else len(self._running)
        return EngineState(
            version=self.version,
            lineage=self.lineage,
            running=running,
            waiting=len(self._waiting) + len(self._running) - running,
            slots=self.num_slots,
            free_blocks=0,  # only the server knows
            tokens=self._num_sampled,
            policy=self.policy,
        )

    async def in_flight(self) -> list[InFlight]:
        return [call.in_flight() for call in [*self._running.values(), *self._waiting.values()] if not call.is_over]

    # Calls

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens | None = None) -> Rollout:
        return await generate(self, rollout, sampling, on_tokens=on_tokens)

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        return stream(self, rollout, sampling)

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        self._raise_if_dead()
        for request in requests:
            try:
                request.check(context=self.context, vocabulary=self.vocabulary, has_tokenizer=self.decode is not None)
            except ValueError as error:
                on_refused(request, error)
            else:
                self._waiting[request] = VllmCall(request, self)
        self._fill()

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._waiting.pop(request, None)
            if request in self._running:
                self._running[request].end()

    def growth(self, requests: Iterable[Request] | None = None, *, least: float = 0.0) -> list[SampledSince]:
        calls = self._running.values() if requests is None else [self._running[r] for r in requests if r in self._running]
        return [grown for call in calls if (grown := call.growth(least=least)) is not None]

    def heard(self, num_tokens: int) -> None:
        """A call got a piece with so many tokens."""
        self._heard_at = time.monotonic()
        self._num_sampled += num_tokens

    def _fill(self) -> None:
        """Send as many calls as there are free slots."""
        while self._waiting and len(self._running) < self.num_slots and self._is_admitting:
            if not self._running:
                self._heard_at = time.monotonic()
            request = next(iter(self._waiting))
            call = self._running[request] = self._waiting.pop(request)
            request.started = time.time()
            call.task = asyncio.ensure_future(self._run(call))
            call.task.add_done_callback(functools.partial(self._ended, call))
        self._note()

    def _ended(self, call: VllmCall, *_: object) -> None:
        """Called at the end of its task, and after it: one that is cancelled before its first step has none."""
        if self._running.get(call.request) is call:
            del self._running[call.request]
            self._fill()
            self.after_step()

    async def _run(self, call: VllmCall) -> None:
        request = call.request
        try:
            await call.read()
        except asyncio.CancelledError:
            if not call.is_over:  # the process is ending
                raise
        except VllmRefused as error:
            _fail(request, UnusablePrompt(f"rollout {request.rollout.id!r}: {error}"))
        except NotFinite as error:
            self._has_bad_cache = True
            _fail(request, error)
        except VllmError as error:
            self._die(error)
        except Exception as error:  # noqa: BLE001  (whatever it is, callers must not wait forever)
            self._die(self.api.gone(f"its answer could not be read: {error!r}"))
        finally:
            self._ended(call)

    async def _calls_end(self, seconds: float | None = None) -> None:
        """Wait until all running calls have ended, at most so long."""
        tasks = [call.task for call in self._running.values() if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self._raise_if_dead()

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        scored: list[Array | BaseException] = []

        async def work() -> None:
            if self._is_paused and self._running:
                raise Unsupported(
                    f"{self.name}: vLLM cannot score while it keeps {len(self._running)} rollouts paused; resume it first"
                )
            if self._is_paused:
                await self.api.resume()
            whole = self.vocabulary <= MOST_SCORED
            how = functools.partial(score, self.api, salt=self.salt, may_ask_for_all=whole, adapter=self.adapter)
            scored.extend(await asyncio.gather(*map(how, rollouts), return_exceptions=True))
            if self._is_paused:
                await self.api.pause("keep")

        await self._in_turn(work)
        for each in scored:
            if isinstance(each, VllmGone):
                self._die(each)
                self._raise_if_dead()
            if isinstance(each, BaseException):
                raise each
        return [each for each in scored if not isinstance(each, BaseException)]

    # Pausing

    async def pause(self, interrupt: Interrupt) -> None:
        await self._in_turn(lambda: self._pause(interrupt))

    async def resume(self) -> None:
        await self._in_turn(self._resume)

    async def _in_turn(self, work: Callable[[], Awaitable[None]], *, failed: str = "") -> None:
        """Once started it runs to the end, even if the caller is cancelled, and a failure ends the engine: half of it could
        leave the server paused, or with half an update."""

        async def working() -> None:
            async with self._turn:
                self._raise_if_dead()
                try:
                    await work()
                except (EngineDied, Unsupported, WeightError):
                    raise
                except Exception as error:
                    self._die(error)
                    raise EngineDied(f"{failed}{error}") from error

        await run_to_the_end(working(), on_cancel=lambda: None)

    async def _pause(self, interrupt: Interrupt) -> None:
        self._check_told(interrupt)
        self._is_admitting = False
        if interrupt is Interrupt.DRAIN:
            if self._is_paused:
                self._is_paused, self._heard_at = False, time.monotonic()
                await self.api.resume()
            await self._calls_end()
            await self.api.pause("keep")
        elif interrupt is Interrupt.ABORT:
            self.is_aborting = True
            await self.api.pause("abort")
            await self._calls_end(_END_SECONDS)
            for call in [each for each in self._running.values() if not each.is_over]:  # whose end the server does not report
                call.finish(FinishReason.ABORT)
                call.end()
        elif not self._is_paused:
            await self.api.pause("keep")
            await self._settle()
        self._is_paused, self.is_aborting = True, False
        if interrupt is Interrupt.RETRACT:
            await self.api.drop_cache()
            self._is_retracted = True
        self._note()

    def _check_told(self, interrupt: Interrupt) -> None:
        """Calls can only continue over an update if every token sampled before it is known to have arrived."""
        if self._tells_late and self._running and interrupt in (Interrupt.KEEP, Interrupt.RETRACT):
            raise Unsupported(
                f"{self.name}: {interrupt.value!r} with rollouts in flight needs a vLLM that names the weights of every token "
                f"({NAME_VERSION.since}), or one started without --stream-interval; interrupt by 'abort' or 'drain'"
            )

    async def _settle(self) -> None:
        """Wait until all sampled tokens have arrived. A paused server sends nothing new, and what it sent before arrives before
        the answer to a later health check or shortly after: so wait for two answers with no token between them."""
        quiet = 0
        while quiet < 2 and self._running:
            before = self._num_sampled
            is_up = await self.api.is_up()
            self._raise_if_dead()
            await asyncio.sleep(0.002)
            quiet = quiet + 1 if self._num_sampled == before and is_up else 0

    async def _resume(self) -> None:
        await self.api.resume()
        self._is_admitting, self._is_paused, self._is_retracted = True, False, False
        self._heard_at = time.monotonic()
        self._fill()

    # Weights

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        """The server keeps running while the update is received and prepared; it pauses only to load it."""
        async with self._loading:
            self._check_told(interrupt)
            if self._trains is None and interrupt is Interrupt.LEASE:
                raise Unsupported(f"{self.name}: 'lease' keeps versions of an adapter, and all weights are trained")
            if self._trains is not None and self._running and interrupt in (Interrupt.KEEP, Interrupt.RETRACT):
                raise Unsupported(
                    f"{self.name}: a call at a vLLM server keeps the adapter it began with; interrupt by 'lease', 'abort' or "
                    f"'drain'"
                )
            if self._has_bad_cache:
                self._die(self.api.gone("its KV cache holds NaN; it must be restarted"))
            self._raise_if_dead()
            with self._timeline.beside(f"receive {update.version}"):
                await run_to_the_end(asyncio.to_thread(self._receive, update), on_cancel=self._staged.give_up)
            failed = f"version {update.version} did not get into the server: "
            await self._in_turn(lambda: self._exchange(update, interrupt), failed=failed)

    def _receive(self, update: WeightUpdate) -> None:
        check_order(update, lineage=self.lineage, version=self.version)
        own = None if self._trains is None else self._trains.settings.to_plain()
        if update.adapter != own:
            raise WeightError(f"version {update.version}: it is for adapter {update.adapter}, and this engine has {own}")
        self._staged.receive(update, lambda incoming: self._sync.receive(update, incoming))

    async def _exchange(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        await asyncio.to_thread(self._prepare, update)
        try:
            await self._handover.offer(self.api)
        except VllmRefused as error:
            self._staged.exchange()  # back to what the server has
            raise WeightError(f"version {update.version}: {error}") from error
        was_paused, leases = self._is_paused, interrupt is Interrupt.LEASE
        if not leases:
            self._leases.clear()
        if not leases and (not was_paused or interrupt is not Interrupt.KEEP):
            await self._pause(interrupt)
        with self._timeline.during("swap"):
            await self._handover.hand_over(self.api)
            if self.names_versions and self._trains is None:
                await self.api.name_version(f"{update.lineage}:{update.version}")
        self.version, self.lineage, self.policy = update.version, update.lineage, update.policy
        if not leases and not was_paused:
            await self._resume()
        used = {call.adapter for call in self._running.values()} | {each.adapter for each in self._leases.values()}
        await self._handover.retire(self.api, used)

    def _prepare(self, update: WeightUpdate) -> None:
        """The next update overwrites the weights that the server has now."""
        self._staged.exchange()
        name = f"{update.version}-{hashlib.sha256(update.manifest.checksums.tobytes()).hexdigest()[:16]}"
        self._handover.prepare(saved_form(self._model) if self._trains is None else self._staged.arena.views, name=name)

    # What it cannot do

    async def sleep(self, *, weights: bool = False) -> None:
        raise Unsupported("vLLM's sleep is not supported; engine.kind = 'native' sleeps")

    async def wake(self) -> None:
        """It is always awake."""

    async def take_back(self, count: int) -> list[Request]:
        raise Unsupported("a vLLM server gives no requests back; engine.kind = 'native' does")

    def release(self, rollout_ids: Sequence[str]) -> None:
        """Their adapters may go; the server's prefix cache drops what is oldest."""
        for rollout_id in rollout_ids:
            self._leases.pop(rollout_id, None)

    # Its life

    def start(self) -> None:
        """Start to watch the server."""
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while not self.died.done():
            await asyncio.sleep(_HEALTH_SECONDS)
            try:
                if self._running and not self._is_paused and time.monotonic() - self._heard_at > self._patience:
                    told = f"{len(self._running)} rollouts are in flight and none has grown for {self._patience:g} s"
                    raise self.api.gone(f"{told} (engine.vllm.answer_seconds)")
                await self.api.check()
            except VllmGone as error:
                self._die(error)

    def _die(self, error: Exception) -> None:
        """Fail all calls in flight; the pool continues them on other engines from the tokens it knows."""
        if self.died.done():
            return
        self.died.set_exception(error)
        for call in [*self._running.values(), *self._waiting.values()]:
            if not call.is_over:
                _fail(call.request, EngineDied(str(error)))
                call.end()
        self._waiting.clear()

    def _raise_if_dead(self) -> None:
        if self.died.done():
            error = self.died.exception()
            raise EngineDied(str(error)) from error

    async def close(self) -> None:
        """Cancel the calls in flight and disconnect."""
        if self._watching is not None:
            self._watching.cancel()
        self.cancel([*self._waiting, *self._running])
        await asyncio.to_thread(self._handover.close)
        await self.api.close()

    def _note(self) -> None:
        """Tell the time budget what the engine does from now on."""
        self._timeline.count(occupied=len(self._running), slots=self.num_slots)
        self._timeline.enter("wait-weights" if self._is_paused else "decode" if self._running else "wait-gate")


def _fail(request: Request, error: Exception) -> None:
    if request.on_failed is None:
        raise error
    request.on_failed(error)
