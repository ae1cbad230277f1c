"""The launcher's side of a process: starting it, sending its order, watching it, and finding out why it ended.

A `ProcessHandle` starts and kills a process, wherever it runs. A `RoleProcess` tracks it: its streams, its last reported state,
and how it ended. `headrace.launch.supervise` decides what to do about a lost process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from headrace.model import ModelError
from headrace.rpc import Peer, RemoteError, Stream, StreamClosed
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.launch.placement import Order, Placement

_END_SECONDS = 5.0
"""How long to wait for a lost process's exit status, which says most about the cause."""
_PING_SECONDS = 1.0
PING_GRACE_SECONDS = 2.0
"""Extra time to read an answer that arrived while the launcher was itself blocked."""


class RoleFailed(RuntimeError):
    """A process of the run failed; the message says which, why, and where its log is."""


class ProcessHandle(Protocol):
    """Starts and kills one process. Another kind of host needs another handle, not other code."""

    @property
    def pid(self) -> int:
        """On its own host."""

    def start(self) -> None:
        """Called once, early: the process imports while the launcher prepares, then waits for its order."""

    def order(self, order: Order) -> None:
        """Send the order. Called when the launcher is ready for the process to connect. Does nothing if it has ended."""

    def kill(self) -> None:
        """End it at once, even if it hangs or is stopped. Does nothing if it has ended."""

    def wait(self) -> int:
        """Block until it ends; return its exit status, negative for a signal. Called in a thread, and again on exit."""

    def describe(self) -> str:
        """For error messages: which process it is, and whether it is stopped."""


class ChildProcess:
    """A child of the launcher on the same host."""

    def __init__(self, name: str, placement: Placement) -> None:
        self._name, self._placement = name, placement
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self._name} is not started"
        return self._process.pid

    def start(self) -> None:
        threads = str(self._placement.threads)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # it must find the same package as the launcher
        with open(self._placement.log, "a") as log:  # the process has its own descriptor
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.launch.child", self._name],  # the name shows in `ps`
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in the terminal must reach only the launcher
            )

    def order(self, order: Order) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # broken: it has ended, which `wait` reports
            stdin.write(order.line().encode())

    def kill(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # still open if no order was sent

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def describe(self) -> str:
        return f"process {self.pid}{', stopped by SIGSTOP' if _is_stopped(self.pid) else ''}"


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


class RoleProcess:
    """One incarnation of an engine or the trainer."""

    def __init__(
        self, name: str, role: str, *, handle: ProcessHandle, placement: Placement, index: int = 0, incarnation: int = 1
    ) -> None:
        self.name, self.role, self.handle, self.placement = name, role, handle, placement
        self.index, self.incarnation = index, incarnation
        self.streams: dict[str, Peer] = {}
        """By channel: `control`, and `data` for an engine."""
        self.state: dict[str, Any] = {}
        """From its last answer to a ping."""
        self.doing = "starting"
        self.verdict = ""
        """Why the launcher gave it up, if it did."""
        self._description = ""
        self._status: int | None = None
        self._last_words: RemoteError | None = None
        """The error it reported before it ended."""
        self.ended = asyncio.Event()
        self.lost = asyncio.Event()
        """It ended, one of its streams closed, or it was given up."""
        self._is_explained = asyncio.Event()
        """The process or the run has ended: there is nothing more to learn about why it is lost."""

    @property
    def log(self) -> str:
        return self.placement.log

    @property
    def control(self) -> Peer:
        if "control" not in self.streams:
            raise StreamClosed(f"{self.name} is not connected")
        return self.streams["control"]

    # Start

    def watch_end(self) -> None:
        """Set `ended` and `lost` in this event loop when the process ends."""
        loop = asyncio.get_running_loop()

        def note() -> None:
            for event in (self.ended, self._is_explained, self.lost):
                event.set()

        def wait() -> None:
            self._status = self.handle.wait()
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                loop.call_soon_threadsafe(note)

        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()

    async def open(
        self, channel: str, arriving: asyncio.Future[Stream], *, notices: Mapping[str, Callable[[Any], None]], deadline: float
    ) -> Peer:
        """Wait for the process to open a stream; raise if it ends first or `deadline` passes. The caller then runs `read`."""
        lost = asyncio.ensure_future(self.lost.wait())
        either: set[asyncio.Future[Any]] = {arriving, lost}
        await asyncio.wait(either, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not arriving.done():
            if not self.lost.is_set():
                self.give_up(f"has not connected for {deadline:g} s (deadline)")
            raise await self.explain()
        peer = self.streams[channel] = Peer(arriving.result(), notices={"failed": self._take_last_words, **notices})
        return peer

    async def call(self, name: str, *, deadline: float, doing: str, **arguments: Any) -> Any:  # noqa: ANN401
        """A control call. If it fails or takes longer than `deadline` seconds, the error names the process and its log."""
        try:
            return await self.control.call(name, timeout=deadline, **arguments)
        except TimeoutError as error:
            self.give_up(f"has been {doing} for {deadline:g} s (deadline)")
            raise await self.explain() from error
        except RemoteError as error:
            raise self.failed(error) from error
        except StreamClosed as error:
            raise await self.explain() from error

    # Watch

    async def read(self, peer: Peer) -> None:
        """Read a stream until it closes; then the process is lost."""
        try:
            await peer.run()
        except asyncio.CancelledError:  # the run has ended: `explain` need not wait
            self.verdict = self.verdict or "was left when the run was ended"
            self._is_explained.set()
            raise
        except StreamClosed:
            self.lost.set()
        except ValueError as error:
            self.give_up(f"sent what cannot be read: {error}")
        finally:
            self.close_streams()

    async def keep_asking(self, heartbeat: float, on_report: Callable[[dict[str, Any]], None]) -> None:
        """Ping it every second, and give it up if a ping stays unanswered for `heartbeat` seconds."""
        while not self.lost.is_set():
            asked = time.monotonic()
            if not await self.ping(on_report, seconds=heartbeat) and not self.lost.is_set():
                self.give_up(
                    f"has not answered for {time.monotonic() - asked:.0f} s (heartbeat = {heartbeat:g}); it was last at "
                    f"{self.doing}"
                )
            await asyncio.sleep(min(_PING_SECONDS, heartbeat / 4))

    async def ping(self, on_report: Callable[[dict[str, Any]], None], *, seconds: float) -> bool:
        try:
            answer = self.control.begin("ping")
            for wait in (seconds, PING_GRACE_SECONDS):
                await asyncio.wait({answer}, timeout=wait)
            if not answer.done():
                answer.cancel()
                return False
            told = answer.result()
        except StreamClosed:
            self.lost.set()
            return False
        self.state, self.doing = told["state"], told["report"]["state"]
        on_report(told["report"])
        return True

    # End

    def _take_last_words(self, error: dict[str, Any]) -> None:
        self._last_words = RemoteError(**error)

    def give_up(self, verdict: str) -> None:
        """Treat it as lost and kill it. Nothing more is read from it, even if it cannot be killed."""
        if not self.verdict:
            self.verdict, self._description = verdict, self.handle.describe()  # before the kill, to report that it was stopped
        self.lost.set()
        self.close_streams()
        self.handle.kill()

    def close_streams(self) -> None:
        for peer in self.streams.values():
            peer.stream.close()

    def say_goodbye(self) -> None:
        """The run is over: let it clean up and end."""
        self.verdict = self.verdict or "was ended"
        if "control" in self.streams:
            with contextlib.suppress(StreamClosed):
                self.control.notify("end", None)
        self.close_streams()

    def failed(self, error: RemoteError) -> Exception:
        """Turn an error from inside the process into an error of the run."""
        if error.is_config:
            return ConfigError(error.message)
        if error.kind == "ModelError":
            return ModelError(error.message)
        logging.getLogger("headrace").error("%s failed:\n%s", self.name, error.detail)
        where = f"\n  {error.frame}" if error.frame else ""
        return RoleFailed(f"{self.name} failed: {error}{where}\n  log {self.log}")

    async def explain(self) -> Exception:
        """Why it is lost. Waits a moment for its exit status."""
        if not self.verdict:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_explained.wait(), _END_SECONDS)
        if self._last_words is not None:
            return self.failed(self._last_words)
        process = self._description or self.handle.describe()
        return RoleFailed(f"{self.name} ({process}) {self.verdict or self._how_it_ended()}\n  log {self.log}")

    def _how_it_ended(self) -> str:
        if self._status is None:
            return "closed its stream"
        killed = self._status < 0
        return f"was killed by {signal.Signals(-self._status).name}" if killed else f"ended with status {self._status}"
