"""Engines in other processes, as one `Engine`.

Requests wait here, and each engine pulls as many as it has room for, so that fast engines do more and none hoards; those with
the largest share of their room left come first. An engine's requests stay in its table with the tokens known so far: for
streams, cancelling, checkpoints (`in_flight`) and recovery. When an engine is lost, its calls continue on the others from their
known tokens.

A rollout's next turn, and a fork, go back to the engine that generated it last, which may still have its KV cache. They go to
another if that one is lost, has yet to catch up, or has no room while another has a free slot; but with leases they wait for
room. The siblings of a group, which begin with the same prompt, go to one engine as long as it has free slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from headrace.engine.protocol import EngineState
from headrace.engine.remote_engine import PoolRequest
from headrace.engine.request import generate, stream
from headrace.engine.weight_delivery import WeightDelivery
from headrace.partial import Interrupt
from headrace.records import FinishReason, pack_rollouts
from headrace.rpc import StreamClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from headrace.engine.protocol import Increment, InFlight, OnTokens
    from headrace.engine.remote_engine import RemoteEngine, WaitingQueue
    from headrace.engine.request import Request
    from headrace.records import Array, Rollout, Sampling, WeightUpdate

_FEWEST_COMPARED = 64  # engines with room, or as many as there are calls: those that were compared last longest ago
_MOST_KNOWN = 1 << 17  # rollouts, and groups, of which the pool knows where they went
_BACKLOG_SECONDS = 0.05  # after which an engine that had much to read is looked at again
_DRAIN_SECONDS = 0.1  # after which one that leaves is looked at again


class EnginePool:
    """An `Engine` over the engines that have joined."""

    def __init__(self) -> None:
        self.engines: list[RemoteEngine] = []
        self._by_name: dict[str, RemoteEngine] = {}
        self._with_room: dict[RemoteEngine, None] = {}
        """Engines that have room (`RemoteEngine.has_room`), in the order in which they were last compared. Like the next, so
        that nothing is done for each engine whenever a few of very many have news."""
        self._awaited: dict[RemoteEngine, None] = {}
        """Engines that calls are bound to."""
        self.delivery = WeightDelivery(on_lost=self.lose, on_caught_up=self._on_available)
        self._interrupted: WaitingQueue = OrderedDict()  # requests that were interrupted: they go before new ones
        self._new: WaitingQueue = OrderedDict()
        self.turns: Counter[str] = Counter()
        """Calls that continued a rollout: `returned` to the engine that generated it last, or `moved` to another."""
        self.num_sampled: Counter[str] = Counter()
        """Tokens of the calls that each engine has ended, by its name."""
        self._went: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """The names of the engines that a rollout was sent to, by its id, and of the last one of a group; oldest first."""
        self._keys = itertools.count()
        self._available = asyncio.Event()
        self._is_paused = False
        self._is_flush_due = False
        self._later: asyncio.TimerHandle | None = None
        """Flushes again while an engine has a backlog."""

    # Engines come and go; called by their supervisor

    async def join(self, engine: RemoteEngine) -> None:
        """Add an engine once it holds the weights of the others, and is paused if they are. Both may change during an await,
        so they are checked again after each."""
        is_paused = False
        while True:
            if not self.delivery.is_current(engine):
                await self.delivery.bring_up_to_date(engine)
            elif is_paused != self._is_paused:
                is_paused = self._is_paused
                await (engine.call("pause", interrupt=Interrupt.KEEP.value) if is_paused else engine.call("resume"))
            else:
                break
        engine.is_leaving = False  # it may have been recalled before
        self.engines.append(engine)
        self._by_name[engine.name] = engine
        self._with_room[engine] = None
        self._on_available()

    def lose(self, engine: RemoteEngine) -> None:
        """An engine is lost. Calls with known tokens end, for the caller to resume; the others wait again."""
        engine.is_lost = True
        engine.has_returned_all.set()
        self._remove(engine)
        requests = [*engine.bound, *engine.requests.values()]
        engine.bound.clear()
        engine.requests.clear()
        for request in requests:
            if request.num_known:
                self.num_sampled[engine.name] += request.num_known
                request.on_done(request.in_flight().partial())
            else:
                request.engine = None
                self._interrupted[request] = None
        self.send_soon()

    def _remove(self, engine: RemoteEngine) -> None:
        if self._by_name.get(engine.name) is engine:
            self.engines.remove(engine)
            del self._by_name[engine.name]
        self._with_room.pop(engine, None)
        self._awaited.pop(engine, None)

    async def drain(self, engine: RemoteEngine, *, seconds: float) -> None:
        """Remove an engine once its calls have ended, or after so many seconds: then they continue on the others."""
        engine.is_leaving = True
        self.send_soon()
        until = time.monotonic() + seconds
        while engine.requests and not engine.is_lost and time.monotonic() < until:  # noqa: ASYNC110  (calls end in many ways)
            await asyncio.sleep(_DRAIN_SECONDS)
        self.lose(engine)

    def relieve(self, engine: RemoteEngine) -> None:
        """Have the others give an engine that has joined as many calls as it has slots, of those they have not started."""
        others = [each for each in self.engines if each is not engine and each.data is not None]
        others.sort(key=lambda each: len(each.requests), reverse=True)
        wanted = engine.num_free_slots
        for place, other in enumerate(others[: max(0, wanted)]):
            share = -(-wanted // (len(others) - place))
            wanted -= share
            with contextlib.suppress(StreamClosed):  # it is lost, which its supervisor sees
                other.give_back(share, to=engine)

    def on_returned(self, engine: RemoteEngine, requests: list[PoolRequest]) -> None:
        """An engine has given calls back: they go to the one that relieves it, or wait again."""
        taker, queue = engine.relieved_by, self._interrupted
        if taker is not None and taker.is_taking and self._by_name.get(taker.name) is taker:
            self._awaited[taker] = None
            queue = taker.bound
        for request in requests:
            request.engine = None
            queue[request] = None
        self.send_soon()

    async def recall(self, engine: RemoteEngine) -> None:
        """Remove an engine, which may join again later: its calls end where they are, and continue on the others."""
        engine.is_leaving = True
        self.send_soon()
        try:
            await engine.return_all()
        except StreamClosed:
            self.lose(engine)
        self._remove(engine)

    def _on_available(self) -> None:
        """Called when an engine has joined or caught up."""
        self._available.set()
        self.send_soon()

    # Generation

    def generate(
        self, rollout: Rollout, sampling: Sampling, *, on_tokens: OnTokens | None = None
    ) -> Coroutine[Any, Any, Rollout]:
        return generate(self, rollout, sampling, on_tokens=on_tokens, make_request=PoolRequest)

    def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        return stream(self, rollout, sampling, make_request=PoolRequest)

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue requests. An engine refuses one later, through `on_failed`."""
        for request in requests:
            assert isinstance(request, PoolRequest)
            request.key = next(self._keys)
            if request.rollout.calls and (oldest := request.rollout.oldest_version) >= 0:
                request.oldest = oldest
            home = self._home(request.rollout)
            queue = self._interrupted if request.rollout.finish_reason is FinishReason.ABORT else self._new
            if home is not None:
                self._awaited[home] = self._with_room[home] = None
                queue = home.bound
            queue[request] = None
        self.send_soon()

    def on_pull(self, engine: RemoteEngine) -> None:
        """It has room for more."""
        if engine.has_room:
            if self._by_name.get(engine.name) is engine:  # otherwise it has yet to join
                self._with_room[engine] = None
            self.send_soon()

    def _home(self, rollout: Rollout) -> RemoteEngine | None:
        """The engine that generated it last, if it takes calls; or that of its siblings, if it also has a free slot."""
        name, is_sibling = self._last_engine(rollout), False
        if not name:
            (*_, name), is_sibling = self._went.get(_group(rollout), ("",)), True
        engine = self._by_name.get(name)
        if engine is None or not engine.is_taking or (is_sibling and engine.num_free_slots <= len(engine.bound)):
            return None
        return engine

    def _last_engine(self, rollout: Rollout) -> str:
        """The name of the engine that generated it last, or what it was forked from; "" if none did."""
        if rollout.calls:
            return rollout.calls[-1].engine
        return self._went.get(rollout.parent[0], ("",))[-1] if rollout.parent is not None else ""

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert isinstance(request, PoolRequest)
            if request.engine is not None:
                request.engine.cancel(request)
                continue
            for queue in self._queues():
                queue.pop(request, None)

    def _queues(self) -> list[WaitingQueue]:
        return [self._interrupted, self._new, *(engine.bound for engine in self._awaited)]

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues()))

    def send_soon(self) -> None:
        """Send in the next turn of the event loop, so that requests submitted together are sent together."""
        if not self._is_flush_due and self.engines:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for engine in list(self._awaited):
            if not engine.is_taking:
                self._interrupted |= engine.bound
                engine.bound.clear()
            if not engine.bound:
                del self._awaited[engine]
        takers = [engine for engine in self._awaited if engine.takes_work]
        for engine in takers:
            self._send(engine, _take(engine.bound, most=engine.credit))
        if num_free := len(self._interrupted) + len(self._new):  # calls that may go to any engine
            with_room = (engine for engine in self._with_room if engine.takes_work)
            compared = list(itertools.islice(with_room, max(num_free, _FEWEST_COMPARED)))
            compared.sort(key=lambda engine: engine.share_of_room, reverse=True)
            level = _level(compared, num_free)
            for engine in compared:
                most = min(engine.credit, math.ceil(engine.credit - level * engine.room))
                self._send(engine, _take_with_siblings((self._interrupted, self._new), most=most, slots=engine.num_free_slots))
            takers += compared
        if not self.delivery.leases and any(engine.bound for engine in self._awaited):
            for engine in [engine for engine in self._with_room if engine.takes_work]:
                self._relieve_others(engine)
        for engine in takers:
            self._with_room.pop(engine, None)
            if engine.has_room and not engine.is_lost:
                self._with_room[engine] = None
        if self.num_waiting and any(engine.has_backlog for engine in self._with_room):
            self._later = asyncio.get_running_loop().call_later(_BACKLOG_SECONDS, self.send_soon)

    def _relieve_others(self, engine: RemoteEngine) -> None:
        """Fill its free slots with calls that wait for an engine without room. Their KV cache is computed again, which takes
        less time than the calls before them. With leases they would wait: the adapter they keep is at their engine."""
        for other in list(self._awaited):
            if other.bound and not other.takes_work and engine.takes_work and engine.num_free_slots > 0:
                self._send(engine, _take(other.bound, most=engine.num_free_slots))

    def _send(self, engine: RemoteEngine, requests: list[PoolRequest]) -> None:
        if not requests:
            return
        for rollout in (request.rollout for request in requests):
            if last := self._last_engine(rollout):
                self.turns["returned" if last == engine.name else "moved"] += 1
            others = (name for name in self._went.pop(rollout.id, ()) if name != engine.name)
            self._went[rollout.id] = (*others, engine.name)
            self._went.pop(group := _group(rollout), None)
            self._went[group] = (engine.name,)
        while len(self._went) > _MOST_KNOWN:
            self._went.popitem(last=False)
        try:
            engine.send(requests)
        except StreamClosed:
            self.lose(engine)

    async def in_flight(self) -> list[InFlight]:
        """As of the engines' last reports (`LEAST_GROWTH`)."""
        sent = (request for engine in self.engines for request in engine.requests.values())
        return [request.in_flight() for request in itertools.chain(sent, *self._queues())]

    def release(self, rollout_ids: Sequence[str]) -> None:
        everywhere, told = list(self._by_name), dict[str, list[str]]()
        for rollout_id in rollout_ids:
            for name in self._went.pop(rollout_id, everywhere):  # an engine that it moved away from keeps it too
                told.setdefault(name, []).append(rollout_id)
        for name, ids in told.items():
            if (engine := self._by_name.get(name)) is not None:
                engine.release(ids)

    # The rest of the protocol: calls to one engine or to all

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        packed = pack_rollouts(rollouts)
        while True:
            engine = await self._least_busy()
            try:
                return list(await engine.call("score", rollouts=packed))
            except StreamClosed:
                self.lose(engine)

    async def pause(self, interrupt: Interrupt) -> None:
        self._is_paused = True
        await self._all("pause", interrupt=interrupt.value)

    async def resume(self) -> None:
        self._is_paused = False
        await self._all("resume")

    async def sleep(self, *, weights: bool = False) -> None:
        """Put all engines to sleep, once late ones have caught up, which takes their weights. Those that join later are
        awake."""
        while self.delivery.catching_up:
            await asyncio.wait(list(self.delivery.catching_up.values()))
        await self._all("sleep", weights=weights)

    async def wake(self) -> None:
        await self._all("wake")

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        """Returns when the engines hold the update (`WeightDelivery.load`) and at least one engine is left."""
        await self.delivery.load(update, [engine for engine in self.engines if not engine.is_behind], interrupt)
        await self._least_busy()

    async def state(self) -> EngineState:
        states = [state for state in await self._all("state") if state is not None]
        wanted = self.delivery.wanted
        total = {
            name: sum(state[name] for state in states) for name in ("running", "waiting", "slots", "free_blocks", "tokens")
        }
        return EngineState(
            version=min((state["version"] for state in states), default=wanted.version if wanted else 0),
            lineage=wanted.lineage if wanted else "",
            policy=wanted.policy if wanted else "",
            memory_peak=max((state["memory_peak"] for state in states), default=0),
            **{**total, "waiting": total["waiting"] + self.num_waiting},
        )

    @property
    def versions(self) -> dict[str, int]:
        """The version each engine holds."""
        return {engine.name: engine.update.version for engine in self.engines if engine.update is not None}

    async def _all(self, name: str, **arguments: Any) -> list[Any]:  # noqa: ANN401
        """Every engine's answer; None from one that was lost meanwhile."""

        async def call(engine: RemoteEngine) -> Any:  # noqa: ANN401
            try:
                return await engine.call(name, **arguments)
            except StreamClosed:
                self.lose(engine)
                return None

        return list(await asyncio.gather(*(call(engine) for engine in list(self.engines))))

    async def _least_busy(self) -> RemoteEngine:
        """The least busy engine that takes calls. Waits for one to join or to catch up."""
        while not (current := [engine for engine in self.engines if engine.is_taking]):
            self._available.clear()
            await self._available.wait()
        return min(current, key=lambda engine: len(engine.requests))


def _group(rollout: Rollout) -> str:
    return f"group {rollout.group}"


def _level(engines: Sequence[RemoteEngine], num_calls: int) -> float:
    """The share of its room that each keeps if so many calls go to those with the largest share of it, who come first."""
    credit, room, level = 0, 0, 0.0
    for engine, following in itertools.pairwise((*engines, None)):
        credit, room = credit + engine.credit, room + engine.room  # type: ignore[union-attr]
        level = max(0.0, (credit - num_calls) / room)
        if following is None or level >= following.share_of_room:
            break
    return level


def _take_with_siblings(queues: Sequence[WaitingQueue], *, most: int, slots: int) -> list[PoolRequest]:
    """The siblings of the last one come along, as long as there are free slots."""
    requests: list[PoolRequest] = []
    for queue in queues:
        requests += _take(queue, most=most - len(requests))
        while requests and queue and len(requests) < slots and next(iter(queue)).rollout.group == requests[-1].rollout.group:
            requests += _take(queue, most=1)
    return requests


def _take(queue: WaitingQueue, *, most: int) -> list[PoolRequest]:
    return [queue.popitem(last=False)[0] for _ in range(min(most, len(queue)))]
