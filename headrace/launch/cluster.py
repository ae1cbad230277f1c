"""`cluster.listen`: a `local` run whose engines may also be on other hosts, which join and leave while it goes on.

What a host offers becomes engines of the run: each gets a placement and an order as a local one does, and joins the pool once
it holds the weights. Another host's clock may differ; its timelines are moved to this one's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import secrets
from typing import TYPE_CHECKING, Any

from headrace.launch.hosts import Hosts, JoinedProcess
from headrace.launch.local import LocalProcesses
from headrace.launch.placement import Placement
from headrace.launch.process import RoleFailed, RoleProcess
from headrace.launch.settings import read_token
from headrace.model import ModelError
from headrace.rpc import Listener
from headrace.settings import ConfigError
from headrace.sync import transport_class
from headrace.tls import make_certificate

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine import RemoteEngine
    from headrace.launch.hosts import Host
    from headrace.sync import TransportConfig

_LEAVE_SECONDS = 20.0
"""How long the engines of a host that leaves may finish what they generate."""


class ClusterProcesses(LocalProcesses):
    """Trainer and `engine.count` engines on this host, and those of every host that joins."""

    _can_wait_for_engines = True
    first_joined: asyncio.Future[dict[str, Any]]
    """What the first engine on another host has said of itself."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        super().__init__(recipe, folder, trains=trains)
        self._certificate = make_certificate()
        self._transport = dataclasses.replace(self._transport, host=recipe.cluster.reached_at, certificate=self._certificate)
        self._host_of: dict[int, Host] = {}
        """By the index of each engine that is on another host."""
        self._devices: dict[int, str] = {}
        """Likewise, on that host."""
        self._indices = itertools.count(recipe.engine.num_engines)
        self._left: set[str] = set()
        """Engines that leave, or have left, as they said they would."""

    async def listen(self) -> None:
        await super().listen()
        cluster, on_exit = self._recipe.cluster, self._on_exit
        loop = self._loop = asyncio.get_running_loop()
        self._far_listener = await Listener.between_hosts(
            cluster.host, token=self._transport.token, certificate=self._certificate, address=cluster.reached_at
        )
        on_exit.callback(self._far_listener.close)
        token = read_token(cluster.token_file, setting="cluster.token_file")
        self._token, self.first_joined = token or self._make_token(), loop.create_future()
        self._hosts = Hosts(
            cluster,
            token=self._token,
            certificate=self._certificate,
            heartbeat=self._recipe.heartbeat,
            model=self._build["model"],
            on_ready=lambda host: loop.call_soon_threadsafe(self._on_ready, host),
            on_leaving=self._on_leaving,
            say=lambda text: loop.call_soon_threadsafe(self._say, text),
        )
        self._url = url = self._hosts.start()
        on_exit.callback(self._hosts.close)
        where = "HEADRACE_TOKEN or --token-file has" if token else f"--token-file {self._folder / 'join.token'} has"
        self._say(f"join       headrace join {url}, where {where} the token")

    def _make_token(self) -> str:
        """Put a new token into the run's folder, where only this user may read it."""
        token, path = secrets.token_hex(32), self._folder / "join.token"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        self._on_exit.callback(path.unlink, missing_ok=True)
        return token

    # Hosts come and go

    def _on_ready(self, host: Host) -> None:
        assert host.offer is not None
        for device in host.offer.devices:
            index = next(self._indices)
            self._restarts[index], self._host_of[index], self._devices[index] = self._restart_budget(), host, device
            self._spawn(self._bring_in(self.start_process("engine", index)))

    async def _bring_in(self, process: RoleProcess) -> None:
        """Start the engine of a host that joins. If it cannot be, the run goes on and the host is told why."""
        host = self._host_of[process.index]
        try:
            told = await self.start_engine(process)
        except (RoleFailed, ConfigError, ModelError) as error:
            self._do_without(process, error)
            self._say(f"{host.name} could not join: {error}")
        else:
            if not self.first_joined.done():
                self.first_joined.set_result(told)
            version = self.pool.versions.get(process.name, 0)
            self._say(f"{process.name} joined on {host.name} ({process.placement.device}) at version {version}")

    def _on_leaving(self, host: Host) -> None:
        """In the hosts' thread."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._let_go(host)))

    async def _let_go(self, host: Host) -> None:
        """Waits until the host's engines have nothing left to do."""
        engines = [engine for engine in self.pool.engines if engine.name in host.processes]
        self._left |= {engine.name for engine in engines}
        await asyncio.gather(*(self.pool.drain(engine, seconds=_LEAVE_SECONDS) for engine in engines))
        host.dismiss()

    def _do_without(self, process: RoleProcess, error: Exception) -> None:
        """Give an engine up; a host that has no other is told why and leaves."""
        host = self._host_of[process.index]
        self._connected.get(process.name, process).give_up("could not be started")  # it may have been started again
        self._forget(process)
        if not host.processes:
            host.dismiss(str(error))

    def _forget(self, process: RoleProcess) -> None:
        self._restarts.pop(process.index, None)
        host = self._host_of.pop(process.index)
        host.processes.pop(process.name, None)
        self._connected.pop(process.name, None)
        self._newest.pop(process.name, None)

    # What differs for their engines

    def start_process(self, role: str, index: int) -> RoleProcess:
        host = self._host_of.get(index) if role == "engine" else None
        if host is None:
            return super().start_process(role, index)
        offer, name = host.offer, f"engine-{index}"
        assert offer is not None
        self._incarnations[name] += 1
        device = self._recipe.device if self._recipe.device == "cpu" else self._devices[index]
        placement = Placement(
            host=offer.host,
            address=offer.address,
            device=device,
            receives_on=device,
            threads=self._recipe.engine.threads or self._recipe.threads or offer.threads,
            run_folder=offer.folder,
            log=f"{offer.folder}/{name}.log",
            shared_folder=offer.shared_folder,
            model=offer.model,
        )
        incarnation = self._incarnations[name]
        handle = JoinedProcess(name, host, incarnation=incarnation)
        process = RoleProcess(name, role, handle=handle, placement=placement, index=index, incarnation=incarnation)
        self._started = [*(each for each in self._started if not each.ended.is_set()), process]
        return process

    def _ends_for(self, process: RoleProcess) -> tuple[Listener, TransportConfig]:
        if process.index not in self._host_of or process.role != "engine":
            return super()._ends_for(process)
        place, route = process.placement, transport_class(self._transport.transport).between_hosts
        there = dataclasses.replace(self._transport, transport=route, host=place.address, folder=place.shared_folder)
        return self._far_listener, there

    def _clock_ahead(self, process: RoleProcess) -> float:
        host = self._host_of.get(process.index)
        return super()._clock_ahead(process) if host is None else host.wall.seconds

    def _take_report(self, process: RoleProcess, report: dict[str, Any]) -> None:
        host = self._host_of.get(process.index) if process.role == "engine" else None
        if host is not None and (ahead := host.ticks.seconds):
            report = {**report, "slices": [[start - ahead, stop - ahead, *more] for start, stop, *more in report["slices"]]}
        super()._take_report(process, report)

    async def _start_again(self, process: RoleProcess, error: RoleFailed) -> RoleProcess:
        host = self._host_of.get(process.index)
        if host is not None:
            await process.ended.wait()  # it may hold its GPU's memory until then
            if host.is_gone:
                raise error
        return await super()._start_again(process, error)

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        if process.index not in self._host_of:
            return await super()._replace(process, engine)
        await process.lost.wait()
        host = self._host_of[process.index]
        if process.name in self._left:
            process.verdict = process.verdict or "has left"
            self.pool.lose(engine)
            self._timelines["engine"].forget(process.name)
            self._forget(process)
            self._say(f"{process.name} on {host.name} has left")
            return None
        try:
            await super()._replace(process, engine)
        except (ConfigError, ModelError) as error:  # on that host alone, perhaps: the others go on
            self._given_up.append(process.name)
            self._do_without(process, error)
            self._say(f"{process.name} on {host.name} is given up: {error}")
        else:
            if process.index not in self._restarts:  # it is not back
                self._forget(process)
        return None
