"""`headrace join`: a host's side. It stays connected to the launcher and starts and kills engines or trainer ranks as told.

The processes are those of `headrace.launch.child`, which connect to the launcher themselves. When the launcher is gone they are
killed, and the host joins again as soon as one listens there. SIGTERM or Ctrl-C lets the engines hand over what they generate
and leaves; a second one leaves at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace import __version__
from headrace.launch.heartbeat import SILENT_HEARTBEATS
from headrace.launch.hosts import HostOffer
from headrace.launch.model_files import fetch_files, fetch_model, read_piece
from headrace.launch.placement import Order, pick_device
from headrace.launch.process import ChildProcess
from headrace.launch.stop import StopRequest
from headrace.leftovers import Claim, new_prefix, sweep
from headrace.rpc import PROTOCOL, Peer, RemoteError, StreamClosed, connect
from headrace.settings import ConfigError
from headrace.sync import shared_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.records import Array

_RETRY_SECONDS = 1.0
_REFUSALS = 3
"""So many times in a row a launcher must close during the greeting: one that ends, or has too many guests, does so too."""
_ANSWER_SECONDS = 60.0
"""For the launcher to answer the first call; from then on it pings."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """What `headrace join` was told."""

    url: str
    token: str
    role: str = "engine"
    engines: int = 1
    """Or ranks of the trainer."""
    device: str = "auto"
    threads: int = 0
    """0 shares the cores among the processes."""
    address: str = ""
    """Empty: the one from which this host reaches the launcher."""
    folder: Path | None = None
    """For logs, and a trainer's checkpoints on their way; None makes one that is removed at the end, or by the next run on this
    host if a process failed."""
    wait: float = 600.0
    """Seconds to wait for a launcher that does not listen, at first or again."""
    label: str = ""
    """By which whoever starts this host recognises it at the launcher."""
    grace: float = 30.0
    """Seconds in which engines may finish what they generate before the host leaves."""


def join(options: JoinOptions) -> int:
    """Returns the exit status: 0 when the run is over or the host has left, 1 when there is no launcher any more. Raises
    `ConfigError` if the launcher refuses this host."""
    return asyncio.run(_Joiner(options).run())


def device_names(wanted: str, engines: int, *, gpus_each: int = 0) -> tuple[str, ...]:
    """Each engine has a GPU of its own while there are enough. If it needs so many for itself, the first of them is named."""
    import torch

    device = pick_device(wanted)
    count = torch.cuda.device_count() if device == "cuda" else 0
    if 0 < count < engines * gpus_each:
        raise ConfigError(f"--engines {engines}: each needs {gpus_each} GPUs for itself here, and there are {count}")
    return tuple(f"cuda:{index * max(gpus_each, 1) % count}" if count > 1 else device for index in range(engines))


class _Joiner:
    def __init__(self, options: JoinOptions) -> None:
        self._options = options
        self._address = f"tls:{options.url.removeprefix('tls://')}"
        self._processes: dict[tuple[str, int], ChildProcess] = {}
        """By name and incarnation."""
        self._num_closed = 0
        """Times in a row that the launcher closed during the greeting."""
        self._is_over = False
        """The run has ended, or this host has left it."""
        self._has_failed = False
        """A process has, and its log says why."""
        self._prefix = new_prefix()
        self._place = Path(options.folder or tempfile.gettempdir()).absolute()
        self._logs = self._place if options.folder else self._place / f"{self._prefix}-logs"
        self._claim: Claim | None = None
        """Of what is in `_place` while the host is here."""
        self._in_use: list[IO[str] | None] = []
        """Locks of the models in the cache."""
        self._on_parting = contextlib.ExitStack()
        """Removes what this host holds for the launcher that it is with."""

    async def run(self) -> int:
        stop, is_stopped = StopRequest(), asyncio.Event()
        with stop.heard_by(is_stopped.set), contextlib.ExitStack() as on_end:
            on_end.callback(self._clean_up)
            heard_at = time.monotonic()
            while not self._is_over:
                peer = await self._connect()
                if peer is not None:
                    await self._stay(peer, is_stopped)
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > self._options.wait:
                    print(f"no launcher has listened at {self._options.url} for {self._options.wait:g} s", flush=True)
                    return 1
                if not self._is_over and is_stopped.is_set():
                    break
                if not self._is_over:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(is_stopped.wait(), _RETRY_SECONDS)
        return 0

    async def _connect(self) -> Peer | None:
        """None if nobody listens there, or whoever does may just be ending."""
        try:
            stream = await connect(self._address, token=self._options.token, name=platform.node(), channel="host")
        except (PermissionError, StreamClosed) as error:
            self._num_closed += 1
            if isinstance(error, StreamClosed) and self._num_closed < _REFUSALS:
                return None
            refused = f"{self._options.url} refuses this host: it has another token (HEADRACE_TOKEN, --token-file)"
            raise ConfigError(f"{refused}, or another version of headrace ({error})") from error
        except ValueError as error:
            raise ConfigError(f"{self._options.url}: must be [tls://][FINGERPRINT@]HOST:PORT") from error
        except (OSError, TimeoutError):
            self._num_closed = 0
            return None
        self._num_closed = 0
        notices: dict[str, Callable[[Any], None]] = {
            "start": self._start,
            "beat": self._beat,
            "kill": self._kill,
            "end": self._end,
        }
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "ping": self._ping,
            "read": self._read,
            "fetch": self._fetch,
            "remove": self._remove,
        }
        return Peer(stream, calls=calls, notices=notices)

    async def _stay(self, peer: Peer, is_stopped: asyncio.Event) -> None:
        """Join, and serve until the launcher ends or is gone, or this host leaves."""
        self._peer, self._loop = peer, asyncio.get_running_loop()
        reading, stopping = asyncio.ensure_future(peer.run()), asyncio.ensure_future(is_stopped.wait())
        tasks: list[asyncio.Future[Any]] = [reading, stopping]
        try:
            what = {"version": __version__, "protocol": PROTOCOL, "role": self._options.role}
            told = await peer.call("join", timeout=_ANSWER_SECONDS, **what)
            tasks.append(asyncio.ensure_future(self._watch(peer, SILENT_HEARTBEATS * told["heartbeat"])))
            await self._introduce(peer, told)
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                print("leaving the run", flush=True)
                peer.notify("leaving", None)
                self._is_over = True
                await asyncio.wait({reading}, timeout=self._options.grace)
        except (StreamClosed, TimeoutError):
            pass
        except RemoteError as error:
            if error.is_config:
                raise ConfigError(f"{self._options.url} refuses this host: {error.message}") from error
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait({reading})
            peer.stream.close()
            processes = list(self._processes.values())
            self._processes.clear()
            for process in processes:
                process.kill()
            await asyncio.to_thread(lambda: [process.wait() for process in processes])
            await asyncio.to_thread(self._on_parting.close)
        failure = None if reading.cancelled() else reading.exception()
        if failure is not None and not isinstance(failure, StreamClosed):  # it would be the same again
            raise failure

    async def _watch(self, peer: Peer, seconds: float) -> None:
        """A launcher that has not pinged for so long is gone; if its host is, nothing else would close the stream."""
        self._pinged_at = time.monotonic()
        while (left := self._pinged_at + seconds - time.monotonic()) > 0:  # noqa: ASYNC110  (it waits for nothing to happen)
            await asyncio.sleep(left)
        print(f"{self._options.url} has been silent for {seconds:g} s", flush=True)
        peer.stream.close()

    async def _introduce(self, peer: Peer, told: dict[str, Any]) -> None:
        options = self._options
        devices = await asyncio.to_thread(device_names, options.device, options.engines, gpus_each=told["gpus_each"])
        model, lock = await asyncio.to_thread(fetch_model, told["model"], told["files"], read=self._reader())
        self._in_use, frozen = [lock], dict[str, str]()
        for path, files in told["frozen"].items():
            frozen[path], lock = await asyncio.to_thread(fetch_model, path, files, read=self._reader(path))
            self._in_use.append(lock)
        self._place.mkdir(parents=True, exist_ok=True)
        if self._claim is None:
            await asyncio.to_thread(sweep, self._place)
            self._claim = Claim(self._place, self._prefix)
        self._logs.mkdir(mode=0o700, exist_ok=True)
        passing = tempfile.mkdtemp(prefix=f"{self._prefix}-checkpoints-", dir=self._place)
        self._on_parting.callback(shutil.rmtree, passing, ignore_errors=True)
        shared = await asyncio.to_thread(self._share)
        offer = HostOffer(
            host=platform.node(),
            role=options.role,
            label=options.label,
            address=options.address or peer.stream.own_host,
            devices=devices,
            threads=options.threads or max(1, (os.cpu_count() or 1) // options.engines),
            folder=str(self._logs),
            passing=passing,
            shared_folder=str(shared),
            model=model,
            frozen=frozen,
        )
        await peer.call("ready", **{**asdict(offer), "devices": list(offer.devices)})
        print(f"joined {options.url} with {', '.join(offer.devices)}; logs in {self._logs}", flush=True)

    def _clean_up(self) -> None:
        if self._claim is not None:
            self._claim.release(leaves_files=self._has_failed and self._options.folder is None)  # else logs stay anyway

    def _share(self) -> Path:
        """Make a folder in shared memory for this host's engines alone: the launcher, or others that join, may be on this
        machine too. What killed ones have left is removed."""
        place, prefix = shared_folder(), new_prefix()
        sweep(place)
        self._on_parting.callback(Claim(place, prefix).release)
        shared = place / f"{prefix}-joined"
        shared.mkdir(mode=0o700)
        return shared

    def _reader(self, place: str = "") -> Callable[[str, int], Array]:
        """Of files that the launcher has; blocks."""

        def read(name: str, start: int) -> Array:
            asking = self._peer.call("read", name=name, start=start, place=place)
            piece: Array = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
            return piece

        return read

    # What the launcher tells

    async def _ping(self) -> dict[str, float]:
        self._pinged_at = time.monotonic()
        return {"ticks": time.perf_counter(), "time": time.time()}

    async def _read(self, place: str, name: str, start: int) -> Array:
        """A piece of a file that a trainer's rank has saved."""
        return await asyncio.to_thread(read_piece, Path(place) / name, start)

    async def _fetch(self, place: str, files: dict[str, list[int]], copy: str) -> None:
        """Get the files of a checkpoint that a trainer's rank is to load."""
        where = Path(copy) if copy else None
        await asyncio.to_thread(fetch_files, files, Path(place), read=self._reader(place), copy=where)

    async def _remove(self, place: str) -> None:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def _start(self, line: str) -> None:
        order = Order.read(line)
        known = {"name": order.name, "incarnation": order.incarnation}
        try:
            process = ChildProcess(order.name, order.placement)
        except (OSError, ValueError) as error:  # no room for its log, or no descriptor left
            print(f"{order.name} could not be started: {error}", flush=True)
            self._peer.notify("ended", {**known, "status": 1})
            return
        self._processes[order.name, order.incarnation] = process
        process.order(order)
        self._peer.notify("started", {**known, "pid": process.pid})
        threading.Thread(target=self._report_end, args=(self._peer, order, process), daemon=True).start()

    def _report_end(self, peer: Peer, order: Order, process: ChildProcess) -> None:
        status = process.wait()

        def report() -> None:
            if self._processes.pop((order.name, order.incarnation), None) is not None and status:
                self._has_failed = True
            with contextlib.suppress(StreamClosed):
                peer.notify("ended", {"name": order.name, "incarnation": order.incarnation, "status": status})

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(report)

    def _beat(self, told: dict[str, Any]) -> None:
        if process := self._processes.get((told["name"], told["incarnation"])):
            process.beat()

    def _kill(self, told: dict[str, Any]) -> None:
        if process := self._processes.get((told["name"], told["incarnation"])):
            self._has_failed = True  # the launcher has given it up
            process.kill()

    def _end(self, reason: str | None) -> None:
        self._is_over, self._has_failed = True, self._has_failed or reason is not None
        print(f"the run has let this host go{': ' + reason if reason else ''}", flush=True)
        self._peer.stream.close()
