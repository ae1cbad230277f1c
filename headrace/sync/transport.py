"""The seam between what travels and how: a transport moves one run of bytes from a trainer's process to engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain

ANY_HOST = ("", "0.0.0.0", "::")
"""Addresses to listen on that nobody can be told."""


class Target(Protocol):
    """Where a receiver wants the bytes: a buffer it owns, on whatever device it likes."""

    num_bytes: int

    @property
    def views(self) -> Mapping[str, Tensor]:
        """The same buffer as named tensors. All of it but padding is in one of them."""

    def write(self, start: int, piece: Tensor) -> None:
        """Copy `piece`, one dimension of uint8, to the bytes from `start` on. It is done with `piece` when it returns."""

    def check(self) -> None:
        """Raise `SyncError` if the update was given up here. Whoever waits calls this a few times a second."""


class Transport(Protocol):
    """Moves parcels. A parcel is a buffer of bytes under a key; at most a few are known at a time.

    Everything here blocks, and is called from threads: `free` may come from another thread while `push` or a receiver is at
    work, and ends it with a `SyncError`. Nothing waits longer than the transport's deadline without progress. Whatever
    fails, the next key starts clean.
    """

    name: str

    # The sender's end

    def room(self, key: str, num_bytes: int) -> Tensor:
        """A buffer of uint8, [num_bytes], beginning at a multiple of 256 bytes, for the parcel to be written into."""

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        """The parcel is whole; `views` are its bytes as named tensors. How receivers find it: plain data for `fetch`."""

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """Move the parcel to these receivers while they `fetch` it; returns when all of them have it. Where receivers come
        for it themselves there is nothing to do."""

    def free(self, key: str) -> None:
        """Nobody needs the parcel any more, or it is given up. What is unknown is no error."""

    def close(self) -> None:
        """Give back everything: memory, files, sockets. Either end calls it."""

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        """Write the parcel that was posted at `place` into the target. `receiver` is the name `push` knows this end by."""
