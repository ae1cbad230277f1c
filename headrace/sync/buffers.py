"""Rooms by key, kept for the next parcel when one is freed: memory that was touched before is cheaper than new memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Room(Protocol):
    """Memory on a transport's medium."""

    tensor: Tensor
    """All of it: one dimension of uint8."""

    def drop(self) -> None:
        """Give it back."""


R = TypeVar("R", bound=Room)


class Rooms(Generic[R]):
    """At most one is kept spare: the next parcel is written while the last may still be read, and no more."""

    def __init__(self, make: Callable[[int], R]) -> None:
        self._make = make
        self._held: dict[str, tuple[R, int]] = {}
        self._spare: R | None = None
        self._lock = threading.Lock()

    def take(self, key: str, num_bytes: int) -> R:
        """The spare one if it is large enough, or a new one."""
        self.free(key)
        with self._lock:
            room, self._spare = self._spare, None
            if room is not None and len(room.tensor) < num_bytes:
                room.drop()
                room = None
            room = room or self._make(num_bytes)
            self._held[key] = room, num_bytes
            return room

    def find(self, key: str) -> tuple[R, int] | None:
        """The room and how many of its bytes are the parcel's."""
        with self._lock:
            return self._held.get(key)

    def parcel(self, key: str) -> Tensor | None:
        found = self.find(key)
        return None if found is None else found[0].tensor[: found[1]]

    def free(self, key: str) -> None:
        """Keep it for the next parcel, unless a larger one is kept already."""
        with self._lock:
            room, _ = self._held.pop(key, (None, 0))
            if room is None:
                return
            if self._spare is not None:
                small, room = sorted((self._spare, room), key=lambda each: len(each.tensor))
                small.drop()
            self._spare = room

    def close(self) -> None:
        """Give back all of them."""
        with self._lock:
            for room, _ in self._held.values():
                room.drop()
            self._held.clear()
        self.close_spare()

    def close_spare(self) -> None:
        """Keep nothing for the next parcel."""
        with self._lock:
            if self._spare is not None:
                self._spare.drop()
                self._spare = None
