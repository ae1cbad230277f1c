"""The launcher's side of hosts that join a run: a listener, and of each host one connection to its `headrace join`.

A host fetches the model if it has not got it, says what it offers, and then starts and kills processes as it is told:
`JoinedProcess` is their `ProcessHandle`. The processes themselves connect as local ones do, over TLS. A trainer's checkpoints
travel over the host's connection, both ways.

All of it runs in a thread with its own event loop, so that heartbeats go on while a reward or a breakpoint blocks the run's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.launch.clock import ClockOffset
from headrace.launch.model_files import PIECE_BYTES, fetch_files, list_files, read_piece
from headrace.rpc import PROTOCOL, Listener, Peer, RemoteError, StreamClosed
from headrace.settings import ConfigError, build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.launch.placement import Order
    from headrace.launch.settings import ClusterSettings
    from headrace.records import Array
    from headrace.rpc import Stream

log = logging.getLogger("headrace.hosts")
_MAX_BYTES = PIECE_BYTES + (1 << 20)
"""Of what a host may send at once."""
_PING_SECONDS = 1.0
_KILLED_SECONDS = 5.0
"""How long a host may take to report that a process it was told to kill has ended."""
_MOST_BACKLOG = 2 * PIECE_BYTES
"""A host that has so much to read gets no notices; more than one piece of a file, or its processes would miss heartbeats."""
_PARTING_SECONDS = 1.0
"""How long a host may take to close its stream when the run is over, or lets it go."""
_OFF_SECONDS = 5.0
"""A clock that is off by more is mentioned."""


@dataclass(frozen=True, kw_only=True)
class HostOffer:
    """What a host says of itself when it joins."""

    host: str
    address: str
    """At which other hosts reach it."""
    role: str = "engine"
    """Of the processes that it will run."""
    devices: tuple[str, ...] = ("cpu",)
    """Of each of them."""
    threads: int = 1
    """torch's CPU threads of each, if the recipe does not say."""
    folder: str = ""
    """For logs."""
    passing: str = ""
    """For a trainer's checkpoints on their way; removed when it leaves."""
    shared_folder: str = ""
    model: str = ""
    """Where it has the model."""
    frozen: dict[str, str] = field(default_factory=dict)
    """Where it has folders of the trainer's frozen models, by their paths at the launcher."""
    label: str = ""
    """What whoever started it calls it."""


@dataclass(eq=False)
class Host:
    """A host that has joined."""

    number: int
    peer: Peer
    loop: asyncio.AbstractEventLoop
    """Of the thread that talks to it."""
    offer: HostOffer | None = None
    is_gone: bool = False
    processes: dict[str, JoinedProcess] = field(default_factory=dict)
    served: dict[str, tuple[Path, dict[str, list[int]]]] = field(default_factory=dict)
    """Folders that it may read, and their files: the model's, named "", those of frozen models, and a checkpoint that its
    trainer loads."""
    ticks: ClockOffset = field(default_factory=ClockOffset)
    """Of `time.perf_counter` there, which timelines are in."""
    wall: ClockOffset = field(default_factory=ClockOffset)
    """Of `time.time` there."""
    _num_read: int = 0
    """Pieces of files that it has asked for."""

    @property
    def name(self) -> str:
        return self.offer.host if self.offer is not None else f"host {self.number}"

    def tell(self, name: str, value: Any) -> None:  # noqa: ANN401
        """From any thread; nothing is sent to a host that is gone or does not read."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self.loop.call_soon_threadsafe(self._notify, name, value)

    def _notify(self, name: str, value: Any) -> None:  # noqa: ANN401
        if not self.is_gone and self.peer.stream.backlog < _MOST_BACKLOG:
            with contextlib.suppress(StreamClosed):
                self.peer.notify(name, value)

    def dismiss(self, reason: str | None = None) -> None:
        """From any thread: it is not needed any more, and closes the stream when it has read that. If this end closed it while
        something of the host's is on its way, the host would read nothing more, and join again."""

        def close() -> None:
            self._notify("end", reason)
            self.loop.call_later(_PARTING_SECONDS, self.peer.stream.close)

        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(close)

    # These block. Raise `StreamClosed` if the host is gone, and `TimeoutError` if nothing moves for `deadline` seconds.

    def fetch(self, place: str, files: Mapping[str, list[int]], folder: Path, *, deadline: float) -> None:
        """Copy files from a folder there."""

        def read(name: str, start: int) -> Array:
            piece: Array = self._ask("read", deadline, place=place, name=name, start=start)
            return piece

        fetch_files(files, folder, read=read)

    def deliver(self, folder: Path, place: str, copy: str, *, deadline: float) -> None:
        """Copy a checkpoint to a folder there, but for what only the launcher needs. `copy`: another such folder, or ""."""
        files = list_files(str(folder), has_trainer=True)
        self.served[place] = folder, files
        try:
            self._ask("fetch", deadline, place=place, files=files, copy=copy)
        finally:
            del self.served[place]

    def remove(self, place: str, *, deadline: float) -> None:
        """Remove a folder there."""
        self._ask("remove", deadline, place=place)

    def _ask(self, call: str, deadline: float, **arguments: Any) -> Any:  # noqa: ANN401
        if self.is_gone:  # nobody would run the call
            raise StreamClosed(f"{self.name} is gone")
        return asyncio.run_coroutine_threadsafe(self._answer(call, deadline, arguments), self.loop).result()

    async def _answer(self, call: str, deadline: float, arguments: dict[str, Any]) -> Any:  # noqa: ANN401
        """Waits as long as the host reads: a checkpoint that is large takes long."""
        answer = self.peer.begin(call, **arguments)
        while not answer.done():
            num_read = self._num_read
            await asyncio.wait({answer}, timeout=deadline)
            if not answer.done() and self._num_read == num_read:
                answer.cancel()
                raise TimeoutError(f"{self.name} neither answers {call!r} nor reads for {deadline:g} s (deadline)")
        return answer.result()

    async def read(self, name: str, start: int, place: str = "") -> Array:
        """Answers the host: a piece of a file that it may read."""
        self._num_read += 1
        folder, files = self.served.get(place, (Path(), {}))
        if name not in files:
            raise LookupError(f"{name!r} is no file of the model, nor of a checkpoint for this host")
        return await asyncio.to_thread(read_piece, folder / name, start)

    def on_started(self, told: dict[str, Any]) -> None:
        if (process := self._find(told)) is not None:
            process.pid = int(told["pid"])

    def on_ended(self, told: dict[str, Any]) -> None:
        if (process := self._find(told)) is not None:
            process.on_end(int(told["status"]))

    def _find(self, told: dict[str, Any]) -> JoinedProcess | None:
        """None if the run has given it up already, or started another of that name."""
        process = self.processes.get(told["name"])
        return process if process is not None and process.incarnation == told["incarnation"] else None

    def on_gone(self) -> None:
        self.is_gone = True
        for process in list(self.processes.values()):  # the run's thread may add one meanwhile
            process.on_end(None)


class JoinedProcess:
    """A process that a joined host starts; a `ProcessHandle`."""

    def __init__(self, name: str, host: Host, *, incarnation: int = 1) -> None:
        self.pid, self.incarnation = 0, incarnation
        self._host, self._self = host, {"name": name, "incarnation": incarnation}
        self._has_ended = threading.Event()
        self._status: int | None = None
        self._killed_at: float | None = None
        host.processes[name] = self
        if host.is_gone:
            self.on_end(None)

    def order(self, order: Order) -> None:
        self._host.tell("start", order.line())

    def beat(self) -> None:
        self._host.tell("beat", self._self)

    def kill(self) -> None:
        self._killed_at = self._killed_at or time.monotonic()
        self._host.tell("kill", self._self)

    def wait(self) -> int | None:
        """None if the host is gone, and with it any news of the process."""
        while not self._has_ended.wait(0.5):
            is_killed = self._killed_at is not None and time.monotonic() - self._killed_at > _KILLED_SECONDS
            if is_killed or self._host.is_gone:  # which an engine that has left is not told of
                return None
        return self._status

    def describe(self) -> str:
        return f"process {self.pid or '?'} on {self._host.name}{', which is gone' if self._host.is_gone else ''}"

    def on_end(self, status: int | None) -> None:
        self._status = status
        self._has_ended.set()


class _HostListener(Listener):
    """Lets in everyone who proves the token."""

    on_host: Callable[[Stream], None]

    def _find(self, name: str, channel: str) -> tuple[int, asyncio.Future[Stream]]:
        if channel != "host":
            raise LookupError(channel)
        arrived: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        arrived.add_done_callback(lambda done: self.on_host(done.result()))
        return 0, arrived


class Hosts:
    """Runs the thread. `on_ready` and `on_leaving` are called in it, with the host."""

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        token: str,
        certificate: str,
        heartbeat: float,
        model: str,
        frozen: Sequence[str] = (),
        gpus_each: int = 0,
        takes_trainer: bool = False,
        on_ready: Callable[[Host], object],
        on_leaving: Callable[[Host], None],
        say: Callable[[str], object],
    ) -> None:
        """`frozen`: models besides, which a trainer's hosts need too."""
        self._settings, self._token, self._certificate, self._heartbeat = settings, token, certificate, heartbeat
        self._on_ready, self._on_leaving, self._say = on_ready, on_leaving, say
        self._model, self._files, self._takes_trainer = model, list_files(model), takes_trainer
        self._frozen = {path: files for path in frozen if (files := list_files(path))}  # not those of the hub
        self._gpus_each = gpus_each  # of an engine (`EngineKind.gpus_for_itself`)
        self._num_joined = 0
        self._hosts: set[Host] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosts", daemon=True)

    def start(self) -> str:
        """Begin to listen; returns the address for `headrace join`. Raises OSError if the port is in use."""
        self._thread.start()
        try:
            return asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except BaseException:
            self.close()
            raise

    async def _listen(self) -> str:
        settings = self._settings
        self._listener = await _HostListener.between_hosts(
            settings.host, settings.port, token=self._token, certificate=self._certificate, address=settings.reached_at
        )
        self._listener.on_host = self._admit
        return self._listener.address.replace("tls:", "tls://", 1)

    def close(self) -> None:
        """Tell all hosts that the run is over."""

        async def close() -> None:
            if hasattr(self, "_listener"):
                self._listener.close()
            for host in self._hosts:
                host.dismiss()
            until = self._loop.time() + _PARTING_SECONDS
            while self._hosts and self._loop.time() < until:  # noqa: ASYNC110  (there may be none, and they end in many ways)
                await asyncio.sleep(0.01)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    # In the thread

    def _admit(self, stream: Stream) -> None:
        self._num_joined += 1
        host = Host(self._num_joined, Peer(stream, max_bytes=_MAX_BYTES), self._loop)
        host.served |= {"": (Path(self._model), self._files)}
        host.served |= {path: (Path(path), files) for path, files in self._frozen.items()}
        host.peer.calls |= {"join": self._join, "read": host.read, "ready": lambda **told: self._ready(host, told)}
        host.peer.notices |= {
            "started": host.on_started,
            "ended": host.on_ended,
            "leaving": lambda _: self._on_leaving(host),
        }
        self._hosts.add(host)
        for work in (self._listen_to(host), self._keep_pinging(host)):
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _listen_to(self, host: Host) -> None:
        try:
            await host.peer.run()
        except (StreamClosed, ValueError) as error:  # it is gone, or sends what cannot be read
            log.info("%s: %s", host.name, error)
        finally:
            host.peer.stream.close()
            self._hosts.discard(host)
            host.on_gone()

    async def _keep_pinging(self, host: Host) -> None:
        """A host that leaves a ping unanswered for `heartbeat` seconds is gone. The answers tell how its clocks differ."""
        with contextlib.suppress(StreamClosed):
            while not host.is_gone:
                asked, asked_at = time.perf_counter(), time.time()
                try:
                    told = await host.peer.call("ping", timeout=self._heartbeat)
                    passed = time.perf_counter() - asked
                    host.ticks.add(told["ticks"] - asked - passed / 2, within=passed / 2)
                    host.wall.add(told["time"] - asked_at - passed / 2, within=passed / 2)
                except TimeoutError:
                    log.warning("%s has not answered for %g s (heartbeat)", host.name, self._heartbeat)
                    return host.peer.stream.close()
                except (RemoteError, LookupError, TypeError) as error:
                    log.warning("%s: not an answer to a ping: %s", host.name, error)
                    return host.peer.stream.close()
                await asyncio.sleep(min(_PING_SECONDS, self._heartbeat / 4))

    async def _join(self, version: str, protocol: int = 1, role: str = "engine", schema: int = 0) -> dict[str, Any]:
        """A host's first call; the answer names the models and their files. In protocol 1 hosts told a `schema` instead."""
        if (version, protocol) != (__version__, PROTOCOL):
            ours = f"{__version__} (protocol {PROTOCOL})"
            raise ConfigError(f"this host has headrace {version} (protocol {protocol}), and the run has {ours}; install that")
        if role == "trainer" and not self._takes_trainer:
            raise ConfigError("the run trains on the launcher's host; set cluster.trainer_joins = true in its recipe")
        frozen = self._frozen if role == "trainer" else {}
        gpus_each = self._gpus_each if role == "engine" else 0
        told = {"model": self._model, "files": self._files, "frozen": frozen, "gpus_each": gpus_each}
        return {**told, "heartbeat": self._heartbeat}

    async def _ready(self, host: Host, told: dict[str, Any]) -> None:
        host.offer = build(HostOffer, told)
        seconds = host.wall.seconds
        if abs(seconds) > _OFF_SECONDS:
            where = "ahead of" if seconds > 0 else "behind"
            self._say(f"{host.name}'s clock is {abs(seconds):,.0f} s {where} this host's; its traces are corrected for it")
        self._on_ready(host)
