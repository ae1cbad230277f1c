"""The seam between a trainer's weights and the engines that run them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from headrace.types import TensorInfo, WeightUpdate

__all__ = ["Lineage", "SyncError", "WeightSync"]


@dataclass(frozen=True)
class Lineage:
    """One life of a trainer. Weights are identified by (policy, lineage, version).

    A trainer that restarts from version 40 of life A is life B, and of A only versions up to 40 are still history:
    `ancestors` is then {A: 40}.
    """

    id: str
    ancestors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Lineage:
        return cls(id=secrets.token_hex(4))

    def after_restart(self, version: int) -> Lineage:
        """The next life, begun from `version` of this one."""
        history = {life: min(last, version) for life, last in self.ancestors.items()}
        return Lineage(id=secrets.token_hex(4), ancestors={**history, self.id: version})

    def contains(self, lineage: str, version: int) -> bool:
        """Whether those weights are this life's own or its history."""
        return lineage == self.id or version <= self.ancestors.get(lineage, -1)


class WeightSync(Protocol):
    """Moves one update at a time; a failed one leaves every engine on its old version."""

    def offer(self, version: int, manifest: Iterable[TensorInfo]) -> WeightUpdate:
        """Called by the trainer's side when a version has been trained: name what will travel, and how."""

    async def send(self, update: WeightUpdate, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Make the tensors available; runs while receivers run."""

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        """Called by an engine's `load`: the tensors, in the manifest's order."""

    def release(self, update: WeightUpdate) -> None:
        """Called after every receipt or the deadline: free what the tensors travelled in."""

    def abort(self, update: WeightUpdate) -> None:
        """Called when an update is given up: nobody will receive it any more."""
