"""A child process that calls rewards for one worker thread; `headrace.score.child` is its other end.

Requests and answers are frames (`headrace.records.frames`) through a pair of pipes: rewards travel as names, samples and
results as plain data, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any, cast

from headrace.helper_process import how_it_ended, kill_helper, start_helper
from headrace.records import frames
from headrace.score.signature import RewardError

if TYPE_CHECKING:
    from typing import IO, BinaryIO

_STACK_SECONDS = 1.0
"""How long a late process may take to write its stack before it is killed."""


class ProcessEnded(RuntimeError):
    """The process ended before it answered."""


class RewardProcess:
    """Used by one thread, except that any may end it."""

    def __init__(self, log: IO[str] | None) -> None:
        self._process = start_helper("headrace.score.child", log=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._loaded: list[str] = []
        self.has_ended = False

    def load(self, reward: dict[str, Any]) -> None:
        """Let it import a reward, once."""
        if reward["name"] not in self._loaded:
            self.request({"load": reward})
            self._loaded.append(reward["name"])

    def request(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order and wait for the answer. Raises `RewardError` if that is one, and `ProcessEnded`."""
        process, frame = self._process, frames.make_frame(order)
        assert process.stdin is not None and process.stdout is not None
        try:
            for piece in frame.pieces:
                process.stdin.write(piece)
            process.stdin.flush()
            answer: dict[str, Any] = next(frames.read_frames(cast("BinaryIO", process.stdout)))
        except (OSError, StopIteration):
            raise ProcessEnded(f"its process {how_it_ended(self.end())}") from None
        if "error" in answer:
            raise RewardError(answer["error"])
        if "failure" in answer:  # what the call has changed in modules changes no other
            self.end()
        return answer

    def abort(self) -> None:
        """Have it write its stack to the log, and end. Does not wait."""
        self._process.send_signal(signal.SIGABRT)
        timer = threading.Timer(_STACK_SECONDS, self.kill)
        timer.daemon = True
        timer.start()

    def end(self) -> int:
        """Kill it, wait for it, and return its exit status. Called by its thread."""
        self.kill()
        status = self._process.wait()
        self.has_ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what is left to write has no reader
                pipe.close()  # type: ignore[union-attr]
        return status

    def kill(self) -> None:
        """Kill it and all that it has started; the thread that waits for its answer sees that."""
        kill_helper(self._process)
