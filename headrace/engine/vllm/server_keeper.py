"""`python server_keeper.py COMMAND...`: run a command; end it, with all it started, once our parent process is gone.

Standard input is a pipe that closes when the parent ends, even if it is killed. Otherwise a vLLM server would outlive it and
keep its GPU. This file imports nothing of Headrace: it is run as a script.
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

_PATIENCE = 8.0  # seconds between SIGTERM and SIGKILL
_TRACKERS = 3.0  # further seconds for resource trackers


def main() -> int:
    os.setsid()  # a group of its own: what the command starts is in it too
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    status = child.wait()
    _end_others(time.monotonic() + _PATIENCE)
    return status if status >= 0 else 128 - status


def _watch(child: subprocess.Popen[bytes]) -> None:
    """Wait until the pipe closes; then terminate the command, and kill it if it does not end."""
    while os.read(0, 1024):
        pass
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE)
        return
    child.kill()


def _end_others(until: float) -> None:
    """End what the command left in its process group; resource trackers last, as they free the shared memory of the killed."""
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
    """The other living processes of this group."""
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
