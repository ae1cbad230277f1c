"""The order of work on a device: a stream on a GPU; on a CPU, where tests run the kernels, everything is done at once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Queue:
    """A stream, its events, and host memory it can copy from and to while the host does something else."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._free: dict[int, list[Tensor]] = {}

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work is queued here."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """A point that can be waited for: the end of what is queued now."""
        if self._stream is None:
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Until a mark is passed; once."""
        if mark is not None:
            mark.synchronize()
            self._events.append(mark)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def borrow(self, numbers: int) -> Tensor:
        """At least so many int32 of host memory; lent until given back."""
        size = 1 << (max(numbers, 1) - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)
