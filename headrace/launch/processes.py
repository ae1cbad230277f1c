"""The processes of a run: how they begin, and that none is left when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

from headrace.launch.threads import threads_of
from headrace.leftovers import Claim, sweep
from headrace.model import ModelError
from headrace.rpc import Listener, Peer, RemoteError, StreamClosed, socket_place
from headrace.settings import ConfigError
from headrace.sync import Ends

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from headrace.config import Recipe

_END_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
"""For processes to go by themselves; they take hundredths, and a stopped one is killed."""


class RoleFailed(RuntimeError):
    """A process of the run failed; says which, why, and where its log is."""


@dataclass(eq=False)
class Child:
    """One process."""

    name: str
    role: str
    process: subprocess.Popen[bytes]
    log: Path
    peer: Peer | None = None
    data: Peer | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """What it last said of itself."""
    doing: str = "starting"
    verdict: str = ""
    """Why it was given up, where that was decided here."""
    told: RemoteError | None = None
    """What it said before it ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """What became of it is known: it ended, or the run was ended first."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """It ended, its stream closed, or it was given up."""

    @property
    def control(self) -> Peer:
        if self.peer is None:
            raise StreamClosed(f"{self.name} is not connected")
        return self.peer

    def give_up(self, verdict: str) -> None:
        """Decide that it is lost, and kill it, so that it cannot come back; a stopped process dies of that too."""
        self.verdict = self.verdict or verdict
        self.lost.set()
        self.process.kill()

    def failed(self, error: RemoteError) -> Exception:
        """What a call raised there, as an error of the run."""
        if error.is_config:
            return ConfigError(error.message)
        if error.kind == "ModelError":
            return ModelError(error.message)
        logging.getLogger("headrace").error("%s failed:\n%s", self.name, error.detail)
        where = f"\n  {error.frame}" if error.frame else ""
        return RoleFailed(f"{self.name} failed: {error}{where}\n  log {self.log}")

    async def explain(self) -> Exception:
        """Why it is lost; waits a moment for the process to end, which tells most."""
        if not self.verdict:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settled.wait(), _END_SECONDS)
        if self.told is not None:
            return self.failed(self.told)
        return RoleFailed(f"{self.name} (process {self.process.pid}) {self._how_it_ended()}\n  log {self.log}")

    def _how_it_ended(self) -> str:
        status = self.process.poll()
        if self.verdict:
            return self.verdict
        if status is None:
            return "closed its stream"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def watch_end(self) -> None:
        """Have `ended` and `lost` set in this event loop when the process is gone."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self.process.wait()
            with contextlib.suppress(RuntimeError):  # the loop was closed first
                loop.call_soon_threadsafe(self.ended.set)
                loop.call_soon_threadsafe(self.settled.set)
                loop.call_soon_threadsafe(self.lost.set)

        threading.Thread(target=wait, name=f"end of {self.name}", daemon=True).start()


class Processes:
    """A context: whatever happens inside, afterwards none of its processes, sockets or shared memory is left. Entering it
    removes what runs that were killed outright left on this host."""

    def __init__(self, recipe: Recipe, *, logs: Path) -> None:
        self.recipe, self._logs = recipe, logs
        self.prefix = f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
        self._token = secrets.token_hex(32)
        self._listener: Listener | None = None
        self._places = dict.fromkeys((self.ends("shared_memory").place, socket_place()))
        self._claims: list[Claim] = []
        self._all: list[Child] = []
        self._open_logs: list[IO[str]] = []

    def __enter__(self) -> Processes:
        for place in self._places:
            sweep(place)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._all:
            if child.process.poll() is None:
                child.process.kill()
        for child in self._all:
            child.process.wait()
            if child.process.stdin is not None:
                with contextlib.suppress(OSError):
                    child.process.stdin.close()
        if self._listener is not None:
            self._listener.close()
        for claim in self._claims:
            claim.release()
        for log in self._open_logs:
            log.close()

    def ends(self, transport: str) -> Ends:
        """What every process of the run must know to sync weights."""
        sync = self.recipe.sync
        return Ends(
            transport=transport,
            folder=sync.folder,
            prefix=self.prefix,
            host=sync.host,
            token=self._token,
            deadline=sync.deadline,
        )

    def open_log(self, name: str) -> IO[str]:
        """logs/NAME.log, to be added to until the run ends."""
        log = (self._logs / f"{name}.log").open("a")
        self._open_logs.append(log)
        return log

    def spawn(self, role: str, name: str) -> Child:
        """Start a process. It imports what it needs and then waits to be connected."""
        threads = str(threads_of(self.recipe, role, cores=os.cpu_count() or 1))
        path = self._logs / f"{name}.log"
        with path.open("a") as log:  # the process has a descriptor of its own
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headrace.launch.child", name],  # the name is for people who list processes
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": _import_path()},
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to answer
            )
        child = Child(name, role, process, path)
        self._all.append(child)
        return child

    async def listen(self) -> None:
        """Be there for processes to connect to."""
        self._claims = [Claim(place, self.prefix) for place in self._places]
        self._listener = await Listener.on_this_host(token=self._token, prefix=self.prefix)

    def connect(self, child: Child, channels: tuple[str, ...]) -> dict[str, asyncio.Future[Any]]:
        """Tell a process who it is and where to come; the streams it is to open."""
        child.watch_end()
        assert self._listener is not None
        arriving = {channel: self._listener.expect(child.name, channel) for channel in channels}
        order = {
            "name": child.name,
            "role": child.role,
            "log": str(child.log.absolute()),
            "address": self._listener.address,
            "token": self._token,
            "launcher": os.getpid(),
            "leftovers": asdict(self.ends("shared_memory")),
            "path": [path or os.getcwd() for path in sys.path],
        }
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.process.stdin as stdin:  # it has ended: whoever waits for it will see
            stdin.write(json.dumps(order).encode() + b"\n")
        return arriving

    async def end(self) -> None:
        """Hang up on all of them and wait a little for them to go; `__exit__` does not wait."""
        for child in self._all:
            child.verdict = child.verdict or "was ended"
            if child.peer is not None:
                with contextlib.suppress(StreamClosed):
                    child.peer.notify("end", None)
            for peer in (child.peer, child.data):
                if peer is not None:
                    peer.stream.close()
        connected = [child for child in self._all if child.peer is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*(child.ended.wait() for child in connected))


def _import_path() -> str:
    """The child must find this package wherever this process found it, and nothing before it."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
