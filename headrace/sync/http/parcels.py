"""Parcels in host memory: who fills one, who reads one, and when its memory may hold the next."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.model import allocate_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_GONE_KEYS = 16
"""Keys of earlier parcels that are remembered, to tell `freed` from `never known`."""
_LEAVE_SECONDS = 5.0
"""Whoever reads looks up at least a few times a second; one that does not leave keeps the memory for itself."""
_BLOCK_WORDS = 512


def piece_sum(piece: Tensor) -> int:
    """A checksum that costs one pass over the bytes: sums of 4 KiB, each times an odd number of its own place.

    One changed bit changes it, and so do bytes that are missing or doubled, or blocks exchanged. `crc32` takes eight times as
    long, which is half of what a fast link gives.
    """
    flat = piece.numpy()
    num_whole = len(flat) // (8 * _BLOCK_WORDS)
    whole = flat[: num_whole * 8 * _BLOCK_WORDS].view(np.int64).reshape(num_whole, _BLOCK_WORDS).sum(axis=1)
    rest = flat[num_whole * 8 * _BLOCK_WORDS :]
    padded = np.zeros(8 * _BLOCK_WORDS, dtype=np.uint8)
    padded[: len(rest)] = rest
    sums = np.append(whole, padded.view(np.int64).sum())
    return int((sums * (2 * np.arange(num_whole + 1) + 1)).sum())


class Memory:
    """Host buffers. One that was given back serves the next who takes one."""

    def __init__(self) -> None:
        self._idle: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """At least `num_bytes` of uint8 that begin at a multiple of 256 bytes."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if buffer.numel() >= num_bytes]
            if fitting:
                smallest = min(fitting, key=torch.Tensor.numel)
                self._idle = [buffer for buffer in self._idle if buffer is not smallest]
                return smallest
            self._idle.clear()  # too small for what travels now
        return allocate_bytes(max(num_bytes, 1), torch.device("cpu"))

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            self._idle.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._idle.clear()


class Parcel:
    """Bytes under a key, as far as they have come."""

    def __init__(self, key: str, buffer: Tensor, num_bytes: int, *, is_offered: bool) -> None:
        self.key, self.buffer, self.num_bytes = key, buffer, num_bytes
        self.is_offered = is_offered
        """Whether others may read it."""
        self.is_over = False
        """Whoever uses it leaves."""
        self.num_come = 0
        self._changed = threading.Condition()
        self._num_users = 0

    @property
    def bytes(self) -> Tensor:
        return self.buffer[: self.num_bytes]

    def advance(self, num_come: int) -> None:
        """Wakes whoever waits for these bytes."""
        with self._changed:
            self.num_come = num_come
            self._changed.notify_all()

    def wait_past(self, at: int, seconds: float) -> int:
        """How far it has come, once that is past `at`, or it is over, or so long has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self.num_come > at, seconds)
            return self.num_come

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Its memory holds nothing else until this is left. Refused once it is over."""
        with self._changed:
            if self.is_over:
                raise SyncError(f"parcel {self.key!r} was freed")
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    def end(self) -> bool:
        """Wake and turn away everybody; whether all of them have left."""
        with self._changed:
            self.is_over = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._num_users, _LEAVE_SECONDS)


class Shelf:
    """The parcels that one end holds."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._parcels: dict[str, Parcel] = {}
        self._gone: deque[str] = deque(maxlen=_GONE_KEYS)
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, key: str, num_bytes: int, *, is_offered: bool) -> Parcel:
        """An empty parcel; one of the same key before it is freed."""
        self.drop(key)
        parcel = Parcel(key, self._memory.take(num_bytes), num_bytes, is_offered=is_offered)
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self._parcels[key] = parcel
            self._changed.notify_all()
        return parcel

    def find(self, key: str, *, wait: float = 0.0) -> Parcel | None:
        """The parcel if it is on offer, or comes to be within `wait` seconds."""

        def found() -> Parcel | None:
            parcel = self._parcels.get(key)
            return parcel if parcel is not None and parcel.is_offered else None

        deadline = time.monotonic() + wait
        with self._changed:
            while found() is None and key not in self._gone and not self._is_closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            return found()

    def offer(self, key: str) -> Parcel:
        """A parcel that was filled here is whole: let it be found."""
        with self._changed:
            parcel = self._parcels.get(key)
            if parcel is None:
                raise SyncError(f"parcel {key!r} has no room here: it was freed, or never asked for")
            parcel.advance(parcel.num_bytes)
            parcel.is_offered = True
            self._changed.notify_all()
            return parcel

    def was_freed(self, key: str) -> bool:
        with self._changed:
            return key in self._gone

    def held(self) -> list[str]:
        """The keys of all parcels, on offer or not."""
        with self._changed:
            return list(self._parcels)

    def drop(self, key: str, *, only: Parcel | None = None) -> None:
        """Free a parcel, unless another than `only` lies there by now. Returns once nobody is at its memory any more."""
        with self._changed:
            parcel = self._parcels.get(key)
            if parcel is None or (only is not None and parcel is not only):
                return
            del self._parcels[key]
            self._gone.append(key)
            self._changed.notify_all()
        if parcel.end():
            self._memory.give(parcel.buffer)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for key in self.held():
            self.drop(key)
        self._memory.clear()
