"""The launcher's side of a process: starting it, sending its order, and finding out why it ended.

A `ProcessHandle` starts and kills a process, wherever it runs. A `RoleProcess` tracks it: its streams, its last reported state,
and how it ended. `headrace.launch.local` decides what to do about a lost process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.helper_process import how_it_ended, start_helper
from headrace.model import ModelError
from headrace.rpc import Peer, RemoteError, Stream, StreamClosed
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.launch.hosts import Host
    from headrace.launch.placement import Order, Placement

_END_SECONDS = 5.0
"""How long to wait for a lost process's exit status, which says most about the cause."""
_SHORTEST_PAUSE, _LONGEST_PAUSE, _WORKED_SECONDS = 1.0, 60.0, 60.0
"""Seconds between a loss and a restart, and of work after which the next pause is short again."""
PING_GRACE_SECONDS = 2.0
"""Extra time to read an answer that arrived while the launcher was itself blocked."""


class RoleFailed(RuntimeError):
    """A process of the run failed; the message says which, why, and where its log is."""


class TrainerLost(RoleFailed):
    """The trainer's process was killed, crashed or stopped answering; it raised nothing that it would raise again."""


class RestartBudget:
    """How often one process may be started again, and how long to wait before each time: twice as long as the last time if it
    has not worked for a minute since."""

    def __init__(self, key: str, most: int, *, window: float) -> None:
        """`key`: the setting that says `most`. Restarts longer than `window` seconds ago do not count."""
        self.key, self.most, self._window = key, most, window
        self._times: list[float] = []
        self._pause = 0.0

    def spend(self, error: RoleFailed) -> float:
        """Count a restart and return the seconds to wait before it; raises `error` if none is left."""
        now = time.monotonic()
        has_worked = not self._times or now - self._times[-1] - self._pause >= _WORKED_SECONDS
        self._times = [then for then in self._times if now - then < self._window]
        if len(self._times) >= self.most:
            error.args = (f"{error}\n  {self.key} = {self.most} are spent",)
            raise error
        self._times.append(now)
        self._pause = _SHORTEST_PAUSE if has_worked else min(2 * self._pause, _LONGEST_PAUSE)
        return self._pause

    @property
    def num_spent(self) -> int:
        return len(self._times)

    def refill(self) -> None:
        self._times.clear()


class ProcessHandle(Protocol):
    """A started process, which imports while the launcher prepares and then waits for its order. Another kind of host needs
    another handle, not other code."""

    @property
    def pid(self) -> int:
        """On its own host."""

    def order(self, order: Order) -> None:
        """Send the order. Called once, when the launcher is ready for the process to connect."""

    def beat(self) -> None:
        """Send a heartbeat. Called from a thread of its own, after `order`; must not block."""

    def kill(self) -> None:
        """End it at once, even if it hangs or is stopped."""

    def wait(self) -> int | None:
        """Block until it ends; return its exit status, negative for a signal, None if nobody knows. Called in a thread, and
        again on exit."""

    def describe(self) -> str:
        """For error messages: which process it is, and whether it is stopped."""


class ChildProcess:
    """A child of the launcher on the same host. A pipe to its stdin carries the order and heartbeats until it ends."""

    def __init__(self, name: str, placement: Placement) -> None:
        with open(placement.log, "a") as log:  # the process has its own descriptor
            how: dict[str, Any] = {"bufsize": 0, "stdin": subprocess.PIPE, "stdout": log}
            self._process = start_helper("headrace.launch.child", name, log=log, threads=placement.threads, **how)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)  # a stopped process does not read its heartbeats
        self._pipe_lock = threading.Lock()
        """One thread sends heartbeats, and another closes the pipe."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: Order) -> None:
        self._send(order.line().encode())

    def beat(self) -> None:
        self._send(b"\n")

    def _send(self, line: bytes) -> None:
        with self._pipe_lock, contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, which `wait` reports
            self._pipe.write(line)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        status = self._process.wait()
        with self._pipe_lock:
            self._pipe.close()
        return status

    def describe(self) -> str:
        is_stopped = False
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat") as file:
            is_stopped = file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return f"process {self.pid}{', stopped by SIGSTOP' if is_stopped else ''}"


@dataclass(eq=False)
class Place:
    """An engine or a rank of the trainer, whichever process is it: one that is lost has a successor."""

    name: str
    role: str
    """`engine` or `trainer`."""
    index: int = 0
    host: Host | None = None
    """None: the launcher's own."""
    device: str = ""
    """On another host, as it was offered."""
    incarnation: int = 0
    """Counts the processes started for it."""
    newest: RoleProcess | None = None
    """Of these."""
    is_leaving: bool = False
    """Its host has said that it leaves."""
    is_over: bool = False
    """It is given up, or has left."""


class RoleProcess:
    """One incarnation of an engine or of a rank of the trainer."""

    def __init__(self, place: Place, *, handle: ProcessHandle, placement: Placement) -> None:
        self.place, self.handle, self.placement = place, handle, placement
        self.name, self.role, self.index, self.incarnation = place.name, place.role, place.index, place.incarnation
        self.host = place.host
        self.has_order = False
        """Heartbeats follow it."""
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
        self._is_read = asyncio.Event()
        """Nothing more comes from its control stream."""
        self._is_read.set()
        self.ended = asyncio.Event()
        self.lost = asyncio.Event()
        """It ended, one of its streams closed, or it was given up."""

    @property
    def log(self) -> str:
        return self.placement.log

    @property
    def control(self) -> Peer:
        if "control" not in self.streams:
            raise StreamClosed(f"{self.name} is not connected")
        return self.streams["control"]

    def watch_end(self) -> None:
        """Set `ended` and `lost` in this event loop when the process ends."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._status = self.handle.wait()
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                loop.call_soon_threadsafe(self.lost.set)  # before `ended`, whose waiters take it for granted
                loop.call_soon_threadsafe(self.ended.set)

        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()

    async def open(
        self, channel: str, arriving: asyncio.Future[Stream], *, deadline: float, notices: Mapping[str, Callable[[Any], None]]
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
        if channel == "control":
            self._is_read.clear()
        return peer

    async def read(self, peer: Peer) -> None:
        """Read a stream until it closes; then the process is lost."""
        try:
            await peer.run()
        except asyncio.CancelledError:  # the run has ended: `explain` need not wait
            self.verdict = self.verdict or "was left when the run was ended"
            raise
        except StreamClosed:
            self.lost.set()
        except ValueError as error:
            logging.getLogger("headrace").warning("%s sent what cannot be read", self.name, exc_info=error)
            self.give_up(f"sent what cannot be read: {error}")
        finally:
            self.close_streams()
            if peer is self.streams.get("control"):
                self._is_read.set()

    async def ping(self, seconds: float) -> dict[str, Any] | None:
        """The report of its timeline; None if it does not answer."""
        try:
            answer = self.control.begin("ping")
            for wait in (seconds, PING_GRACE_SECONDS):
                await asyncio.wait({answer}, timeout=wait)
            if not answer.done():
                answer.cancel()
                return None
            told = answer.result()
        except StreamClosed:
            self.lost.set()
            return None
        self.state, self.doing = told["state"], told["report"]["state"]
        report: dict[str, Any] = told["report"]
        return report

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
        """Why it is lost. Waits a moment for its exit status, and for the error it may have reported before."""
        if not self.verdict:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self.ended.wait()
                    await self._is_read.wait()
        if self._last_words is not None:
            return self.failed(self._last_words)
        ended = "closed its stream" if self._status is None else how_it_ended(self._status)
        process = self._description or self.handle.describe()
        kind = TrainerLost if self.role == "trainer" else RoleFailed
        return kind(f"{self.name} ({process}) {self.verdict or ended}\n  log {self.log}")
