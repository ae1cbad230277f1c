"""Child processes of benchmarks: `python -m headrace.bench.child MODULE:FUNCTION` answers its parent's orders.

The function is a generator: `function(settings, orders)` yields one answer when it is ready, then one per order. All of them
travel as frames (`headrace.records`) on standard input and output; whatever the child prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.records import encode, read_frames

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CLOSE_SECONDS = 20.0


class PeerFailed(RuntimeError):
    """A peer is missing, failed, or did different work than requested; the message is one line."""


class Child(contextlib.AbstractContextManager["Child"]):
    """A child process as a context manager. Every wait for it has a deadline, and its own children end with it."""

    def __init__(self, name: str, function: str, settings: Mapping[str, Any], *, log: Path) -> None:
        """`log` receives its standard error; errors quote the last line."""
        self._name, self._log = name, log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace.bench.child", function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self._answers = read_frames(self.process.stdout)
        self.tell(settings)

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, order: object, *, seconds: float = 120.0) -> Any:  # noqa: ANN401  (what the function yields)
        """Send an order and wait for the answer."""
        self.tell(order)
        return self.hear(seconds=seconds)

    def tell(self, order: object) -> None:
        """Send an order; `hear` returns the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(encode(order))
            self.process.stdin.flush()
        except OSError as error:
            raise PeerFailed(self._describe("it has ended")) from error

    def hear(self, *, seconds: float = 120.0) -> Any:  # noqa: ANN401
        """Wait for the next answer; the first one means that the child is ready. A child that is late is killed."""
        started, late = time.monotonic(), threading.Timer(seconds, self._kill)
        late.start()
        try:
            return next(self._answers)
        except StopIteration:
            what = f"no answer within {seconds:.0f} s" if time.monotonic() - started >= seconds else "it has ended"
            with contextlib.suppress(subprocess.TimeoutExpired):  # its log is complete once it has exited
                self.process.wait(_CLOSE_SECONDS)
            self._kill()  # what it started
            raise PeerFailed(self._describe(what)) from None
        finally:
            late.cancel()

    def close(self) -> None:
        """Stop it and everything it started; their memory is free when this returns."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_SECONDS)
        self._kill()
        self.process.wait()
        self.process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _describe(self, what: str) -> str:
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{self._name}: {what}{f': {said[-1][:200]}' if said else ''}"


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    orders = read_frames(sys.stdin.buffer)
    module, _, function = sys.argv[1].partition(":")
    for answer in getattr(importlib.import_module(module), function)(next(orders), orders):
        answers.write(encode(answer))
        answers.flush()


if __name__ == "__main__":
    main()
