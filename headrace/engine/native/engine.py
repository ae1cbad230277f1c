"""The native engine behind the async protocol, in one event loop.

`serve` is the decode loop: it waits for work (woken by `generate`, `stream` or `resume`) and otherwise steps the core,
giving way to other coroutines between two steps. Everything else only queues work or waits for a step boundary, which
in one event loop is wherever `serve` gives way. `ThreadedEngine` has the same loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from headrace.engine import asking
from headrace.engine.protocol import EngineState
from headrace.model import SpareWeights, WeightError, check_order, score as score_packed
from headrace.observe import Signal, peak_memory
from headrace.partial import Interrupt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from headrace.engine.native.core import EngineCore
    from headrace.engine.protocol import Increment, InFlight
    from headrace.engine.request import Request
    from headrace.observe import Timeline
    from headrace.records import Array, Rollout, Sampling, WeightUpdate
    from headrace.sync import WeightSync

_SCORE_TOKENS = 8192


class NativeEngine:
    """An `Engine` in this process."""

    def __init__(self, core: EngineCore, *, sync: WeightSync, timeline: Timeline) -> None:
        self.core = core
        self._sync = sync
        self._timeline = timeline
        self._spare = SpareWeights(core.model, arena=core.arena)
        self._work = Signal()
        self._is_paused = False
        self._drained = asyncio.Event()

    async def serve(self) -> NoReturn:
        """Decode for ever; the task that runs this is cancelled to stop the engine."""
        while True:
            if self._is_paused or not self.core.has_work:
                self._drained.set()
                await self._timeline.wait("wait-weights" if self._is_paused else "wait-gate", self._work)
                self._work.clear()
                continue
            self._drained.clear()
            self._timeline.enter("decode")
            step = self.core.step()
            rows = step.prompt_rows + step.decode_rows
            self._timeline.split("prefill", share=step.prompt_rows / max(rows, 1))
            self._timeline.count(occupied=step.decode_rows, slots=self.core.num_slots)
            self._timeline.enter("descheduled")
            await asyncio.sleep(0)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        return await asking.generate(self, rollout, sampling)

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        return asking.stream(self, rollout, sampling)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return self._score(rollouts)

    async def pause(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.DRAIN:
            self.core.stop_admitting()
            self._is_paused = False  # one that was paused must finish too
            while self.core.num_begun:
                self._work.set()
                self._drained.clear()
                await self._drained.wait()
        self._interrupt(interrupt)
        self._is_paused = True

    async def resume(self) -> None:
        self.core.is_admitting, self._is_paused = True, False
        self._work.set()

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        was_paused = self._is_paused
        if interrupt is not Interrupt.KEEP:  # also with one that was paused before: it may have been so with others in flight
            await self.pause(interrupt)
        try:
            with self._timeline.during("swap"):
                self._stage(update)
                self._swap(update)
        finally:
            if not was_paused:
                await self.resume()

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """The first `at` tokens of a rollout as one of its own. While `rollout` runs here or is pinned, generating it
        computes nothing again, whatever the weights are by then; otherwise it computes what is not cached."""
        return rollout.forked(at, id=id)

    async def pin(self, rollout_id: str) -> None:
        """Keep the keys and values of a rollout that runs here, or will, until it is unpinned or memory is short."""
        self.core.scheduler.pin(rollout_id)

    async def unpin(self, rollout_id: str) -> None:
        self.core.scheduler.unpin(rollout_id)

    async def sleep(self, *, weights: bool = False) -> None:
        """Give memory back until `wake`: the cache's, and with `weights` that of the weights and of their staging. Rollouts
        in flight wait, and are computed again from their tokens."""
        self._sleep(weights)
        self._timeline.enter("wait-weights")  # `serve` stands where it waits for work, and would count it as that

    async def wake(self) -> None:
        """Take the memory again and go on."""
        self._wake()
        self._work.set()

    def _sleep(self, weights: bool) -> None:
        with self._timeline.during("swap"):
            self.core.sleep(weights=weights)
            if weights:
                self._spare.release()

    def _wake(self) -> None:
        with self._timeline.during("swap"):
            self.core.wake()

    async def state(self) -> EngineState:
        return self._state()

    async def in_flight(self) -> list[InFlight]:
        return self.core.in_flight()

    def _interrupt(self, interrupt: Interrupt) -> None:
        """Do with what is in flight as `interrupt` says, at once."""
        if interrupt is Interrupt.ABORT:
            self.core.abort_running()
        elif interrupt is Interrupt.RETRACT:
            self.core.retract_running()

    def _state(self) -> EngineState:
        core = self.core
        return EngineState(
            version=core.version,
            lineage=core.lineage,
            running=core.num_running,
            waiting=core.num_waiting,
            slots=core.num_slots,
            free_blocks=core.num_free_blocks,
            tokens=core.num_drawn,
            memory_peak=self.peak_memory,
        )

    @property
    def peak_memory(self) -> int:
        """Bytes taken at most so far, those that the driver mapped among them."""
        core = self.core
        return peak_memory(core.arena.device) + core.mapped_bytes

    def _score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        core = self.core
        if core.has_sleeping_weights:
            raise WeightError("the engine's weights are asleep; wake it before it scores")
        core.settle()
        device = next(core.model.parameters()).device
        return score_packed(core.model, core.head, rollouts, budget=_SCORE_TOKENS, device=device, exact=core.exact)

    def _stage(self, update: WeightUpdate) -> None:
        """Beside the weights that run; what differs from its manifest goes no further."""
        check_order(update, lineage=self.core.lineage, version=self.core.version)
        with self._timeline.beside(f"receive {update.version}"):
            self._spare.receive(update, lambda incoming: self._sync.receive(update, incoming))

    def _swap(self, update: WeightUpdate) -> None:
        self.core.exchange_weights(self._spare)
        self.core.changed_weights(policy=update.policy, lineage=update.lineage, version=update.version)

    def begin(self, request: Request) -> None:
        self.core.submit(request)
        self._work.set()

    def withdraw(self, request: Request) -> None:
        self.core.cancel(request)
