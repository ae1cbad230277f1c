"""The transport inside one process: the engine reads the trainer's own tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.sync.protocol import Lineage, SyncError
from headrace.types import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from headrace.types import TensorInfo


class MemorySync:
    """Nothing is copied on the way; the trainer must not step between `send` and `release`, and does not."""

    def __init__(self, lineage: Lineage, *, policy: str = "policy") -> None:
        self.lineage = lineage
        self._policy = policy
        self._held: dict[int, list[tuple[str, Tensor]]] = {}

    def offer(self, version: int, manifest: Iterable[TensorInfo]) -> WeightUpdate:
        return WeightUpdate(
            policy=self._policy, lineage=self.lineage.id, version=version, transport="memory", manifest=tuple(manifest)
        )

    async def send(self, update: WeightUpdate, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._held[update.version] = list(tensors)

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        if update.version not in self._held:
            raise SyncError(f"version {update.version} is not on offer; it was released or never sent")
        yield from self._held[update.version]

    def release(self, update: WeightUpdate) -> None:
        self._held.pop(update.version, None)

    def abort(self, update: WeightUpdate) -> None:
        self.release(update)
