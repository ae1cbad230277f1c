"""Buffers in host memory that others read while they fill, and when their memory may be used again."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import SyncError
from headrace.sync.buffers import Spare, TorchBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_GONE_KEYS = 16
"""Keys of earlier buffers that are remembered, to tell `freed` from `never known`."""
_LEAVE_SECONDS = 5.0
"""Users look a few times a second whether to leave; memory that one does not leave in time is not used again."""
_BLOCK_WORDS = 512


def piece_sum(piece: Tensor) -> int:
    """A checksum in one pass over the bytes: sums of 4 KiB, each times an odd number of its own place.

    One changed bit changes it, and so do missing, doubled or exchanged blocks. `crc32` takes eight times as long, which would
    halve what a fast link gives.
    """
    flat = piece.numpy()
    num_whole = len(flat) // (8 * _BLOCK_WORDS)
    whole = flat[: num_whole * 8 * _BLOCK_WORDS].view(np.int64).reshape(num_whole, _BLOCK_WORDS).sum(axis=1)
    rest = flat[num_whole * 8 * _BLOCK_WORDS :]
    padded = np.zeros(8 * _BLOCK_WORDS, dtype=np.uint8)
    padded[: len(rest)] = rest
    sums = np.append(whole, padded.view(np.int64).sum())
    return int((sums * (2 * np.arange(num_whole + 1) + 1)).sum())


class ServedBuffer:
    """Bytes under a key, of which `num_come` have arrived: at the sender all of them, at a relay more and more."""

    def __init__(self, key: str, buffer: TorchBuffer, num_bytes: int, *, is_offered: bool) -> None:
        self.key, self.buffer, self.num_bytes = key, buffer, num_bytes
        self.bytes = buffer.tensor[:num_bytes]
        self.is_offered = is_offered
        """Whether others may read it."""
        self.is_over = False
        """Every user must leave."""
        self.num_come = 0
        self._changed = threading.Condition()
        self._num_users = 0

    def advance(self, num_come: int) -> None:
        """Wakes readers that wait for these bytes."""
        with self._changed:
            self.num_come = num_come
            self._changed.notify_all()

    def wait_past(self, at: int, seconds: float) -> int:
        """How many bytes have come, once that is more than `at`, or it is over, or the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.num_come > at, seconds)
            return self.num_come

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Its memory is not used for anything else within. Refused once it is over."""
        with self._changed:
            if self.is_over:
                raise SyncError(f"{self.key!r} was freed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def end(self) -> bool:
        """Wake and turn away all users; whether all of them have left."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._num_users, _LEAVE_SECONDS)


class ServedBuffers:
    """All that one end holds, by key."""

    def __init__(self) -> None:
        self._spare = Spare(TorchBuffer)
        self._held: dict[str, ServedBuffer] = {}
        self._gone: deque[str] = deque(maxlen=_GONE_KEYS)
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, key: str, num_bytes: int, *, is_offered: bool) -> ServedBuffer:
        """A new buffer; an earlier one of the same key is freed first."""
        self.drop(key)
        made = ServedBuffer(key, self._spare.take(num_bytes), num_bytes, is_offered=is_offered)
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self._held[key] = made
            self._changed.notify_all()
        return made

    def find(self, key: str, *, wait: float = 0.0) -> ServedBuffer | None:
        """The buffer, if it is on offer or comes to be within `wait` seconds."""

        def found() -> ServedBuffer | None:
            held = self._held.get(key)
            return held if held is not None and held.is_offered else None

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or key in self._gone or self._is_closed, wait)
            return found()

    def offer(self, key: str) -> ServedBuffer:
        """A buffer that was filled here is complete: others may read it."""
        with self._changed:
            held = self._held.get(key)
            if held is None:
                raise SyncError(f"{key!r} was freed, or never allocated")
            held.advance(held.num_bytes)
            held.is_offered = True
            self._changed.notify_all()
            return held

    def was_freed(self, key: str) -> bool:
        with self._changed:
            return key in self._gone

    def held(self) -> list[str]:
        with self._changed:
            return list(self._held)

    def drop(self, key: str, *, only: ServedBuffer | None = None) -> None:
        """Free a buffer, or only that one. Returns once nobody uses its memory any more."""
        with self._changed:
            held = self._held.get(key)
            if held is None or (only is not None and held is not only):
                return
            del self._held[key]
            self._gone.append(key)
            self._changed.notify_all()
        if held.end():
            self._spare.give(held.buffer)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for key in self.held():
            self.drop(key)
        self._spare.clear()
