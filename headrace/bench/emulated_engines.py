"""Engines that take the time a `Load` says, and compute nothing.

An engine decodes all its rollouts at one speed, however many they are, as a decode step bound by memory bandwidth does. New
weights arrive while it decodes. What they then do to rollouts in flight is done as the native engine does it, and costs what it
costs there: `keep` and `lease` a swap, `drain` the slots that empty until the last rollout has ended, `retract` and `abort` the
prefix of every rollout, which is computed again.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.loads import finished
from headrace.bench.stubs import InstantEngine
from headrace.engine import EngineState, InFlight
from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling, WeightUpdate

if TYPE_CHECKING:
    from headrace.bench.emulated_load import Load
    from headrace.bench.stubs import OnTokens
    from headrace.observe import Timeline
    from headrace.records import Array

_INSTANT = 1e-9  # of a decode step: what floating point leaves of a token


@dataclass(eq=False)
class _Running:
    """A generate call in a slot."""

    rollout: Rollout
    sampling: Sampling
    done: asyncio.Future[Rollout]
    tokens: int
    """That this call will sample."""
    started: float = 0.0
    """In the engine's decode steps."""
    held: int | None = None
    """The version that a lease holds."""


@dataclass
class SlotSeconds:
    """What slots did: decode, wait because of a weight update, or anything else, which is waiting for requests."""

    decoding: float = 0.0
    updating: float = 0.0


class _EmulatedEngine:
    """One of the cluster's engines. Its clock counts decode steps, and stands still while it is paused or stalled."""

    def __init__(self, cluster: EmulatedCluster, name: str, seconds: SlotSeconds) -> None:
        self.cluster, self.load, self.name, self.seconds = cluster, cluster.load_, name, seconds
        self.running: dict[str, _Running] = {}
        self.version, self.lineage = 0, ""
        self.is_admitting, self.is_paused = True, False
        self._steps = 0.0
        self._since = self._stalled_until = time.monotonic()
        self._changes: list[tuple[float, int]] = [(0.0, 0)]  # from which step on each version sampled
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    @property
    def num_free(self) -> int:
        return self.load.slots - len(self.running) if self.is_admitting and not self.is_paused else 0

    def advance(self) -> None:
        """Bring the counts up to now."""
        now = time.monotonic()
        decoded = 0.0 if self.is_paused else max(0.0, now - max(self._since, self._stalled_until))
        stalled = 0.0 if self.is_paused else now - self._since - decoded
        self.seconds.decoding += decoded * len(self.running)
        self.seconds.updating += stalled * self.load.slots
        if not self.is_admitting:
            self.seconds.updating += decoded * (self.load.slots - len(self.running))
        self._steps += decoded / self.load.decode_seconds
        self._since = now

    def join(self, other: _EmulatedEngine) -> None:
        """Hold the weights that another holds."""
        self.advance()
        self.is_paused, self.version, self.lineage = False, other.version, other.lineage
        self._changes.append((self._steps, self.version))

    def start(self, call: _Running) -> None:
        """Put a call in a free slot. What was sampled for it before is computed first."""
        self.advance()
        call.started, call.held = self._steps, None
        self.running[call.rollout.id] = call
        if call.rollout.calls:
            self._stall(call.rollout.num_sampled / self.load.prefill_rate)
        self._set_timer()

    def cancel(self, call: _Running) -> None:
        self.advance()
        if self.running.pop(call.rollout.id, None) is not None:
            self._set_timer()
            self.cluster.fill()

    def sampled(self, call: _Running) -> int:
        """Tokens of the call so far."""
        return min(call.tokens, int(self._steps - call.started + _INSTANT))

    def versions(self, call: _Running, count: int) -> Array:
        if call.held is not None:
            return np.full(count, call.held, dtype=np.int32)
        starts, versions = zip(*self._changes, strict=True)
        steps = call.started + np.arange(count) + _INSTANT
        return np.asarray(versions, dtype=np.int32)[np.searchsorted(np.asarray(starts), steps, side="right") - 1]

    def grown(self, call: _Running, count: int, reason: FinishReason) -> Rollout:
        if not count:
            return call.rollout
        how: dict[str, Any] = {"sampling": call.sampling, "engine": self.name, "reason": reason, "lineage": self.lineage}
        return finished(call.rollout, np.full(count, 10), version=self.versions(call, count), **how)

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, time.monotonic()) + seconds

    def _set_timer(self) -> None:
        """Wake up when the next call ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.running:
            self._emptied.set()
        elif not self.is_paused:
            steps = min(call.started + call.tokens for call in self.running.values()) - self._steps
            when = max(time.monotonic(), self._stalled_until) + max(0.0, steps) * self.load.decode_seconds
            self._timer = asyncio.get_running_loop().call_at(when, self._end_calls)

    def _end_calls(self) -> None:
        self.advance()
        ended = [call for call in self.running.values() if call.started + call.tokens <= self._steps + 1e-6]
        for call in ended:
            del self.running[call.rollout.id]
            is_cut = call.tokens == call.sampling.max_tokens
            self.cluster.end(call, self.grown(call, call.tokens, FinishReason.LENGTH if is_cut else FinishReason.STOP))
        self._set_timer()
        self.cluster.fill()

    # Updates

    async def pause(self, interrupt: Interrupt) -> None:
        await self._drain(interrupt)
        self.advance()
        self._interrupt(interrupt)
        self.is_paused = True
        self._set_timer()

    def resume(self) -> None:
        self.advance()
        self.is_admitting, self.is_paused = True, False
        self._set_timer()
        self.cluster.fill()

    async def exchange(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        """Use the weights that have arrived. A paused engine stays paused."""
        was_paused = self.is_paused
        await self._drain(interrupt)
        self.advance()
        self._stall(self.load.swap_seconds)
        if interrupt is Interrupt.LEASE:
            for call in self.running.values():
                call.held = self.version if call.held is None else call.held
        self._interrupt(interrupt)
        self.version, self.lineage = update.version, update.lineage
        self._changes.append((self._steps, update.version))
        if was_paused:
            self._set_timer()
        else:
            self.resume()

    async def _drain(self, interrupt: Interrupt) -> None:
        if not interrupt.waits_for_rollouts:
            return
        self.advance()
        self.is_admitting, self.is_paused = False, False
        self._set_timer()
        while self.running:
            self._emptied.clear()
            await self._emptied.wait()

    def _interrupt(self, interrupt: Interrupt) -> None:
        if interrupt is Interrupt.RETRACT:
            again = sum(call.rollout.num_sampled + self.sampled(call) for call in self.running.values())
            self._stall(again / self.load.prefill_rate)
        elif interrupt is Interrupt.ABORT:
            aborted, self.running = list(self.running.values()), {}
            for call in aborted:
                self.cluster.end(call, self.grown(call, self.sampled(call), FinishReason.ABORT))


@dataclass(eq=False)
class EmulatedCluster(InstantEngine):
    """Engines that share a queue, as one `Engine`. Aborted rollouts that come back go before new ones."""

    load_: Load
    timeline: Timeline
    seconds: SlotSeconds = field(default_factory=SlotSeconds)

    def __post_init__(self) -> None:
        super().__init__()
        names = (f"engine-{number}" for number in range(self.load_.engines))
        self.engines = [_EmulatedEngine(self, name, self.seconds) for name in names]
        self.lent = _EmulatedEngine(self, "engine-lent", SlotSeconds())
        self._lent_tokens = 0
        self._waiting: deque[_Running] = deque()
        self._again: deque[_Running] = deque()
        self.num_updates = 0

    # Generation

    async def generate(self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens = None) -> Rollout:
        tokens = min(self.load_.length(rollout) - rollout.num_sampled, sampling.max_tokens)
        call = _Running(rollout, sampling, asyncio.get_running_loop().create_future(), tokens)
        (self._again if rollout.calls else self._waiting).append(call)
        self.fill()
        try:
            return await call.done
        except asyncio.CancelledError:
            for queue in (self._again, self._waiting):
                if call in queue:
                    queue.remove(call)
            for engine in self.engines:
                if engine.running.get(rollout.id) is call:
                    engine.cancel(call)
            raise

    def fill(self) -> None:
        """Give waiting calls to the engines with the most free slots."""
        while self._again or self._waiting:
            engine = max(self.engines, key=lambda engine: engine.num_free)
            if engine.num_free <= 0:
                break
            engine.start((self._again or self._waiting).popleft())
        self.timeline.enter("decode" if any(engine.running for engine in self.engines) else "wait-gate")

    def end(self, call: _Running, rollout: Rollout) -> None:
        self._sampled += len(rollout) - len(call.rollout)
        if rollout is not call.rollout and rollout.calls[-1].engine == self.lent.name:
            self._lent_tokens += len(rollout) - len(call.rollout)
        if rollout is call.rollout:  # aborted before its first token
            self._again.append(call)
        elif not call.done.done():
            call.done.set_result(rollout)

    async def in_flight(self) -> list[InFlight]:
        self.advance()
        calls = [(engine, call) for engine in self.engines for call in engine.running.values()]
        running = [self._known(engine, call, engine.sampled(call)) for engine, call in calls]
        return running + [self._known(self.engines[0], call, 0) for call in (*self._again, *self._waiting)]

    def _known(self, engine: _EmulatedEngine, call: _Running, count: int) -> InFlight:
        first = int(engine.versions(call, 1)[0]) if count else 0
        partial = functools.partial(engine.grown, call, count, FinishReason.ABORT)
        return InFlight.of(call.rollout, num_sampled=count, first=first, partial=partial)

    def advance(self) -> None:
        """Bring `seconds` up to now."""
        for engine in self.engines:
            engine.advance()

    # Lending: the engine on the trainer's device gets the weights anew each time

    async def lend(self) -> bool:
        await asyncio.sleep(self.load_.transfer_seconds)
        self.lent.join(self.engines[0])
        self.engines.append(self.lent)
        self.fill()
        return True

    async def recall(self) -> None:
        if self.lent in self.engines:
            self.engines.remove(self.lent)
            await self.lent.pause(Interrupt.ABORT)
            self.fill()

    def num_sampled(self) -> tuple[int, int]:
        return self._lent_tokens, self._sampled

    # Updates

    async def pause(self, interrupt: Interrupt) -> None:
        await asyncio.gather(*(engine.pause(interrupt) for engine in self.engines))

    async def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        if update.version:  # before the first request all hold the same weights
            await asyncio.sleep(self.load_.transfer_seconds)
        self.num_updates += 1
        await asyncio.gather(*(engine.exchange(update, interrupt) for engine in self.engines))

    async def state(self) -> EngineState:
        self.advance()
        running, waiting = sum(len(engine.running) for engine in self.engines), len(self._waiting) + len(self._again)
        version, lineage = min((engine.version, engine.lineage) for engine in self.engines)
        return EngineState(version, lineage, running, waiting, self.load_.num_slots, 1, self._sampled)
