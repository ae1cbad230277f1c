"""Delivers new weights to the engines of a pool; slow engines do not hold up the others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING

from headrace.errors import LinkError, SyncError
from headrace.partial import Interrupt
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.engine.protocol import WeightSource
    from headrace.engine.remote_engine import RemoteEngine
    from headrace.records import WeightUpdate

_PAUSES = (0.0, 1.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before each attempt to bring an engine that fell behind up to date; the last is repeated."""
_ATTEMPTS = 3
"""After so many an engine that refuses an update is let go; one whose link fails, only after `deadline` as well."""


class WeightDelivery:
    """Calls `on_lost` with an engine that is gone or cannot catch up, and `on_caught_up` when one may get new work again."""

    def __init__(
        self,
        on_lost: Callable[[RemoteEngine], None],
        on_caught_up: Callable[[], None] = lambda: None,
        *,
        source: WeightSource | None = None,
    ) -> None:
        self.source = source  # the trainer's side; None if engines simply fetch weights
        self.patience = math.inf  # seconds that updated engines wait for slow ones
        self.deadline = 0.0  # seconds that an engine behind a broken link is sent what it lacks
        self.say: Callable[[str], None] = logging.getLogger("headrace").warning  # names engines that refuse an update
        self.wanted: WeightUpdate | None = None  # the newest update, which every engine should hold
        self.catching_up: dict[RemoteEngine, asyncio.Future[None]] = {}  # engines that fell behind
        self._on_lost, self._on_caught_up = on_lost, on_caught_up
        self._sending: set[asyncio.Future[None]] = set()
        self._interrupt = Interrupt.KEEP  # what the last update did with rollouts in flight; engines that catch up do the same

    # All engines, and one that is behind

    async def load(self, update: WeightUpdate, engines: Sequence[RemoteEngine], interrupt: Interrupt) -> None:
        """Returns when the engines hold the update. Those that do not `patience` seconds after the first, or refuse it, are
        behind, and catch up on their own. If no engine takes the update, it is withdrawn and a refusal raised."""
        before, self.wanted = self.wanted, update
        try:
            late = await self.deliver(update, engines, interrupt, others=self.catching_up)
        except BaseException:
            if self.wanted is update:
                self.wanted = before
            raise
        for engine, loading in late.items():
            if engine.is_leaving:  # it may sleep by now; if it joins again, it loads the newest weights first
                continue
            engine.is_behind = True
            if loading.done():
                self.say(f"{engine.name} refused version {update.version}, and is sent it again alone: {loading.exception()}")
            self.catching_up[engine] = asyncio.ensure_future(self._catch_up(engine, loading))

    def forget(self) -> None:
        """The source is lost, and its update with it: engines may join and stay as they are until another one is loaded."""
        self.wanted = None
        for engine, catching_up in self.catching_up.items():
            engine.is_behind = False
            catching_up.cancel()
        self.catching_up.clear()

    @property
    def leases(self) -> bool:
        """Whether rollouts keep the adapter they began with, which is at their engine."""
        return self._interrupt is Interrupt.LEASE

    def is_current(self, engine: RemoteEngine) -> bool:
        return self.wanted is None or holds(engine, self.wanted)

    async def bring_up_to_date(self, engine: RemoteEngine) -> None:
        """Deliver the newest update to one engine, after those it missed if updates are deltas."""
        wanted = self.wanted
        assert wanted is not None
        try:
            held = engine.version_of(wanted.lineage)
            if wanted.base_version is not None and held != wanted.base_version:
                assert self.source is not None, "differences come from a source that can tell what was missed"
                for update in await self.source.catch_up(held):
                    await self._deliver_to_one(engine, update)
            if not holds(engine, wanted):
                await self._deliver_to_one(engine, wanted)
        except (RemoteError, SyncError):
            if self.wanted is wanted:  # otherwise a newer update overwrote it while it was read
                raise

    async def _deliver_to_one(self, engine: RemoteEngine, update: WeightUpdate) -> None:
        await self.deliver(update, [engine], self._interrupt)
        if engine.is_lost:
            raise StreamClosed(f"{engine.name} was lost while it was brought up to date")

    async def _catch_up(self, engine: RemoteEngine, loading: asyncio.Future[None]) -> None:
        """Wait for a late engine's pending load, then bring it up to date. If that fails, disconnect it: it is restarted."""
        await asyncio.wait([loading])
        _ = loading.cancelled() or loading.exception()  # however it ended, it is retried
        until = time.monotonic() + self.deadline
        try:
            for attempt in itertools.count(1):
                await asyncio.sleep(_PAUSES[min(attempt, len(_PAUSES)) - 1])
                try:
                    while not self.is_current(engine):
                        await self.bring_up_to_date(engine)
                    engine.is_behind = False
                    self._on_caught_up()
                    return
                except (RemoteError, SyncError) as error:
                    may_recover = isinstance(error, LinkError) and time.monotonic() < until
                    if attempt >= _ATTEMPTS and not may_recover:
                        self.say(f"{engine.name} was not brought up to date in {attempt} attempts and is let go: {error}")
                        break
        except StreamClosed:
            pass
        except Exception:
            logging.getLogger("headrace").exception("%s could not be brought up to date", engine.name)
        finally:
            self.catching_up.pop(engine, None)
        self._on_lost(engine)
        engine.control.stream.close()

    # One update

    async def deliver(
        self,
        update: WeightUpdate,
        engines: Sequence[RemoteEngine],
        interrupt: Interrupt,
        *,
        others: Mapping[RemoteEngine, asyncio.Future[None]] | None = None,
    ) -> dict[RemoteEngine, asyncio.Future[None]]:
        """Have these engines load the update while its source sends it. Returns those that refused it, or still load it
        `patience` seconds after the first one holds it. Raises if none holds it and one refused it. `others` are catching up to
        it; one of them may be that first one."""
        self._interrupt = interrupt
        names = [engine.name for engine in engines]
        routes = [update] * len(engines) if self.source is None else self.source.routes(update, names)
        loading: dict[RemoteEngine, asyncio.Future[None]] = {
            engine: asyncio.ensure_future(self._load(engine, update, route, interrupt))
            for engine, route in zip(engines, routes, strict=True)
        }
        sending = self._send(update, names)
        try:
            await self._settled(update, {**(others or {}), **loading})
        except asyncio.CancelledError:
            for task in (*loading.values(), *sending):
                task.cancel()
            raise
        late = {engine: load for engine, load in loading.items() if not load.done() or load.exception()}
        refusal = next((load.exception() for load in late.values() if load.done()), None)
        if refusal is not None and not any(holds(engine, update) for engine in (*loading, *(others or ()))):
            causes = [task.exception() for task in sending if task.done() and not task.cancelled()]
            raise refusal from next(filter(None, causes), refusal.__cause__)
        return late

    async def _settled(self, update: WeightUpdate, loading: Mapping[RemoteEngine, asyncio.Future[None]]) -> None:
        """Waits until all are done, or for `patience` seconds after one holds the update."""
        waiting = set(loading.values())
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(holds(engine, update) for engine in loading):
                break
        if waiting:
            await asyncio.wait(waiting, timeout=self.patience)

    async def _load(self, engine: RemoteEngine, update: WeightUpdate, route: WeightUpdate, interrupt: Interrupt) -> None:
        try:
            await engine.load(route, interrupt)
            engine.update = update
        except StreamClosed:
            self._on_lost(engine)  # if it comes back, it loads the newest weights before it joins

    def _send(self, update: WeightUpdate, receivers: Sequence[str]) -> list[asyncio.Future[None]]:
        """A failed send shows as a failed receive, and is then given as its cause."""
        if self.source is None or not receivers:
            return []
        sending = asyncio.ensure_future(self.source.send(update, receivers))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return [sending]


def holds(engine: RemoteEngine, update: WeightUpdate) -> bool:
    """Whether an engine holds that version or a newer one: one that took what the others refused does not go back."""
    held = engine.version_of(update.lineage)
    return held is not None and held >= update.version
