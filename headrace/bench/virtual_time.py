"""An event loop whose clock jumps: hours of waiting take no time, so that only what the code under it computes does.

While tasks can run, the clock stands still; when all of them wait, it jumps to the next timer. `time.monotonic` and
`time.perf_counter` read the same clock meanwhile, so that timelines, deadlines and rates are in its seconds. Nothing under it
may wait for another thread or process: nobody would wait for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """The loop asks its selector to wait until the next timer is due; this one moves the clock there instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: nothing can wake them in virtual time")
        self.now += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        self._now = clock
        super().__init__(clock)

    def time(self) -> float:
        return self._now.now


@contextlib.contextmanager
def _read_from(clock: _Clock) -> Iterator[None]:
    names = ("monotonic", "perf_counter")
    before = {name: getattr(time, name) for name in names}
    for name in names:
        setattr(time, name, lambda: clock.now)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(time, name, function)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, which starts at 0."""
    clock = _Clock()
    with _read_from(clock), asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        return runner.run(main)
