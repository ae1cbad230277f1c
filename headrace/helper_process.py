"""Child processes of the launcher: engines and trainer, and those that run users' code, which are killed with all that they
started themselves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from io import TextIOWrapper
    from typing import IO


def start_helper(
    module: str,
    *arguments: str,
    log: IO[str] | int | None,
    threads: int = 1,
    **how: Any,  # noqa: ANN401
) -> subprocess.Popen[bytes]:
    """`python -m module` in a session of its own. It finds the same modules as this process, and its stderr goes to `log`;
    `how` has more arguments of `Popen`."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stderr=subprocess.DEVNULL if log is None else log,
        env={**os.environ, "OMP_NUM_THREADS": f"{threads}", "MKL_NUM_THREADS": f"{threads}", "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C in the terminal must not reach it, and what it starts is killed with it
        **how,
    )


def kill_helper(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it has started. Does not wait."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def how_it_ended(status: int) -> str:
    """Of an exit status, in words."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def print_whole_lines() -> None:
    """Called in the child: each line it prints is one write, so that those of several processes are not mixed in a log, and
    none is lost when this one is killed."""
    cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True, write_through=False)


def end_with_launcher(file: int) -> None:
    """Called in the child: end it, in the middle of a call too, when the launcher's end of a pipe or socket is closed."""

    def wait() -> None:
        poll = select.poll()
        poll.register(file, 0)  # nothing but the end: another thread reads what comes
        poll.poll()
        os.killpg(0, signal.SIGKILL)  # and what users' code has started

    threading.Thread(target=wait, daemon=True).start()
