"""The native engine behind the async protocol.

The decode loop runs in one of two places: `serve` decodes on the event loop and yields to it between two steps (an inline
run); `start` decodes on a thread of its own, in a process that also serves a network.

Only actions touch the core, between two steps. On the event loop an action runs at once. Otherwise it goes into a mailbox that
the decode thread empties before its next step; the bell wakes that thread. New weights are received and checked beside the
running ones, in another thread if decoding has its own; only the swap is an action.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from headrace.engine.protocol import EngineDied, EngineState
from headrace.engine.request import HeldAdapter, generate, run_to_the_end, stream
from headrace.model import StagedWeights, WeightError, check_order, check_recorded, score as score_packed
from headrace.observe import Signal, peak_memory
from headrace.partial import Interrupt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from headrace.engine.native.core import EngineCore
    from headrace.engine.native.step import StepPlan
    from headrace.engine.protocol import Increment, InFlight, OnTokens
    from headrace.engine.request import Request, SampledSince
    from headrace.engine.shaping import Shaping
    from headrace.observe import Timeline
    from headrace.records import Array, Rollout, Sampling, WeightUpdate
    from headrace.sync import WeightSync

T = TypeVar("T")
_SCORE_TOKENS = 8192  # in one forward pass
_RETURN_SECONDS = 0.001  # between two looks at what may have ended or come back


class NativeEngine:
    """An `Engine` in this process. Calls come from one event loop."""

    def __init__(self, core: EngineCore, *, sync: WeightSync, timeline: Timeline) -> None:
        self.core = core
        self._sync, self._timeline = sync, timeline
        self._spare = StagedWeights(core.adapter or core.model, arena=core.received, in_place=core.keeps_addresses or None)
        self._is_paused = self._is_closing = False
        self._loading = asyncio.Lock()  # held from an update's first byte to its swap: all updates share the staging memory
        self._work = Signal()
        self._thread: threading.Thread | None = None
        self._mail: deque[Callable[[], None]] = deque()
        self._bell = threading.Event()
        self.died: Future[None] = Future()  # fails with the error that ended the decode thread
        self.after_step: Callable[[], None] = lambda: None  # called by the decode thread after every step and after actions

    # The decode loop

    async def serve(self) -> NoReturn:
        """Decode on this event loop; cancel the task that runs this to stop the engine. Woken by actions."""
        while True:
            if idle_state := self._idle_state:
                await self._timeline.wait(idle_state, self._work)
                self._work.clear()
                continue
            self._step()
            self._timeline.enter("descheduled")
            await asyncio.sleep(0)

    def start(self) -> None:
        """Decode on a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the decode thread after its step; rollouts in flight are lost."""
        self._is_closing = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self.core.close()

    def _decode(self) -> None:
        try:
            while not self._is_closing:
                self._run_actions()
                if idle_state := self._idle_state:
                    self._timeline.enter(idle_state)
                    self._bell.wait()
                    self._bell.clear()
                    continue
                step = self._step()
                self.after_step()
                if step.is_empty and self.core.scheduler.is_keeping_slots:
                    self._bell.wait(_RETURN_SECONDS)  # for the rollouts just aborted; resubmitting one rings the bell
                    self._bell.clear()
        except BaseException as error:  # noqa: BLE001  (reported through `died`; a thread has nobody to raise to)
            self.died.set_exception(error)

    @property
    def _idle_state(self) -> str | None:
        """What the loop waits for, as the timeline calls it; None if there is a step to take."""
        if self._is_paused or self.core.is_asleep:
            return "wait-weights"
        return None if self.core.has_work else "wait-gate"

    def _step(self) -> StepPlan:
        self._timeline.enter("decode")
        step = self.core.step()
        self._timeline.split("prefill", share=step.prompt_rows / max(step.prompt_rows + step.decode_rows, 1))
        self._timeline.count(occupied=step.decode_rows, slots=self.core.num_slots)
        return step

    # Actions, between two steps

    def _run_actions(self) -> None:
        if self._mail:
            for _ in range(len(self._mail)):  # later ones wait a step: a burst of them must not hold up decoding
                self._mail.popleft()()
            self.after_step()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` between two steps and wake the decode loop."""
        if self._thread is None:
            action()
            self._work.set()
        else:
            self._mail.append(action)
            self._bell.set()

    async def between_steps(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps; returns its result."""
        done: Future[T] = Future()

        def act() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except BaseException as error:  # noqa: BLE001  (raised where it is awaited)
                    done.set_exception(error)

        self._raise_if_dead()
        self.post(act)
        return done.result() if done.done() else await asyncio.wrap_future(done)

    def _raise_if_dead(self) -> None:
        if self.died.done():
            raise EngineDied("the decode thread has ended") from self.died.exception()

    # Generating

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens | None = None) -> Rollout:
        self._raise_if_dead()
        return await generate(self, rollout, sampling, on_tokens=on_tokens)

    def stream(
        self, rollout: Rollout, sampling: Sampling, *, shaping: Shaping | None = None, held: HeldAdapter | None = None
    ) -> AsyncIterator[Increment]:
        self._raise_if_dead()
        return stream(self, rollout, sampling, shaping=shaping, held=held)

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue requests between two steps, and call `on_refused` for those that can never be generated."""

        def act() -> None:
            for request in requests:
                try:
                    self.core.submit(request)
                except ValueError as error:
                    on_refused(request, error)

        self.post(act)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Free the slots and blocks of requests; those that have ended are ignored."""

        def act() -> None:
            for request in requests:
                self.core.cancel(request)

        self.post(act)

    async def take_back(self, count: int) -> list[Request]:
        def act() -> list[Request]:
            waiting = self.core.scheduler.waiting()
            requests = waiting[max(0, len(waiting) - count) :]
            for request in requests:
                self.core.cancel(request)
            return requests

        return await self.between_steps(act)

    def growth(self, requests: Iterable[Request] | None = None, *, least: float = 0.0) -> list[SampledSince]:
        """Called in `after_step`."""
        return self.core.growth(requests, least=least)

    async def in_flight(self) -> list[InFlight]:
        return await self.between_steps(self.core.in_flight)

    def release(self, rollout_ids: Sequence[str]) -> None:
        def act() -> None:
            for rollout_id in rollout_ids:
                self.core.scheduler.forget(rollout_id)

        self.post(act)

    async def score(self, rollouts: Sequence[Rollout], *, held: HeldAdapter | None = None) -> list[Array]:
        return await self.between_steps(lambda: self._score(rollouts, held))

    def _score(self, rollouts: Sequence[Rollout], held: HeldAdapter | None = None) -> list[Array]:
        core = self.core
        if core.weights.are_asleep:
            raise WeightError("the engine's weights are asleep; wake it before it scores")
        core.settle()
        device = next(core.model.parameters()).device
        check_recorded(core.routers, rollouts)
        how: dict[str, Any] = {"device": device, "exact": core.exact, "routers": core.routers}
        applied: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if held is not None:
            assert core.adapter is not None
            applied = core.adapter.applying([(held.tensors, None)])
        with core.runner.in_order(), applied:
            return score_packed(core.model, core.head, rollouts, budget=_SCORE_TOKENS, **how)

    # Pausing and sleeping

    async def pause(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.DRAIN:
            await self._drain()

        def act() -> None:
            self._interrupt(interrupt)
            self._is_paused = True

        await self.between_steps(act)

    async def _drain(self) -> None:
        """Start nothing new, and wait until everything in flight has ended."""

        def act() -> None:
            self.core.stop_admitting()
            self._is_paused = False  # paused rollouts have to end too

        try:
            await self.between_steps(act)
            while await self.between_steps(lambda: self.core.num_started):  # noqa: ASYNC110  (it changes in another thread)
                await asyncio.sleep(_RETURN_SECONDS)
        except asyncio.CancelledError:
            self.post(lambda: setattr(self.core.scheduler, "is_admitting", True))
            raise

    def _interrupt(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.ABORT:
            self.core.abort_running()
            self.after_step()
        elif interrupt is Interrupt.RETRACT:
            self.core.retract_running()
        leases = self.core.scheduler.leases
        if interrupt is Interrupt.LEASE:
            self.core.scheduler.pool.forget_kept(but=leases)
            return
        if leases or not interrupt.keeps_kv:
            self.core.forget_kept()
        leases.clear()

    async def resume(self) -> None:
        await self.between_steps(self._resume)

    def _resume(self) -> None:
        self.core.scheduler.is_admitting, self._is_paused = True, False

    async def sleep(self, *, weights: bool = False) -> None:
        """Release the KV cache's memory until `wake`, and with `weights` also that of the weights and of their staging.
        Rollouts in flight wait, then are computed again from their tokens."""
        async with self._loading:  # no update may be arriving when the staging memory is released
            await self.between_steps(lambda: self._sleep(weights=weights))

    def _sleep(self, *, weights: bool) -> None:
        with self._timeline.during("swap"):
            self.core.sleep(weights=weights)
            if weights:
                self._spare.release()
        self._timeline.enter("wait-weights")  # the decode loop may not run again before the trainer computes

    async def wake(self) -> None:
        def act() -> None:
            with self._timeline.during("swap"):
                self.core.wake()

        await self.between_steps(act)

    # New weights

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        if interrupt is Interrupt.LEASE and self.core.adapter is None:
            raise WeightError("'lease' keeps versions of an adapter, and all weights are trained")
        async with self._loading:
            if self._thread is None:
                with self._timeline.during("swap"):
                    self._stage(update)
            else:
                await run_to_the_end(asyncio.to_thread(self._stage, update), on_cancel=self._spare.give_up)
            if interrupt is Interrupt.DRAIN:
                await (self.pause(interrupt) if self._is_paused else self._drain())
            await self.between_steps(lambda: self._exchange(update, interrupt))

    def _stage(self, update: WeightUpdate) -> None:
        """Receive an update beside the running weights and check it against its manifest."""
        check_order(update, lineage=self.core.lineage, version=self.core.version)
        own = None if self.core.adapter is None else self.core.adapter.settings.to_plain()
        if update.adapter != own:
            raise WeightError(f"version {update.version}: it is for adapter {update.adapter}, and this engine has {own}")
        with self._timeline.beside(f"receive {update.version}"):
            self._spare.receive(update, lambda incoming: self._sync.receive(update, incoming))

    def _exchange(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        with self._timeline.during("swap"):
            try:
                self._interrupt(interrupt)
                self._swap(update, interrupt)
            finally:
                if not self._is_paused:
                    self._resume()

    def _swap(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        core, held = self.core, None
        replaced = core.exchange_weights(self._spare, keep=interrupt is Interrupt.LEASE and core.scheduler.has_holders)
        if replaced is not None:
            held = HeldAdapter(core.version, replaced.views, replaced.memory)
        core.changed_weights(policy=update.policy, lineage=update.lineage, version=update.version, held=held)

    # What it reports, from any thread: numbers may be a step old

    @property
    def num_slots(self) -> int:
        return self.core.num_slots

    @property
    def policy(self) -> str:
        return self.core.policy

    @property
    def peak_memory(self) -> int:
        """Peak bytes of torch, plus those mapped by the driver."""
        return peak_memory(self.core.arena.device) + self.core.mapped_bytes

    async def state(self) -> EngineState:
        core = self.core
        return EngineState(
            version=core.version,
            lineage=core.lineage,
            running=core.num_running,
            waiting=core.num_waiting,
            slots=core.num_slots,
            free_blocks=core.num_free_blocks,
            tokens=core.num_sampled,
            memory_peak=self.peak_memory,
            policy=core.policy,
        )
