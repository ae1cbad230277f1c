"""Buffers in host memory that peers read while they fill, and when their memory may be reused."""

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

_GONE_KEYS = 16  # freed keys to remember, to tell "freed" from "unknown"
_LEAVE_SECONDS = 5.0  # users check a few times a second whether to leave. If one stays longer, the memory is not reused.
_BLOCK_WORDS = 512


def piece_sum(piece: Tensor) -> int:
    """A checksum in one pass: sums of 4 KiB blocks, each times an odd number that depends on its position. It detects a
    changed bit, and missing, doubled or swapped blocks. `crc32` takes eight times as long, which would halve the throughput of
    a fast link."""
    flat = piece.numpy()
    num_whole = len(flat) // (8 * _BLOCK_WORDS)
    whole = flat[: num_whole * 8 * _BLOCK_WORDS].view(np.int64).reshape(num_whole, _BLOCK_WORDS).sum(axis=1)
    rest = flat[num_whole * 8 * _BLOCK_WORDS :]
    padded = np.zeros(8 * _BLOCK_WORDS, dtype=np.uint8)
    padded[: len(rest)] = rest
    sums = np.append(whole, padded.view(np.int64).sum())
    return int((sums * (2 * np.arange(num_whole + 1) + 1)).sum())


class ServedBuffer:
    """A buffer under a key; `num_come` of its bytes have arrived. At the sender it is complete, at a relay it fills."""

    def __init__(self, key: str, buffer: TorchBuffer, num_bytes: int, *, is_offered: bool) -> None:
        self.key, self.buffer, self.num_bytes = key, buffer, num_bytes
        self.bytes = buffer.tensor[:num_bytes]
        self.is_offered = is_offered  # whether peers may read it
        self.is_over = False  # set when every user must leave
        self.num_come = 0
        self._changed = threading.Condition()
        self._num_users = 0

    def advance(self, num_come: int) -> None:
        """Record arrived bytes and wake the readers waiting for them."""
        with self._changed:
            self.num_come = num_come
            self._changed.notify_all()

    def wait_past(self, at: int, seconds: float) -> int:
        """Wait until more than `at` bytes have arrived, the buffer is over or the time is up; return how many have arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.num_come > at, seconds)
            return self.num_come

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevent reuse of the memory inside this context. Raises `SyncError` once the buffer is over."""
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
        """Wake all users and make them leave; return whether all have left."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._num_users, _LEAVE_SECONDS)


class ServedBuffers:
    def __init__(self) -> None:
        self._spare = Spare(TorchBuffer)
        self._held: dict[str, ServedBuffer] = {}  # by key
        self._gone: deque[str] = deque(maxlen=_GONE_KEYS)
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, key: str, num_bytes: int, *, is_offered: bool) -> ServedBuffer:
        """Make a new buffer; an earlier one with the same key is freed first."""
        self.drop(key)
        made = ServedBuffer(key, self._spare.take(num_bytes), num_bytes, is_offered=is_offered)
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self._held[key] = made
            self._changed.notify_all()
        return made

    def find(self, key: str, *, wait: float = 0.0) -> ServedBuffer | None:
        """Return the buffer if it is on offer within `wait` seconds."""

        def found() -> ServedBuffer | None:
            held = self._held.get(key)
            return held if held is not None and held.is_offered else None

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or key in self._gone or self._is_closed, wait)
            return found()

    def offer(self, key: str) -> ServedBuffer:
        """Let peers read a buffer that was filled here and is complete."""
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
        """Free a buffer (if it is `only`, where given). Returns once its memory is no longer in use."""
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
