"""Heartbeats tell a process that the launcher is gone when no closed stream does.

When the launcher ends, the OS closes its streams and every process notices at once. When its host vanishes or it is stopped
(SIGSTOP), the streams stay open and silent. So the launcher sends heartbeats from a thread with its own event loop, which no
reward, breakpoint or computation blocks, and each process listens in a thread that no forward pass blocks. A process that hears
nothing for `SILENT_HEARTBEATS` × `heartbeat` seconds ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from headrace.rpc import Listener, StreamClosed, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.launch.placement import Order
    from headrace.rpc import Stream

SILENT_HEARTBEATS = 3
CHANNEL = "heartbeat"
_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""Extra time to read heartbeats that arrived while this process was itself blocked."""


class HeartbeatSender:
    """The launcher's side: one thread sends to every process."""

    def __init__(self, *, token: str, prefix: str, heartbeat: float) -> None:
        self._interval = min(_INTERVAL_SECONDS, heartbeat / 4)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="heartbeats", daemon=True)
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(Listener.on_this_host(token=token, prefix=prefix), self._loop)
        self._listener = listening.result()
        self.address = self._listener.address

    def expect(self, name: str, *, incarnation: int) -> None:
        """Send to this process once it connects, and stop sending to its earlier incarnation."""
        asyncio.run_coroutine_threadsafe(self._expect(name, incarnation), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _expect(self, name: str, incarnation: int) -> None:
        arriving = self._listener.expect(name, CHANNEL, incarnation=incarnation)
        if name in self._tasks:
            self._tasks[name].cancel()
        self._tasks[name] = asyncio.ensure_future(self._send(arriving))

    async def _send(self, arriving: asyncio.Future[Stream]) -> None:
        stream = await arriving
        try:
            while True:
                if not stream.backlog:  # a stopped process does not read
                    stream.write(None)
                await asyncio.sleep(self._interval)
        except StreamClosed:
            pass
        finally:
            stream.close()

    async def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._listener.close()


def watch_launcher(order: Order, on_silence: Callable[[], None]) -> None:
    """A process's side: a thread listens, and calls `on_silence` when the launcher is silent for too long."""

    def listen() -> None:
        asyncio.run(_wait_for_silence(order))
        on_silence()

    threading.Thread(target=listen, name="heartbeats", daemon=True).start()


async def _wait_for_silence(order: Order) -> None:
    try:
        stream = await connect(
            order.heartbeat_address, token=order.token, name=order.name, channel=CHANNEL, incarnation=order.incarnation
        )
        while await _is_heard(stream, order.silence):
            pass
    except OSError as error:
        # If the launcher has ended, the closed control stream ends this process long before this sleep does.
        logging.getLogger("headrace.child").info("no heartbeats: %s", error)
        await asyncio.sleep(order.silence)


async def _is_heard(stream: Stream, silence: float) -> bool:
    heartbeat = asyncio.ensure_future(stream.receive())
    for seconds in (silence, _GRACE_SECONDS):
        await asyncio.wait({heartbeat}, timeout=seconds)
    if heartbeat.done():
        heartbeat.result()  # raises if the stream was closed
        return True
    heartbeat.cancel()
    return False
