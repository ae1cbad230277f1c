"""The trainer as the engines' pool sees it: where weights come from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records import WeightUpdate
    from headrace.trainer import RemoteTrainer

_PUSHED = "collective"


class TrainerSource:
    """A `WeightSource` over a trainer in another process. `relays`: where each engine hands weights on, by its name."""

    def __init__(self, trainer: RemoteTrainer, *, relays: Mapping[str, str]) -> None:
        self._trainer, self._relays = trainer, relays

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        """Over HTTP engines hand on what they get, so that the trainer's link carries it twice, however many they are."""
        if update.transport != "http":
            return [update] * len(receivers)
        from headrace.sync import relay_places

        places = relay_places(update.place, [self._relays[name] for name in receivers])
        return [dataclasses.replace(update, place=place) for place in places]

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        if update.transport == _PUSHED:
            await self._trainer.send(update, receivers)

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        return await self._trainer.catch_up(version)
