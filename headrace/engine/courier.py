"""New weights to the engines of a pool: one update reaches all of them, and the slowest does not hold the others."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from headrace.partial import Interrupt
from headrace.rpc import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.engine.member import Member
    from headrace.engine.protocol import WeightSource
    from headrace.records import WeightUpdate


class Courier:
    """Brings updates to members. An engine that is lost on the way is told to `on_lost`."""

    def __init__(
        self, on_lost: Callable[[Member], None], *, source: WeightSource | None = None, patience: float = math.inf
    ) -> None:
        self.source = source
        """Whom to ask, where engines do not simply come for weights."""
        self.patience = patience
        """Seconds that engines which hold an update wait for the others to hold it."""
        self._on_lost = on_lost
        self._sending: set[asyncio.Future[None]] = set()
        self._interrupt = Interrupt.KEEP
        """What the last update did to rollouts in flight: so does one that an engine catches up by."""

    async def deliver(
        self,
        update: WeightUpdate,
        members: Sequence[Member],
        interrupt: Interrupt,
        *,
        following: Mapping[Member, asyncio.Future[None]] | None = None,
    ) -> dict[Member, asyncio.Future[None]]:
        """Have these load it, and whoever has it send it. Returns when all of them hold it, or the first do and patience is at
        an end: then with those that are still at it. One that refuses it is an error. `following` are on their way to it
        from behind; the first may be one of them."""
        self._interrupt = interrupt
        names = [member.name for member in members]
        routes = [update] * len(members) if self.source is None else self.source.routes(update, names)
        loading = {
            member: asyncio.ensure_future(self._load(member, update, route, interrupt))
            for member, route in zip(members, routes, strict=True)
        }
        sending = self._send(update, names)
        try:
            await self._settled(update, {**(following or {}), **loading})
        except asyncio.CancelledError:
            for task in (*loading.values(), *sending):
                task.cancel()
            raise
        refusal = next((error for load in loading.values() if load.done() and (error := load.exception())), None)
        if refusal is not None:
            ended = (task for task in sending if task.done() and not task.cancelled())
            raise refusal from next((error for task in ended if (error := task.exception())), refusal.__cause__)
        return {member: load for member, load in loading.items() if not load.done()}

    async def _settled(self, update: WeightUpdate, loading: Mapping[Member, asyncio.Future[None]]) -> None:
        """Until all of them are done, or one holds it or has refused it and the others have had their time."""
        waiting, until = set(loading.values()), math.inf
        while waiting:
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            if any(holds(member, update) for member in loading) or any(task.exception() for task in done):
                until = min(until, time.monotonic() + self.patience)

    async def bring(self, member: Member, wanted: WeightUpdate) -> None:
        """One engine to what the others hold: by what it missed, where only a difference is on its way."""
        held = member.version_of(wanted.lineage)
        if wanted.base_version is not None and held != wanted.base_version:
            assert self.source is not None, "whoever makes differences can be asked for what was missed"
            for update in await self.source.catch_up(held):
                await self._deliver_whole(member, update)
        if not holds(member, wanted):
            await self._deliver_whole(member, wanted)

    async def _deliver_whole(self, member: Member, update: WeightUpdate) -> None:
        await self.deliver(update, [member], self._interrupt)
        if member.is_lost:
            raise StreamClosed(f"{member.name} was lost while it was brought up to date")

    async def _load(self, member: Member, update: WeightUpdate, route: WeightUpdate, interrupt: Interrupt) -> None:
        try:
            await member.load(route, interrupt)
            member.update = update
        except StreamClosed:
            self._on_lost(member)  # it comes back, if it does, with the weights wanted then

    def _send(self, update: WeightUpdate, receivers: Sequence[str]) -> list[asyncio.Future[None]]:
        """Its failure is the receivers' failure: they say what they miss, and this why."""
        if self.source is None or not receivers:
            return []
        sending = asyncio.ensure_future(self.source.send(update, receivers))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return [sending]


def holds(member: Member, update: WeightUpdate) -> bool:
    """That, or what came after it: an engine that took what another refused does not go back."""
    held = member.version_of(update.lineage)
    return held is not None and held >= update.version
