"""Engines at the far end of real sockets, in this process: what a pool sees of engines in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.engine.pool import EnginePool
from headrace.engine.remote_engine import PoolRequest, RemoteEngine
from headrace.engine.worker import EngineWorker
from headrace.model.load import load_model
from headrace.observe import ProcessTimeline
from headrace.rpc import Listener, Peer, Stream, connect
from headrace.sync import Lineage, SharedMemoryTransport, WeightSync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from torch import Tensor

    from headrace.records import WeightUpdate

TOKEN = "t" * 64


@dataclass(eq=False)
class Far:
    """One engine and both ends of its streams."""

    name: str
    remote: RemoteEngine
    engine: NativeEngine
    worker: EngineWorker
    ends: dict[str, Stream]
    """Its own ends, by channel."""
    control: Peer
    data: Peer
    reports: list[dict[str, Any]]
    _reading: list[asyncio.Task[None]]

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    @property
    def requests(self) -> list[PoolRequest]:
        """The pool's requests that were sent to it."""
        return list(self.remote.requests.values())

    def kill(self) -> None:
        """Its sockets close as those of a killed process do: at once, whatever is under way."""
        for stream in self.ends.values():
            stream._writer.transport.abort()
        self.close()

    def close(self) -> None:
        self.worker._data = None  # nobody is told any more
        self.engine.close()
        for task in self._reading:
            task.cancel()


@dataclass
class Pooled:
    """A pool, and who may join it."""

    pool: EnginePool
    model_path: str
    sync: WeightSync
    folder: Path
    listener: Listener
    decode: Callable[[list[int]], str] | None = None
    """Of its engines."""
    record_entropy: bool = False
    """By its engines."""
    far: list[Far] = field(default_factory=list)
    _reading: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self, *, slots: int, context: int, name: str = "") -> Far:
        """An engine that is connected and has not joined."""
        name = name or f"engine-{len(self.far)}"
        options = {"decode": self.decode, "record_entropy": self.record_entropy}
        core = EngineCore(load_model(self.model_path), name=name, slots=slots, context=context, **options)
        timeline, life = ProcessTimeline("engine"), Lineage("life")
        sync = WeightSync(life, SharedMemoryTransport(prefix="w", folder=self.folder), name=name)
        engine = NativeEngine(core, sync=sync, timeline=timeline)
        worker = EngineWorker(engine, timeline=timeline)
        near, ends = {}, {}
        for channel in ("control", "data"):
            arriving = self.listener.expect(name, channel)
            ends[channel] = await connect(self.listener.address, token=TOKEN, name=name, channel=channel)
            near[channel] = await arriving
        reports: list[dict[str, Any]] = []
        remote = RemoteEngine(
            name, self.pool, control=Peer(near["control"]), on_report=lambda _, report: reports.append(report)
        )
        remote.data = Peer(near["data"], notices=remote.notices())
        control, data = Peer(ends["control"], calls=worker.calls()), Peer(ends["data"], notices=worker.notices())
        reading = [asyncio.ensure_future(peer.run()) for peer in (control, data)]
        far = Far(name, remote, engine, worker, ends, control, data, reports, reading)
        for peer in (remote.control, remote.data):
            self._reading.append(asyncio.ensure_future(self._watch(peer, remote)))
        engine.start()
        worker.attach(data)
        self.far.append(far)
        return far

    def parcel(self, update: WeightUpdate) -> Tensor:
        """The bytes of an update, where engines will read them: to be harmed."""
        return parcel_of(self.sync, update)

    async def join(self, *, slots: int = 4, context: int = 96) -> Far:
        far = await self.start(slots=slots, context=context)
        await self.pool.join(far.remote)
        return far

    async def _watch(self, peer: Peer, remote: RemoteEngine) -> None:
        """What whoever supervises the processes does."""
        try:
            await peer.run()
        finally:
            for each in (remote.control, remote.data):
                assert each is not None
                each.stream.close()
            self.pool.lose(remote)

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for far in self.far:
            far.close()
            assert not far.engine.died.done(), far.engine.died.exception()
        self.listener.close()
        self.sync.close()


def parcel_of(sync: WeightSync, update: WeightUpdate) -> Tensor:
    """The bytes of an update at its sender, of transports that keep them in rooms."""
    parcel = sync._transport.bytes_of(update.parts[0].key)  # type: ignore[attr-defined]
    assert parcel is not None
    return parcel


@contextlib.asynccontextmanager
async def pooled(
    model_path: str,
    *,
    decode: Callable[[list[int]], str] | None = None,
    payload: str = "full",
) -> AsyncIterator[Pooled]:
    """An empty pool."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sender = WeightSync(Lineage("life"), SharedMemoryTransport(prefix="w", folder=folder), payload=payload)
        listener = await Listener.on_this_host(token=TOKEN)
        bench = Pooled(EnginePool(), model_path, sender, folder, listener, decode)
        try:
            yield bench
        finally:
            await bench.close()
