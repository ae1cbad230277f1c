"""Interrupts that reach a thread which only waits."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from headrace.launch.launcher import outside_event_loop
from headrace.launch.stop import StopRequest


def interrupted(num_signals: int) -> StopRequest:
    """What a run in a notebook's thread hears of signals that the system gives to its own thread instead of the main one. It
    ends when it has heard of all."""
    stop = StopRequest()

    def run() -> None:
        for number in range(num_signals):
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            until = time.monotonic() + 60
            while stop.num_made <= number and time.monotonic() < until:
                time.sleep(0.01)

    async def notebook() -> None:
        outside_event_loop(run, stop)

    before = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(notebook())
    finally:
        assert signal.getsignal(signal.SIGINT) is before
    return stop


def test_a_signal_to_another_thread_is_heard():
    assert interrupted(1).num_made == 1


def test_work_that_the_first_one_cancels_ends_as_an_interrupt():
    async def waits(stop: StopRequest) -> None:
        with stop.cancels(asyncio.current_task(), at=1):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)

    async def notebook() -> None:
        stop = StopRequest()
        outside_event_loop(lambda: asyncio.run(waits(stop)), stop)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())


def test_a_second_one_is_raised():
    with pytest.raises(KeyboardInterrupt):
        interrupted(2)
