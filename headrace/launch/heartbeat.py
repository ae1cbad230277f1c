"""Heartbeats tell a process that the launcher is gone when no closed stream does.

When the launcher ends, the OS closes its streams and every process notices at once. When its host vanishes or it is stopped
(SIGSTOP), the streams stay open and silent. So the launcher sends heartbeats from a thread that no reward, breakpoint or
computation blocks, down the pipe that the process read its order from, and the process listens in a thread that no forward pass
blocks. A process that hears nothing for `SILENT_HEARTBEATS` × `heartbeat` seconds ends itself.
"""

from __future__ import annotations

import os
import select
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace.launch.process import ProcessHandle

SILENT_HEARTBEATS = 3
_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""Extra time to read heartbeats that arrived while this process was itself blocked."""


def send_heartbeats(handles: Callable[[], Iterable[ProcessHandle]], heartbeat: float) -> Callable[[], None]:
    """Start the launcher's thread, which sends to the processes that there are each time; return a function that ends it."""
    has_ended = threading.Event()

    def send() -> None:
        while not has_ended.wait(min(_INTERVAL_SECONDS, heartbeat / 4)):
            for handle in handles():
                handle.beat()

    threading.Thread(target=send, name="heartbeats", daemon=True).start()
    return has_ended.set


def watch_launcher(pipe: int, silence: float, on_silence: Callable[[], None]) -> threading.Event:
    """Start a process's thread, which calls `on_silence` when nothing comes for `silence` seconds. The event is set when the
    launcher has ended: then the closed control stream ends this process long before `on_silence` is called."""
    has_ended = threading.Event()

    def is_heard() -> bool:
        return any(select.select([pipe], [], [], seconds)[0] for seconds in (silence, _GRACE_SECONDS))

    def listen() -> None:
        while is_heard():
            if not os.read(pipe, 4096):
                has_ended.set()
                time.sleep(silence)
                break
        on_silence()

    threading.Thread(target=listen, name="heartbeats", daemon=True).start()
    return has_ended
