"""Engines in other processes as one `Engine`.

Rollouts wait here, and engines pull them: each takes what it has room for, so a fast one does more and none hoards. An
engine that is lost leaves its rollouts to the others, each from the tokens it was known to have. Only the fork of a pinned
rollout waits for one engine: the one that has its keys and values.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.engine.courier import Courier, holds
from headrace.engine.member import Member, PoolRequest
from headrace.engine.protocol import EngineState, Increment, InFlight
from headrace.errors import SyncError
from headrace.partial import Interrupt
from headrace.records import FinishReason, pack_rollouts
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from headrace.records import Array, Rollout, Sampling, WeightUpdate

_ATTEMPTS = 3
"""To bring an engine that was left behind to what the others hold."""
_MOST_BACKLOG = 8 << 20
"""Bytes an engine may leave unread before it is sent no more."""


class EnginePool:
    """An `Engine` over those that have joined."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.courier = Courier(on_lost=self.lose)
        self._first: OrderedDict[int, PoolRequest] = OrderedDict()
        """For whoever has room: what was begun before, and goes on before anything new begins."""
        self._waiting: OrderedDict[int, PoolRequest] = OrderedDict()
        """For whoever has room then."""
        self._bound: dict[Member, OrderedDict[int, PoolRequest]] = {}
        """For one engine alone: forks of what it generated."""
        self._pinned: dict[str, Member | None] = {}
        """Rollouts that are pinned, and the engine each was sent to last, if it was sent."""
        self._cancelled: dict[Member, list[int]] = {}
        self._keys = itertools.count()
        self._wanted: WeightUpdate | None = None
        self._joined = asyncio.Event()
        self._is_paused = False
        self._is_flush_due = False
        self._following: dict[Member, asyncio.Future[None]] = {}
        """Engines that were left behind, on their way to what the others hold."""

    # Who is in it; called by whoever supervises the processes

    async def join(self, member: Member) -> None:
        """Take an engine in, once it holds the weights that the others hold, keeps what they keep and stands still if they
        do. Each may change while it is brought there: it is looked at again after every wait."""
        is_paused = False
        pinned: set[str] = set()
        while True:
            if self._wanted is not None and not holds(member, self._wanted):
                await self._bring(member, self._wanted)
            elif is_paused != self._is_paused:
                is_paused = self._is_paused
                await (member.call("pause", interrupt="keep") if is_paused else member.call("resume"))
            elif changed := pinned ^ self._pinned.keys():
                rollout_id = changed.pop()
                is_wanted = rollout_id in self._pinned
                (pinned.add if is_wanted else pinned.remove)(rollout_id)
                await member.call("pin" if is_wanted else "unpin", rollout_id=rollout_id)
            else:
                break
        member.pool = self
        self.members.append(member)
        self._joined.set()
        self.send_soon()

    async def _bring(self, member: Member, wanted: WeightUpdate) -> None:
        try:
            await self.courier.bring(member, wanted)
        except (RemoteError, SyncError):
            if self._wanted is wanted:  # otherwise it was overwritten by a newer one while it was read
                raise

    async def _follow(self, member: Member, loading: asyncio.Future[None]) -> None:
        """Waits for an engine that was left behind, and brings it to what the others hold by then. One that cannot be brought
        there is hung up on; whoever supervises it begins it anew."""
        await asyncio.wait([loading])
        _ = loading.cancelled() or loading.exception()  # it is tried again, whatever it was
        try:
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(RemoteError, SyncError):
                    while self._wanted is not None and not holds(member, self._wanted):
                        await self._bring(member, self._wanted)
                    member.is_behind = False
                    self._joined.set()
                    self.send_soon()
                    return
        except StreamClosed:
            pass
        except Exception:
            logging.getLogger("headrace").exception("%s could not be brought up to date", member.name)
        finally:
            self._following.pop(member, None)
        self.lose(member)
        member.control.stream.close()

    def lose(self, member: Member) -> None:
        """An engine is gone: what it was doing is begun again from what is known of it."""
        member.is_lost = True
        if member in self.members:
            self.members.remove(member)
        self._first |= self._bound.pop(member, OrderedDict())
        for request in member.requests.values():
            if request.grown or request.increments is not None:
                _abort(request, member)
            else:
                self._first[request.key] = request
        member.requests.clear()
        self.send_soon()

    # The protocol

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        request = PoolRequest(next(self._keys), rollout, sampling, asyncio.get_running_loop().create_future())
        self._enqueue(request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._cancel(request)
            raise

    async def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        queue: asyncio.Queue[Increment | Exception] = asyncio.Queue()
        request = PoolRequest(next(self._keys), rollout, sampling, asyncio.get_running_loop().create_future(), increments=queue)
        self._enqueue(request)
        try:
            while True:
                increment = await queue.get()
                if isinstance(increment, Exception):
                    raise increment
                yield increment
                if increment.finish_reason is not None:
                    return
        finally:
            self._cancel(request)

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        packed = pack_rollouts(rollouts)
        while True:
            member = await self._any_member()
            try:
                return list(await member.call("score", rollouts=packed))
            except StreamClosed:
                self.lose(member)

    async def pause(self, interrupt: Interrupt) -> None:
        self._is_paused = True
        await self._all("pause", interrupt=interrupt.value)

    async def resume(self) -> None:
        self._is_paused = False
        await self._all("resume")

    async def sleep(self, *, weights: bool = False) -> None:
        """All of them, when those that were left behind have caught up: an engine without its weights could not. One that joins
        later is awake, holds what the others hold, and sleeps with them the next time."""
        while self._following:
            await asyncio.wait(list(self._following.values()))
        await self._all("sleep", weights=weights)

    async def wake(self) -> None:
        await self._all("wake")

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        """Returns when the engines hold the update, and there is one. The first that do wait for the others for as long as the
        pool has patience; those are left behind then: they are sent nothing new until they have caught up. Refused by one,
        the update is wanted no more, and nobody reads it any longer."""
        before, self._wanted = self._wanted, update
        try:
            active = [member for member in self.members if not member.is_behind]
            late = await self.courier.deliver(update, active, interrupt, following=self._following)
        except BaseException:
            if self._wanted is update:
                self._wanted = before
            raise
        for member, loading in late.items():
            member.is_behind = True
            self._following[member] = asyncio.ensure_future(self._follow(member, loading))
        await self._any_member()

    async def fork(self, rollout: Rollout, at: int, *, id: str) -> Rollout:
        """Generated while `rollout` is pinned, it goes to the engine that has the keys and values of its parent; to any, if
        that one is gone."""
        return rollout.forked(at, id=id)

    async def pin(self, rollout_id: str) -> None:
        """On every engine: nobody knows yet which of them will generate it, or go on with it when that one is lost."""
        runs_on = (m for m in self.members if any(each.rollout.id == rollout_id for each in m.requests.values()))
        self._pinned.setdefault(rollout_id, next(runs_on, None))
        await self._all("pin", rollout_id=rollout_id)

    async def unpin(self, rollout_id: str) -> None:
        self._pinned.pop(rollout_id, None)
        await self._all("unpin", rollout_id=rollout_id)

    async def state(self) -> EngineState:
        states = [state for state in await self._all("state") if state is not None]
        wanted = self._wanted
        return EngineState(
            version=min((state["version"] for state in states), default=wanted.version if wanted else 0),
            lineage=wanted.lineage if wanted else "",
            running=sum(state["running"] for state in states),
            waiting=sum(state["waiting"] for state in states) + self._num_waiting,
            slots=sum(state["slots"] for state in states),
            free_blocks=sum(state["free_blocks"] for state in states),
            tokens=sum(state["tokens"] for state in states),
            memory_peak=max((state["memory_peak"] for state in states), default=0),
        )

    async def in_flight(self) -> list[InFlight]:
        """By what the engines have told, which they do every second."""
        waiting = (request for queue in self._queues for request in queue.values())
        found = [InFlight.of(each.rollout, num_drawn=0, first=-1, partial=partial(_asked, each)) for each in waiting]
        return found + [member.in_flight(request) for member in self.members for request in member.requests.values()]

    @property
    def _queues(self) -> list[OrderedDict[int, PoolRequest]]:
        return [*self._bound.values(), self._first, self._waiting]

    @property
    def versions(self) -> dict[str, int]:
        """What each engine holds."""
        return {member.name: member.update.version for member in self.members if member.update is not None}

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._queues))

    def send_soon(self) -> None:
        """Something may be sent: soon, so that what comes together goes together."""
        if not self._is_flush_due and self._num_waiting and self.members:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        open_members = [
            m
            for m in self.members
            if m.credit > 0 and not m.is_behind and m.data is not None and m.data.stream.backlog < _MOST_BACKLOG
        ]
        for place, member in enumerate(open_members):
            share = -(-(len(self._first) + len(self._waiting)) // (len(open_members) - place))
            requests = _take_first(self._bound.get(member), member.credit)
            share = min(share, member.credit - len(requests))
            resumed = _take_first(self._first, share)
            requests += resumed + _take_first(self._waiting, share - len(resumed))
            if requests:
                self._send(member, requests)

    def _send(self, member: Member, requests: list[PoolRequest]) -> None:
        for request in requests:
            if request.rollout.id in self._pinned:
                self._pinned[request.rollout.id] = member
        try:
            member.send(requests)
        except StreamClosed:
            self.lose(member)

    def _enqueue(self, request: PoolRequest) -> None:
        parent = request.rollout.parent
        home = None if parent is None else self._pinned.get(parent[0])
        if home is not None and not home.is_lost:
            self._bound.setdefault(home, OrderedDict())[request.key] = request
        elif request.rollout.finish_reason is FinishReason.ABORT:
            self._first[request.key] = request  # interrupted: it goes on before anything new begins, and after those before it
        else:
            self._waiting[request.key] = request
        self.send_soon()

    def _cancel(self, request: PoolRequest) -> None:
        if any(queue.pop(request.key, None) is not None for queue in self._queues):
            return
        for member in self.members:
            if member.requests.pop(request.key, None) is not None:
                if not self._cancelled:
                    asyncio.get_running_loop().call_soon(self._tell_cancelled)
                self._cancelled.setdefault(member, []).append(request.key)

    def _tell_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, {}
        for member, keys in cancelled.items():
            assert member.data is not None
            try:
                member.data.notify("cancel", keys)  # behind the work it is about
            except StreamClosed:
                self.lose(member)

    async def _all(self, name: str, **arguments: Any) -> list[Any]:  # noqa: ANN401
        """What each engine answers; None from one that was lost meanwhile."""

        async def call(member: Member) -> Any:  # noqa: ANN401
            try:
                return await member.call(name, **arguments)
            except StreamClosed:
                self.lose(member)
                return None

        return list(await asyncio.gather(*(call(member) for member in list(self.members))))

    async def _any_member(self) -> Member:
        """One that is not behind; waits for an engine that joins or has caught up."""
        while not (active := [member for member in self.members if not member.is_behind]):
            self._joined.clear()
            await self._joined.wait()
        return min(active, key=lambda member: len(member.requests))


def _take_first(queue: OrderedDict[int, PoolRequest] | None, most: int) -> list[PoolRequest]:
    return [queue.popitem(last=False)[1] for _ in range(min(most, len(queue)))] if queue else []


def _asked(request: PoolRequest) -> Rollout:
    return request.rollout


def _abort(request: PoolRequest, member: Member) -> None:
    if request.increments is not None:
        request.increments.put_nowait(Increment((), (), (), FinishReason.ABORT))
    if not request.answer.done() and request.grown:
        request.answer.set_result(member.partial(request))
