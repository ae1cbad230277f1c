"""The order of work on a device: a stream on a GPU; on a CPU, where tests run the kernels, everything is done at once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class DeviceStream:
    """A stream, its events, and host memory it can copy from and to while the host does something else."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._free: dict[int, list[Tensor]] = {}

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Within it, work is queued on this stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """The end of what is queued now, to be waited for once."""
        if self._stream is None:
            return None
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()
            self._events.append(mark)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def borrow(self, numbers: int) -> Tensor:
        """At least so many int32 of host memory, until they are given back."""
        size = 1 << (max(numbers, 1) - 1).bit_length()
        free = self._free.setdefault(size, [])
        return free.pop() if free else torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)
