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

_PATIENCE = 8.0
"""Seconds between asking and killing."""
_TRACKERS = 3.0
"""Seconds that resource trackers are left after that."""


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
    """What the command left behind, in its group. Python's resource trackers come last: when all that used it are gone, they
    remove the shared memory that those could not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    for is_last in (False, True):
        while _others() and time.monotonic() < until:
            time.sleep(0.05)
        for process in _others():
            with contextlib.suppress(OSError):  # it has ended
                if is_last or b"resource_tracker" not in Path(f"/proc/{process}/cmdline").read_bytes():
                    os.kill(process, signal.SIGKILL)
        until = time.monotonic() + _TRACKERS


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
