"""The transport inside one process: the engine copies out of the room that the trainer's weights were packed into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.model import allocate_bytes
from headrace.sync.buffers import Rooms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target


class MemoryRoom:
    """In torch's own memory, on any device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = allocate_bytes(num_bytes, device)

    def drop(self) -> None:
        """It goes when nobody holds it."""


class MemoryTransport:
    """Both ends are the same object."""

    name = "memory"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        place = torch.device(device)
        self._rooms = Rooms(lambda num_bytes: MemoryRoom(num_bytes, place))

    def room(self, key: str, num_bytes: int) -> Tensor:
        return self._rooms.take(key, num_bytes).tensor[:num_bytes]

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        return {"key": key}

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """The receiver comes for it."""

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        parcel = self._rooms.parcel(str(place.get("key")))
        if parcel is None:
            raise SyncError("it is not on offer any more, or never was")
        target.write(0, parcel)

    def free(self, key: str) -> None:
        self._rooms.free(key)

    def close(self) -> None:
        self._rooms.close()
