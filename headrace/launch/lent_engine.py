"""The spare engine on the trainer's device (`engine.lend`): a process like any engine's, in the pool only while it is lent."""

from __future__ import annotations

import asyncio
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
        self._is_awake = False

    async def take(self, engine: RemoteEngine) -> None:
        """Its process has started, or is back. It is not lent before it sleeps: else it would be taken for asleep then."""
        await engine.call("sleep", weights=True)
        self._engine, self._is_awake = engine, False

    async def lend(self) -> bool:
        engine = self._engine
        if engine is None or engine.is_lost or engine in self._pool.engines:
            return False
        try:
            self._is_awake = True
            await engine.call("wake")
            await self._pool.join(engine)
        except SyncError:  # the trainer is lost, or has moved on twice meanwhile
            return False
        except (StreamClosed, RemoteError) as error:
            self._let_go(engine, error)
            return False
        self._pool.relieve(engine)
        return True

    async def recall(self) -> None:
        engine = self._engine
        if engine is None or engine.is_lost or not self._is_awake:
            return
        if engine in self._pool.engines:
            await self._pool.recall(engine)
        if (catching_up := self._pool.delivery.catching_up.get(engine)) is not None:
            await asyncio.wait([catching_up])  # which takes its weights
        try:
            await engine.call("sleep", weights=True)
            self._is_awake = False
        except (StreamClosed, RemoteError) as error:
            self._let_go(engine, error)

    def _let_go(self, engine: RemoteEngine, error: Exception) -> None:
        """Disconnect an engine that may hold memory which the trainer needs: its process ends, and is restarted."""
        if isinstance(error, RemoteError):
            self._pool.delivery.say(f"{engine.name} cannot be lent and is let go: {error}")
        self._pool.lose(engine)
        engine.control.stream.close()

    def num_sampled(self) -> tuple[int, int]:
        sampled = self._pool.num_sampled
        return sampled[self._name], sampled.total()
