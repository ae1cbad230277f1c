"""The native engine with its decode loop in a thread of its own, for a process that also answers a network.

Other threads never touch the core: they leave actions in a mailbox, which the decode thread empties between two steps.
New weights are copied and hashed beside the running ones by a thread of their own; only the exchange is such an action.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from headrace.engine import asking
from headrace.engine.native.engine import NativeEngine
from headrace.engine.protocol import EngineDied, EngineState, Increment, InFlight
from headrace.engine.request import Request
from headrace.partial import Interrupt
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from headrace.engine.native.core import EngineCore
    from headrace.engine.request import Growth
    from headrace.observe import Timeline
    from headrace.records import Array, Rollout, Sampling, WeightUpdate
    from headrace.sync import WeightSync

T = TypeVar("T")
_COME_BACK_SECONDS = 0.001


class ThreadedEngine(NativeEngine):
    """An `Engine` whose `start` begins the decode thread and whose `close` ends it. Calls come from any one event loop."""

    def __init__(self, core: EngineCore, *, sync: WeightSync, timeline: Timeline) -> None:
        super().__init__(core, sync=sync, timeline=timeline)
        self._mail: deque[Callable[[], None]] = deque()
        self._bell = threading.Event()
        self._is_closing = False
        self._when_idle: list[Future[None]] = []
        self._loading = asyncio.Lock()
        """Held from the first byte of an update to its exchange: all of them are staged in the same memory."""
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)
        self.died: Future[None] = Future()
        """Fails with what ended the decode thread."""
        self.after_step: Callable[[], None] = lambda: None
        """Called by the decode thread after every step, and after actions: those that settle what is under way may end some."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the decode thread after its step; rollouts in flight are given up."""
        self._is_closing = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self.core.close()

    def post(self, action: Callable[[], None]) -> None:
        """Have the decode thread run `action` before its next step."""
        self._mail.append(action)
        self._bell.set()

    async def between_steps(self, action: Callable[[], T]) -> T:
        """What `action` returns, run by the decode thread between two steps."""
        done: Future[T] = Future()

        def act() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except BaseException as error:  # noqa: BLE001  (it belongs to whoever asked)
                    done.set_exception(error)

        if self.died.done():
            raise EngineDied("the decode thread has ended") from self.died.exception()
        self.post(act)
        return await asyncio.wrap_future(done)

    def _decode(self) -> None:
        try:
            while not self._is_closing:
                self._empty_mail()
                if self.core.num_begun == 0:
                    self._tell_idle()
                if self._is_paused or not self.core.has_work:
                    self._timeline.enter("wait-weights" if self._is_paused else "wait-gate")
                    self._bell.wait()
                    self._bell.clear()
                    continue
                self._timeline.enter("decode")
                step = self.core.step()
                self._timeline.split("prefill", share=step.prompt_rows / max(step.prompt_rows + step.decode_rows, 1))
                self._timeline.count(occupied=step.decode_rows, slots=self.core.num_slots)
                self.after_step()
                if not step.decode_rows + step.prompt_rows and self.core.scheduler.is_keeping_slots:
                    self._bell.wait(_COME_BACK_SECONDS)  # for those just aborted; their coming rings it
                    self._bell.clear()
        except BaseException as error:  # noqa: BLE001  (told to whoever watches `died`; a thread has nobody to raise to)
            self.died.set_exception(error)

    def _empty_mail(self) -> None:
        if self._mail:
            for _ in range(len(self._mail)):  # what comes meanwhile waits a step: a burst of it must not hold up decoding
                self._mail.popleft()()
            self.after_step()

    def _tell_idle(self) -> None:
        waiting, self._when_idle = self._when_idle, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Rollout] = loop.create_future()

        def finish(result: Rollout) -> None:
            if not done.done():
                done.set_result(result)

        def fail(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        def on_done(result: Rollout) -> None:
            loop.call_soon_threadsafe(finish, result)

        def on_failed(error: Exception) -> None:
            loop.call_soon_threadsafe(fail, error)

        request = Request(rollout, sampling, on_done=on_done, on_failed=on_failed)
        try:
            await self.between_steps(lambda: self.core.submit(request))  # cancelled here, it may be submitted already
            return await done
        finally:
            if not done.done() or done.cancelled():
                self.post(lambda: self.core.cancel(request))

    async def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Increment | Exception] = asyncio.Queue()

        def on_done(result: Rollout) -> None:
            if result.finish_reason is FinishReason.ABORT:
                tell(Increment((), (), (), FinishReason.ABORT))

        def tell(increment: Increment | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, increment)

        request = Request(rollout, sampling, on_done=on_done, on_tokens=tell, on_failed=tell)
        try:
            await self.between_steps(lambda: self.core.submit(request))
            while True:
                increment = await queue.get()
                if isinstance(increment, Exception):
                    raise increment
                yield increment
                if increment.finish_reason is not None:
                    return
        finally:
            self.post(lambda: self.core.cancel(request))

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return await self.between_steps(lambda: self._score(rollouts))

    async def pause(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.DRAIN:
            await self._drain()
        await self.between_steps(lambda: self._pause(interrupt))

    async def _drain(self) -> None:
        idle: Future[None] = Future()

        def stop_admitting() -> None:
            self.core.stop_admitting()
            self._is_paused = False  # one that was paused must finish too
            self._when_idle.append(idle)

        try:
            await self.between_steps(stop_admitting)
            await asyncio.wrap_future(idle)
        except asyncio.CancelledError:
            self.post(lambda: setattr(self.core, "is_admitting", True))
            raise

    def _pause(self, interrupt: Interrupt) -> None:
        self._interrupt(interrupt)
        self._is_paused = True

    def _interrupt(self, interrupt: Interrupt) -> None:
        super()._interrupt(interrupt)
        if interrupt is Interrupt.ABORT:
            self.after_step()

    async def sleep(self, *, weights: bool = False) -> None:
        async with self._loading:  # with the weights goes the memory that new ones are staged in
            await self.between_steps(lambda: self._sleep(weights))

    async def wake(self) -> None:
        await self.between_steps(self._wake)

    async def pin(self, rollout_id: str) -> None:
        await self.between_steps(lambda: self.core.scheduler.pin(rollout_id))

    async def unpin(self, rollout_id: str) -> None:
        await self.between_steps(lambda: self.core.scheduler.unpin(rollout_id))

    async def resume(self) -> None:
        await self.between_steps(self._resume)

    def _resume(self) -> None:
        self.core.is_admitting, self._is_paused = True, False

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        async with self._loading:
            await asking.to_its_end(asyncio.to_thread(self._stage, update), give_up=self._spare.give_up)
            if interrupt is Interrupt.DRAIN:
                await (self.pause(interrupt) if self._is_paused else self._drain())
            await self.between_steps(lambda: self._exchange(update, interrupt))

    def _exchange(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        with self._timeline.during("swap"):
            try:
                self._interrupt(interrupt)
                self._swap(update)
            finally:
                if not self._is_paused:
                    self._resume()

    async def state(self) -> EngineState:
        """A look from outside: numbers a step old, and never behind one."""
        return self._state()

    async def in_flight(self) -> list[InFlight]:
        return await self.between_steps(self.core.in_flight)

    # What a worker does with it

    @property
    def num_slots(self) -> int:
        return self.core.num_slots

    @property
    def policy(self) -> str:
        return self.core.policy

    def growth(self, requests: Iterable[Request] | None = None) -> list[Growth]:
        """Called by the decode thread, in `after_step`."""
        return self.core.growth(requests)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Withdraw many at once."""

        def act() -> None:
            for request in requests:
                self.core.cancel(request)

        self.post(act)

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue many at once; those that cannot be generated are told to `on_refused`, in the decode thread."""

        def act() -> None:
            for request in requests:
                try:
                    self.core.submit(request)
                except ValueError as error:
                    on_refused(request, error)

        self.post(act)
