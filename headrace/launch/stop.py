"""Requests to stop a run, by a signal or from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The first request ends the run once the current version is trained and saved; the second ends it at once."""

    def __init__(self) -> None:
        self.is_made = False
        self._ask: Callable[[], object] | None = None
        self._cancel: Callable[[], object] | None = None
        self._is_insisted = False

    def make(self) -> None:
        """Make the first request, from any thread."""
        self.is_made = True
        if self._ask is not None:
            self._ask()

    def insist(self) -> None:
        """Make the second request, from any thread."""
        self._is_insisted = True
        if self._cancel is not None:
            self._cancel()

    @contextlib.contextmanager
    def cancels_this_task(self) -> Iterator[None]:
        """In this block, a second request cancels the current task."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._is_insisted:
            task.cancel()
        try:
            yield
        finally:
            self._cancel = None

    @contextlib.contextmanager
    def heard_by(self, stop: Callable[[], None]) -> Iterator[None]:
        """In this block, the first signal or request calls `stop` in this event loop."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()

        def hear() -> None:
            self.is_made = True
            _forget_signals(loop, is_main)
            stop()

        self._ask = lambda: loop.call_soon_threadsafe(stop)
        if self.is_made:  # before this block started
            loop.call_soon(stop)
        if is_main:
            for number in _SIGNALS:
                loop.add_signal_handler(number, hear)
        try:
            yield
        finally:
            self._ask = None
            _forget_signals(loop, is_main)


def _forget_signals(loop: asyncio.AbstractEventLoop, is_main: bool) -> None:
    """Let the next signal raise `KeyboardInterrupt` again."""
    if is_main:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """In this block SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does, so that it cleans up. No effect off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
