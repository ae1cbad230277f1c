"""Where the engines of a pool get a trainer's weights from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.launch.process import TrainerLost
from headrace.sync import is_pushed, routed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records import WeightUpdate
    from headrace.trainer import RemoteTrainer


class TrainerSource:
    """A `WeightSource` over a trainer in another process. `relays`: engine name -> the address at which it relays weights."""

    def __init__(self, trainer: RemoteTrainer, *, relays: Mapping[str, str]) -> None:
        self._trainer, self._relays = trainer, relays

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        return routed(update, [self._relays[name] for name in receivers])

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        if is_pushed(update):
            await self._trainer.send(update, receivers)

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        try:
            return await self._trainer.catch_up(version)
        except TrainerLost as error:  # which is not the fault of the engine that asks
            raise SyncError(str(error)) from error
