"""`cluster.listen`: a `local` run whose engines may also be on other hosts, which join and leave while it goes on.

What a host offers becomes engines of the run: each gets a placement and an order as a local one does, and joins the pool once
it holds the weights. Another host's clock may differ; its timelines are moved to this one's.

With `engine.count = 0` all engines are on such hosts, and the run starts when the first has joined.

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

from headrace.engine import engine_kind
from headrace.launch.build import frozen_models
from headrace.launch.hosts import Hosts
from headrace.launch.local import LocalProcesses
from headrace.launch.process import RoleFailed
from headrace.launch.settings import read_token
from headrace.launch.stop import StopRequest
from headrace.model import ModelError
from headrace.rpc import Listener, StreamClosed
from headrace.settings import ConfigError
from headrace.sync import transport_class
from headrace.tls import make_certificate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine import RemoteEngine
    from headrace.launch.hosts import Host
    from headrace.launch.process import Place, RoleProcess
    from headrace.rpc import Stream
    from headrace.sync import TransportConfig

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
        self._trainer_hosts: list[Host] = []
        self._has_trainer_news = asyncio.Event()
        """Such a host has come, or none will."""
        self._no_trainer: RoleFailed | None = None
        self.stop = StopRequest()
        """Ends the wait for such hosts, and for the first engine, at once: there is nothing to save."""
        self._posted: dict[str, str] = {}
        """What ranks on several hosts have told each other, to find each other."""
        self._indices = itertools.count(recipe.engines_here)

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
            frozen=[path for path in frozen_models(self._recipe).values() if path],
            gpus_each=engine_kind(self._recipe.engine).gpus_for_itself(self._recipe),
            takes_trainer=self._trains and self._recipe.trainer_joins,
            on_ready=lambda host: loop.call_soon_threadsafe(self._on_ready, host),
            on_leaving=self._on_leaving,
            say=lambda text: loop.call_soon_threadsafe(self._say, text),
        )
        self._url = url = self._hosts.start()
        on_exit.callback(self._hosts.close)
        where = "HEADRACE_TOKEN or --token-file has" if token else f"--token-file {self._folder / 'join.token'} has"
        trainer = "; --role trainer for the trainer" if self._trains and self._recipe.cluster.trainer_joins else ""
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
            place = self.place("engine", next(self._indices), host=host, device=device)
            self._spawn(self._bring_in(place, host))

    async def _bring_in(self, place: Place, host: Host) -> None:
        """Start the engine of a host that joins. If it cannot be, the run goes on and the host is told why."""
        process = self.start_process(place)
        try:
            told = await self.start_engine(process)
        except (RoleFailed, ConfigError, ModelError) as error:
            self._do_without(place, host, error)
            self._say(f"{host.name} could not join: {error}")
        else:
            if not self.first_joined.done():
                self.first_joined.set_result(told)
            version = self.pool.versions.get(place.name, 0)
            self._say(f"{place.name} joined on {host.name} ({process.placement.device}) at version {version}")

    def _on_leaving(self, host: Host) -> None:
        """In the hosts' thread."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._let_go(host)))

    async def _let_go(self, host: Host) -> None:
        """Waits until the host's engines have nothing left to do; a trainer there is lost."""
        engines = [engine for engine in self.pool.engines if engine.name in host.processes]
        for engine in engines:
            self._places[engine.name].is_leaving = True
        await asyncio.gather(*(self.pool.drain(engine, seconds=_LEAVE_SECONDS) for engine in engines))
        host.dismiss()

    def _do_without(self, place: Place, host: Host, error: Exception) -> None:
        """Give an engine up; a host that has no other is told why and leaves."""
        assert place.newest is not None
        place.newest.give_up("could not be started")
        self._forget(place, host)
        if not host.processes:
            host.dismiss(str(error))

    def _forget(self, place: Place, host: Host) -> None:
        place.is_over = True
        host.processes.pop(place.name, None)

    def _engines_elsewhere(self) -> list[Awaitable[dict[str, Any]]]:
        return [self._first_engine()] if self._recipe.engines_join else []

    async def _first_engine(self) -> dict[str, Any]:
        """Waits for an engine to join."""
        deadline = self._recipe.deadline
        try:
            with self.stop.cancels(asyncio.current_task(), at=1):
                return await asyncio.wait_for(asyncio.shield(self.first_joined), deadline)
        except TimeoutError as error:
            raise RoleFailed(f"no engine has joined for {deadline:g} s (deadline)") from error

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
                with self.stop.cancels(asyncio.current_task(), at=1):
                    await asyncio.wait_for(self._has_trainer_news.wait(), until - self._loop.time())
            except TimeoutError as error:
                how = "headrace join --role trainer, and the same command goes on from the newest checkpoint"
                raise RoleFailed(f"{offered}, for {deadline:g} s (deadline): {how}") from error
        if self._no_trainer is not None:
            raise self._no_trainer
        self._posted = {}
        ranks = [self.place("trainer", rank, host=host, device=device) for rank, (host, device) in enumerate(places[:count])]
        self.trainers = [self.start_process(rank) for rank in ranks]
        self._say("\n".join(f"{each.name} on {each.placement.host} ({each.placement.device})" for each in self.trainers))

    def _trainer_places(self) -> list[tuple[Host, str]]:
        self._trainer_hosts = [host for host in self._trainer_hosts if not host.is_gone]
        offers = [(host, host.offer) for host in self._trainer_hosts if host.offer is not None]
        offers.sort(key=lambda each: each[1].address)  # ranks of one host are neighbours; under Ray each joins by itself
        return [(host, device) for host, offer in offers for device in offer.devices]

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

    def _ends_for(self, process: RoleProcess) -> tuple[Listener, TransportConfig]:
        if process.host is None:
            return super()._ends_for(process)
        where, route = process.placement, transport_class(self._transport.transport).between_hosts
        there = dataclasses.replace(self._transport, transport=route, host=where.address, folder=where.shared_folder)
        return self._far_listener, there

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        place, host = process.place, process.host
        if host is None:
            return await super()._replace(process, engine)
        await process.lost.wait()
        if place.is_leaving:
            process.verdict = process.verdict or "has left"
            self.pool.lose(engine)
            self._timelines["engine"].forget(process.name)
            self._forget(place, host)
            self._say(f"{process.name} on {host.name} has left")
            return None
        try:
            await super()._replace(process, engine)
        except (ConfigError, ModelError) as error:  # on that host alone, perhaps: the others go on
            self._give_up(place)
            self._do_without(place, host, error)
            self._say(f"{process.name} on {host.name} is given up: {error}")
        else:
            if place.is_over:
                self._do_without(place, host, RoleFailed(f"{process.name} is given up"))
        return None
