"""Requests to stop a run, by a signal or from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_SECONDS = 0.2
"""A main thread that waits for a lock wakes this often to run signal handlers: a signal that comes just before the wait, or to
another thread, does not end it."""


class StopRequest:
    """The first request ends the run once the current version is trained and saved; the second ends it at once."""

    def __init__(self) -> None:
        self.num_made = 0
        self.by = ""
        """Who made it, if not a signal."""
        self._on_first: Callable[[], object] | None = None
        self._on_second: Callable[[], object] | None = None

    def make(self, by: str = "") -> None:
        """From any thread."""
        self.num_made, self.by = self.num_made + 1, self.by or by
        act = self._on_first if self.num_made == 1 else self._on_second
        if act is not None:
            act()

    @contextlib.contextmanager
    def made_by_signals(self) -> Iterator[None]:
        """In this block of the main thread, signals make the request; from the second on they raise `KeyboardInterrupt` too."""

        def on_signal(*_: object) -> None:
            self.make()
            if self.num_made > 1:
                raise KeyboardInterrupt

        with _handled(on_signal):
            yield

    @contextlib.contextmanager
    def cancels(self, task: asyncio.Task[Any] | None, *, at: int) -> Iterator[None]:
        """In this block, request number `at` and any later one cancel a task; signals stay as they are."""
        assert task is not None
        before = self._on_first, self._on_second
        self._on_second = lambda: task.get_loop().call_soon_threadsafe(task.cancel)
        self._on_first = self._on_second if at == 1 else self._on_first
        if self.num_made >= at:  # before this block started
            task.cancel()
        try:
            yield
        finally:
            self._on_first, self._on_second = before

    @contextlib.contextmanager
    def heard_by(self, stop: Callable[[], object]) -> Iterator[None]:
        """In this block, the first signal or request calls `stop` in this event loop."""
        loop = asyncio.get_running_loop()
        signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()

        def on_signal() -> None:
            self.num_made += 1
            forget_signals()
            stop()

        def forget_signals() -> None:
            """Let the next signal raise `KeyboardInterrupt` again."""
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.default_int_handler)

        self._on_first = lambda: loop.call_soon_threadsafe(stop)
        if self.num_made:  # before this block started
            loop.call_soon(stop)
        for number in signals:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            self._on_first = None
            forget_signals()


def sigterm_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """In this block SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does, so that it cleans up. No effect off the main thread."""
    return _handled(signal.default_int_handler)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """In this block signals wait for its end: what it starts must be noted before an interrupt, which ends what is noted."""
    came: list[int] = []
    try:
        with _handled(lambda number, _: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextlib.contextmanager
def _handled(handler: Callable[..., Any]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in _SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
