"""The spare engine on the trainer's device (`engine.lend`): a process like any engine's, in the pool only while it is lent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from headrace.engine import EnginePool, RemoteEngine


class LentEngine:
    """A `Lender`. Its process may be lost and started again; until it is back, nothing is lent."""

    def __init__(self, pool: EnginePool, name: str) -> None:
        self._pool, self._name = pool, name
        self._engine: RemoteEngine | None = None
        self._is_awake = True

    async def take(self, engine: RemoteEngine) -> None:
        """Its process has started, or is back."""
        self._engine, self._is_awake = engine, True
        await self._sleep(engine)

    async def lend(self) -> bool:
        engine = self._engine
        if engine is None or engine.is_lost or engine in self._pool.engines:
            return False
        try:
            self._is_awake = True
            await engine.call("wake")
            await self._pool.join(engine)
        except StreamClosed:
            self._pool.lose(engine)
            return False
        except (SyncError, RemoteError):  # the trainer is lost, or has moved on twice meanwhile
            return False
        self._pool.relieve(engine)
        return True

    async def recall(self) -> None:
        engine = self._engine
        if engine is None or engine.is_lost or not self._is_awake:
            return
        if engine in self._pool.engines:
            await self._pool.recall(engine)
        try:
            await self._sleep(engine)
        except StreamClosed:
            self._pool.lose(engine)

    async def _sleep(self, engine: RemoteEngine) -> None:
        await engine.call("sleep", weights=True)
        self._is_awake = False

    def num_sampled(self) -> tuple[int, int]:
        sampled = self._pool.num_sampled
        return sampled[self._name], sampled.total()
