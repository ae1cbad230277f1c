"""`cluster.listen`: a `local` run whose engines may also be on other hosts, which join and leave while it goes on.

What a host offers becomes engines of the run: each gets a placement and an order as a local one does, and joins the pool once
it holds the weights. Another host's clock may differ; its timelines are moved to this one's.

With `cluster.trainer_joins` the trainer's ranks are on hosts that join with `--role trainer`. All ranks start together, on the
first places offered; when one is lost, they start again on the places that are there then.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.launch.hosts import Hosts, JoinedProcess
from headrace.launch.joined_trainer import JoinedTrainer
from headrace.launch.local import LocalProcesses
from headrace.launch.placement import Placement
from headrace.launch.process import RoleFailed, RoleProcess
from headrace.launch.settings import read_token
from headrace.model import ModelError
from headrace.rpc import Listener, StreamClosed
from headrace.settings import ConfigError
from headrace.sync import transport_class
from headrace.tls import make_certificate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine import RemoteEngine
    from headrace.launch.hosts import Host
    from headrace.rpc import Stream
    from headrace.sync import TransportConfig
    from headrace.trainer import RemoteTrainer

_LEAVE_SECONDS = 20.0
"""How long the engines of a host that leaves may finish what they generate."""


class ClusterProcesses(LocalProcesses):
    """`engine.count` engines on this host, those of every host that joins, and the trainer on either."""

    _can_wait_for_engines = True
    first_joined: asyncio.Future[dict[str, Any]]
    """What the first engine on another host has said of itself."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        super().__init__(recipe, folder, trains=trains)
        self._certificate = make_certificate()
        self._transport = dataclasses.replace(self._transport, host=recipe.cluster.reached_at, certificate=self._certificate)
        self._host_of: dict[str, Host] = {}
        """By the name of each process that is on another host."""
        self._devices: dict[str, str] = {}
        """Likewise, on that host."""
        self._trainer_hosts: list[Host] = []
        self._has_trainer_news = asyncio.Event()
        """Such a host has come, or none will."""
        self._no_trainer: RoleFailed | None = None
        self._posted: dict[str, str] = {}
        """What ranks on several hosts have told each other, to find each other."""
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
            takes_trainer=self._trains and self._recipe.trainer_joins,
            on_ready=lambda host: loop.call_soon_threadsafe(self._on_ready, host),
            on_leaving=self._on_leaving,
            say=lambda text: loop.call_soon_threadsafe(self._say, text),
        )
        self._url = url = self._hosts.start()
        on_exit.callback(self._hosts.close)
        where = "HEADRACE_TOKEN or --token-file has" if token else f"--token-file {self._folder / 'join.token'} has"
        trainer = "; --role trainer for the trainer" if self._recipe.cluster.trainer_joins else ""
        self._say(f"join       headrace join {url}, where {where} the token{trainer}")

    def _kill_all(self) -> None:
        for host in self._trainer_hosts:
            host.dismiss()  # ends a checkpoint on its way, for whose thread an interrupted run would wait
        super()._kill_all()

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
        if host.offer.role == "trainer":
            self._trainer_hosts.append(host)
            return self._has_trainer_news.set()
        for device in host.offer.devices:
            index = next(self._indices)
            name = self._name_of("engine", index)
            self._restarts[index], self._host_of[name], self._devices[name] = self._restart_budget(), host, device
            self._spawn(self._bring_in(self.start_process("engine", index)))

    async def _bring_in(self, process: RoleProcess) -> None:
        """Start the engine of a host that joins. If it cannot be, the run goes on and the host is told why."""
        host = self._host_of[process.name]
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
        """Waits until the host's engines have nothing left to do; a trainer there is lost."""
        engines = [engine for engine in self.pool.engines if engine.name in host.processes]
        self._left |= {engine.name for engine in engines}
        await asyncio.gather(*(self.pool.drain(engine, seconds=_LEAVE_SECONDS) for engine in engines))
        host.dismiss()

    def _do_without(self, process: RoleProcess, error: Exception) -> None:
        """Give an engine up; a host that has no other is told why and leaves."""
        host = self._host_of[process.name]
        self._connected.get(process.name, process).give_up("could not be started")  # it may have been started again
        self._forget(process)
        if not host.processes:
            host.dismiss(str(error))

    def _forget(self, process: RoleProcess) -> None:
        self._restarts.pop(process.index, None)
        host = self._host_of.pop(process.name)
        host.processes.pop(process.name, None)
        self._connected.pop(process.name, None)
        self._newest.pop(process.name, None)

    # A trainer on them

    async def _place_trainers(self) -> None:
        """Waits for hosts that offer enough ranks."""
        if not self._recipe.trainer_joins:
            return await super()._place_trainers()
        count, deadline = self._recipe.train.parallel.ranks, self._recipe.deadline
        until = self._loop.time() + deadline
        while len(places := self._trainer_places()) < count and self._no_trainer is None:
            self._has_trainer_news.clear()
            offered = f"hosts offer {len(places)} of the trainer's {count} ranks"
            self._say(f"waiting    {offered}")
            try:
                await asyncio.wait_for(self._has_trainer_news.wait(), until - self._loop.time())
            except TimeoutError as error:
                how = "headrace join --role trainer, and the same command goes on from the newest checkpoint"
                raise RoleFailed(f"{offered}, for {deadline:g} s (deadline): {how}") from error
        if self._no_trainer is not None:
            raise self._no_trainer
        for rank, (host, device) in enumerate(places[:count]):
            name = self._name_of("trainer", rank)
            self._host_of[name], self._devices[name] = host, device
        self._posted = {}
        self.trainers = self._start_trainers()
        self._say("\n".join(f"{each.name} on {each.placement.host} ({each.placement.device})" for each in self.trainers))

    def _trainer_places(self) -> list[tuple[Host, str]]:
        self._trainer_hosts = [host for host in self._trainer_hosts if not host.is_gone]
        offers = [(host, host.offer) for host in self._trainer_hosts if host.offer is not None]
        offers.sort(key=lambda each: each[1].address)  # ranks of one host are neighbours; under Ray each joins by itself
        return [(host, device) for host, offer in offers for device in offer.devices]

    def _make_trainer(self, ranks: Sequence[RoleProcess]) -> RemoteTrainer:
        if not self._recipe.trainer_joins:
            return super()._make_trainer(ranks)
        hosts = [self._host_of[rank.name] for rank in ranks]
        return JoinedTrainer(ranks, hosts=hosts, deadline=self._recipe.deadline)

    def _notices(self, process: RoleProcess) -> dict[str, Callable[[Any], None]]:
        return {"post": partial(self._pass_on, process)} if process.role == "trainer" else {}

    def _pass_on(self, sender: RoleProcess, told: dict[str, str]) -> None:
        """Tell the other ranks what one says of where it is; those that are not connected yet hear it then."""
        if sender not in self.trainers:  # of an earlier start
            return
        self._posted[told["key"]] = told["value"]
        for rank in self.trainers:
            if rank is not sender:
                with contextlib.suppress(StreamClosed):
                    rank.control.notify("post", told)

    async def _connect(self, process: RoleProcess) -> dict[str, asyncio.Future[Stream]]:
        arriving = await super()._connect(process)
        for key, value in self._posted.items() if process.role == "trainer" else ():
            process.control.notify("post", {"key": key, "value": value})
        return arriving

    # What differs for their processes

    def start_process(self, role: str, index: int) -> RoleProcess:
        name = self._name_of(role, index)
        host = self._host_of.get(name)
        if host is None:
            return super().start_process(role, index)
        offer, recipe = host.offer, self._recipe
        assert offer is not None
        self._incarnations[name] += 1
        device = recipe.device if recipe.device == "cpu" else self._devices[name]
        threads = recipe.engine.threads if role == "engine" else recipe.train.threads
        placement = Placement(
            host=offer.host,
            address=offer.address,
            device=device,
            receives_on=device,
            threads=threads or recipe.threads or offer.threads,
            run_folder=offer.passing,
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
        if process.name not in self._host_of:
            return super()._ends_for(process)
        place, route = process.placement, transport_class(self._transport.transport).between_hosts
        there = dataclasses.replace(self._transport, transport=route, host=place.address, folder=place.shared_folder)
        return self._far_listener, there

    def _clock_ahead(self, process: RoleProcess) -> float:
        host = self._host_of.get(process.name)
        return super()._clock_ahead(process) if host is None else host.wall.seconds

    def _take_report(self, process: RoleProcess, report: dict[str, Any]) -> None:
        host = self._host_of.get(process.name)
        if host is not None and (ahead := host.ticks.seconds):
            report = {**report, "slices": [[start - ahead, stop - ahead, *more] for start, stop, *more in report["slices"]]}
        super()._take_report(process, report)

    async def _start_again(self, process: RoleProcess, error: RoleFailed) -> RoleProcess:
        host = self._host_of.get(process.name)
        if host is not None:
            await process.ended.wait()  # it may hold its GPU's memory until then
            if host.is_gone:
                raise error
        return await super()._start_again(process, error)

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        if process.name not in self._host_of:
            return await super()._replace(process, engine)
        await process.lost.wait()
        host = self._host_of[process.name]
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
                self._do_without(process, RoleFailed(f"{process.name} is given up"))
        return None
