"""Runs a command and ends it, with all it started, when whoever asked for it is gone: `python keep.py COMMAND...`.

It holds the far end of a pipe for that: its standard input, on which nothing is ever said. A server that was started plainly
would outlive a starter that is killed, and go on holding a GPU. This file stands alone: it is run as a script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_PATIENCE = 8.0
"""Seconds between asking and killing."""


def main() -> int:
    os.setsid()  # a group of its own: what the command starts is in it too
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    status = child.wait()
    _end_others(time.monotonic() + _PATIENCE)
    return status if status >= 0 else 128 - status


def _watch(child: subprocess.Popen[bytes]) -> None:
    """Wait until nobody holds the near end any more; then the command has its time, and is killed after it."""
    while os.read(0, 1024):
        pass
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE)
        return
    child.kill()


def _end_others(until: float) -> None:
    """What the command left behind, in its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    _wait_for_others(until)
    trackers = [process for process in _others() if _is_tracker(process)]
    _kill(process for process in _others() if process not in trackers)
    _wait_for_others(time.monotonic() + _PATIENCE)  # a tracker ends by itself, once it has removed their shared memory
    _kill(_others())


def _wait_for_others(until: float) -> None:
    while _others() and time.monotonic() < until:
        time.sleep(0.05)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _is_tracker(process: int) -> bool:
    """Whether it is the one in which Python keeps the names of the others' shared memory."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def _others() -> list[int]:
    """The other processes of this group that run still."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = entry.read_text().partition(" (")
            state, _, group = rest.rpartition(") ")[2].split()[:3]
            if int(group) == os.getpgrp() and int(number) != os.getpid() and state != "Z":
                found.append(int(number))
    return found


if __name__ == "__main__":
    sys.exit(main())
