"""`python server_keeper.py FOLDER COMMAND...`: run a command; end it, with all it started, once our parent process is gone.

Standard input is a pipe that closes when the parent ends, even if it is killed. Otherwise a vLLM server would outlive it and
keep its GPU. SIGTERM ends the server in the same way. FOLDER, where the server leaves sockets and temporary files, is made
here and removed after it. This file imports nothing of Headrace: it is run as a script.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE = 8.0  # seconds between SIGTERM and SIGKILL
_TRACKERS = 3.0  # further seconds for resource trackers


def main() -> int:
    folder, *command = sys.argv[1:]
    os.setsid()  # a group of its own: what the command starts is in it too
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    os.mkdir(folder, mode=0o700)
    try:
        return _keep(subprocess.Popen(command, stdin=subprocess.DEVNULL), terminated)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep(child: subprocess.Popen[bytes], terminated: list[int]) -> int:
    while child.poll() is None and not terminated and not select.select([0], [], [], 0.1)[0]:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the whole group gets below
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE)
    os.killpg(0, signal.SIGTERM)
    _kill_others(after=_PATIENCE, trackers=False)
    _kill_others(after=_TRACKERS, trackers=True)  # last, as they free the shared memory of the killed
    return child.wait()


def _kill_others(*, after: float, trackers: bool) -> None:
    """Kill what is left of the group after so many seconds, with or without Python's resource trackers."""
    until = time.monotonic() + after
    while _others() and time.monotonic() < until:
        time.sleep(0.05)
    for process in _others():
        with contextlib.suppress(OSError):  # it has ended
            if trackers or b"resource_tracker" not in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)


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
