"""`orchestrate = "local"`: engines and trainer in their own processes on this host.

A lost engine is restarted, up to `engine.restarts` times an hour; after that the run goes on with the others. When the trainer
is lost, the launcher starts another from the newest checkpoint (`LocalProcesses.restart_trainer`), and the engines stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.engine import EnginePool, RemoteEngine
from headrace.errors import SyncError
from headrace.launch.build import make_roles
from headrace.launch.forecast import count_parameters
from headrace.launch.heartbeat import SILENT_HEARTBEATS, send_heartbeats
from headrace.launch.hosts import JoinedProcess
from headrace.launch.joined_trainer import JoinedTrainer
from headrace.launch.lent_engine import LentEngine
from headrace.launch.placement import (
    LENT,
    Order,
    choose_device,
    choose_transport,
    lends,
    place_on_joined_host,
    place_on_this_host,
    versions_for_servers,
)
from headrace.launch.process import ChildProcess, Place, RestartBudget, RoleFailed, RoleProcess
from headrace.launch.stop import interrupts_wait
from headrace.launch.trainer_source import TrainerSource
from headrace.launch.watched import WatchedProcesses
from headrace.leftovers import Claim, new_prefix, sweep
from headrace.model import adapter_shapes, bytes_per_number
from headrace.rpc import Listener, RemoteError, StreamClosed, socket_place
from headrace.score import RewardWorkers
from headrace.settings import to_dict
from headrace.sync import TransportConfig, shared_folder, transport_class
from headrace.trainer import RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from headrace.config import Recipe
    from headrace.launch.hosts import Host
    from headrace.launch.inputs import UserInputs
    from headrace.launch.placement import Placement
    from headrace.launch.process import ProcessHandle
    from headrace.observe import Observer
    from headrace.rpc import Stream
    from headrace.run import Roles
    from headrace.sync import Lineage

LENT_NAME = "engine-lent"
_GOODBYE_SECONDS = 2.0
"""Processes that have not ended by themselves by then (most take hundredths of a second) are killed."""
_KILLED_SECONDS = 6.0
"""How long ranks of a lost trainer may take to end: they hold memory that the next ones need. A host reports it within 5."""
_RESTART_WINDOW = 3600.0
"""Seconds after which a restart of an engine no longer counts."""
_SWITCH_SECONDS = 0.001
"""Thread switch interval: how long a computing reward may block the event loop; Python's default is 0.005."""


class LocalProcesses(WatchedProcesses):
    """A context manager. Entering starts the processes, which import while the launcher prepares, and removes leftovers of
    killed runs on this host; `roles` connects the processes; leaving removes all processes, sockets and shared memory."""

    reporting_roles = ("engine", "trainer")
    _can_wait_for_engines = False
    """Whether others may come when the last is lost."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        """Without a trainer unless it `trains`."""
        super().__init__(heartbeat=recipe.heartbeat)
        self._recipe, self._folder, self._trains = recipe, folder, trains
        self.prefix = new_prefix()
        self._shared_folder = shared_folder(recipe.sync.folder)
        self._transport = TransportConfig(
            transport=choose_transport(recipe),
            folder=str(self._shared_folder),
            prefix=self.prefix,
            host=recipe.sync.host,
            token=secrets.token_hex(32),
            deadline=recipe.sync.deadline,
        )
        self._common_folders = dict.fromkeys((self._shared_folder, socket_place()))
        """Folders in which the run makes shared memory and sockets."""
        self._places: dict[str, Place] = {}
        """By name: all engines and ranks there were."""
        self._on_exit = contextlib.ExitStack()
        self.pool = EnginePool()
        self._relays: dict[str, str] = {}
        """Engine name -> the address at which it relays weights, or ""."""
        budget = partial(RestartBudget, "engine.restarts", recipe.engine.restarts, window=_RESTART_WINDOW)
        self._restarts = defaultdict[str, RestartBudget](budget)
        """Of each engine."""
        self._lender = LentEngine(self.pool, LENT_NAME) if trains and lends(recipe) else None
        self._given_up: list[str] = []
        """Engines whose restarts are spent."""
        self._build: dict[str, Any] = {}
        """Arguments of each process's `build` call."""
        self._stop_ids: list[int] = []
        self.trainers: list[RoleProcess] = []
        """One for each rank."""
        self._lost_trainer: RoleProcess | None = None
        """The first of them that was lost: the others follow it."""
        self._say: Callable[[str], None] = print

    def __enter__(self) -> Self:
        for place in self._common_folders:
            sweep(place)
        try:
            indices = [*range(self._recipe.engines_here), *([] if self._lender is None else [LENT])]
            with interrupts_wait():
                self.engines = [self.start_process(self.place("engine", index)) for index in indices]
                if self._trains and not self._recipe.trainer_joins:
                    self.trainers = self._start_trainers()
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._kill_all()
        self._on_exit.close()

    def _kill_all(self) -> None:
        for process in self._started:
            process.handle.kill()
        for process in self._started:
            process.handle.wait()

    # Start

    def place(self, role: str, index: int, *, host: Host | None = None, device: str = "") -> Place:
        """Of that number, now there."""
        is_one_of_several = role == "engine" or self._recipe.train.parallel.is_on
        name = LENT_NAME if index == LENT else f"{role}-{index}" if is_one_of_several else role
        place = self._places.setdefault(name, Place(name, role, index))
        place.host, place.device = host, device
        return place

    def start_process(self, place: Place) -> RoleProcess:
        """Called at the start, and again to restart a lost process: a new incarnation."""
        place.incarnation += 1
        handle, placement = self._begin(place)
        place.newest = RoleProcess(place, handle=handle, placement=placement)
        self._started = [*(each for each in self._started if not each.ended.is_set()), place.newest]
        return place.newest

    def _begin(self, place: Place) -> tuple[ProcessHandle, Placement]:
        if place.host is not None:
            placement = place_on_joined_host(self._recipe, place, place.host)
            return JoinedProcess(place.name, place.host, incarnation=place.incarnation), placement
        placement = place_on_this_host(self._recipe, place, run_folder=self._folder, shared_folder=self._shared_folder)
        return ChildProcess(place.name, placement), placement

    async def listen(self) -> None:
        """Accept connections and send heartbeats. The claims keep other runs from removing our sockets and shared memory."""
        self.claims = [Claim(place, self.prefix) for place in self._common_folders]
        for claim in self.claims:
            self._on_exit.callback(claim.release)
        self._listener = await Listener.on_this_host(token=self._transport.token, prefix=self.prefix)
        self._on_exit.callback(self._listener.close)
        self._on_exit.callback(send_heartbeats(self._ordered, self._recipe.heartbeat))

    def _ordered(self) -> list[ProcessHandle]:
        return [each.handle for each in self._started if each.has_order]

    def introduce(self, process: RoleProcess) -> dict[str, asyncio.Future[Stream]]:
        """Send a process its order; return the streams it will open."""
        name, incarnation = process.name, process.incarnation
        channels = ("control", "data") if process.role == "engine" else ("control",)
        listener, transport = self._ends_for(process)
        arriving = {channel: listener.expect(name, channel, incarnation=incarnation) for channel in channels}
        order = Order(
            name=name,
            role=process.role,
            index=process.index,
            incarnation=incarnation,
            placement=process.placement,
            address=listener.address,
            transport=transport,
            silence=SILENT_HEARTBEATS * self._recipe.heartbeat,
            deadline=self._recipe.deadline,
            import_path=[entry or os.getcwd() for entry in sys.path],
        )
        process.handle.order(order)
        process.has_order = True
        return arriving

    def _ends_for(self, process: RoleProcess) -> tuple[Listener, TransportConfig]:
        """Where a process connects, and how it gets weights."""
        return self._listener, self._transport

    @contextlib.asynccontextmanager
    async def roles(
        self, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
    ) -> AsyncIterator[Roles]:
        """Connect all processes and load their models in parallel; the first failure is raised. When the block ends they end by
        themselves; if it was interrupted, they are killed."""
        recipe = self._recipe
        adapter = adapter_shapes(recipe.model, recipe.lora) if recipe.lora.is_on else {}
        num_sent = sum(map(math.prod, adapter.values())) or count_parameters(Path(model_path))
        weight_bytes = num_sent * bytes_per_number(recipe.model.dtype)
        for_servers = versions_for_servers(recipe, device=choose_device(recipe))
        transport_class(self._transport.transport).check_space(self._transport, weight_bytes, beside=for_servers)
        self._build = {"recipe": to_dict(recipe), "model": model_path, "most_blocks": most_blocks, "meeting": ""}
        self._serve(observer, lineage)
        try:
            with contextlib.ExitStack() as watching:
                watching.callback(sys.setswitchinterval, sys.getswitchinterval())
                sys.setswitchinterval(_SWITCH_SECONDS)
                watching.callback(self._cancel_tasks)
                log = watching.enter_context((self._folder / "logs" / "launcher.log").open("a"))
                reward = recipe.reward
                workers = RewardWorkers(reward.workers, timeout=reward.timeout, stacks=log, num_processes=reward.processes)
                watching.callback(workers.close)
                yield await self._connect_all(model_path, given, workers)
        except Exception:
            await self._say_goodbye()
            raise
        except BaseException:  # interrupted: `asyncio.run` may yet wait for a thread that writes a checkpoint
            self._kill_all()
            raise
        await self._say_goodbye()

    def _serve(self, observer: Observer, lineage: Lineage) -> None:
        """Report to this observer; processes started from now on are of this lineage."""
        self._build["lineage"] = {"id": lineage.id, "ancestors": lineage.ancestors}
        self._timelines, self._say = observer.mirrored(), observer.screen.say

    async def _connect_all(self, model_path: str, given: UserInputs, workers: RewardWorkers) -> Roles:
        recipe = self._recipe
        await self.listen()
        self.pool.delivery.patience, self.pool.delivery.deadline = recipe.sync.patience, recipe.sync.deadline
        self.pool.delivery.say = lambda text: self._say(text)
        self._make_roles = partial(
            make_roles,
            recipe,
            model_path,
            given,
            engine=self.pool,
            workers=workers,
            services=(self._watch,),
            log=self._folder / "logs" / "environment.log",
            describe=self._describe,
            versions=lambda: self.pool.versions,
            turns=lambda: self.pool.turns,
            engine_peak=lambda: self._engine_peak,
            refresh=self._refresh,
            lender=self._lender,
            losses=self._losses,
        )
        starting: list[asyncio.Task[Any]] = [asyncio.ensure_future(self.start_engine(each)) for each in self.engines]
        try:
            if self._trains:
                await self._place_trainers()
                starting += [asyncio.ensure_future(self._start(rank)) for rank in self.trainers]
            roles = self._roles_with(self.trainers) if self._trains else self._make_roles(trainer=None)
            engine, *_ = await asyncio.gather(*self._engines_elsewhere(), *starting)
        except BaseException:
            for task in starting:
                task.cancel()
            raise
        self._stop_ids = engine["stop_ids"]
        return roles.with_stop_ids(self._stop_ids)

    def _engines_elsewhere(self) -> list[Awaitable[dict[str, Any]]]:
        """Answers of engines to wait for before the run starts, if none is on this host."""
        return []

    def _start_trainers(self) -> list[RoleProcess]:
        return [self.start_process(self.place("trainer", rank)) for rank in range(self._recipe.train.parallel.ranks)]

    async def _place_trainers(self) -> None:
        """Start the trainer's ranks, if they are not. They find each other at a new place at each start, which no rank of an
        earlier one knows."""
        self.trainers = self.trainers or self._start_trainers()
        assert self._listener.folder is not None
        self._build["meeting"] = f"file://{self._listener.folder / f'ranks-{self.trainers[0].incarnation}'}"

    def _roles_with(self, ranks: Sequence[RoleProcess]) -> Roles:
        """Everything the launcher keeps itself starts anew: tasks, scorer, encoder."""
        kind = RemoteTrainer if ranks[0].host is None else JoinedTrainer
        trainer = kind(ranks, deadline=self._recipe.deadline)
        self.pool.delivery.source = TrainerSource(trainer, relays=self._relays)
        return self._make_roles(trainer=trainer)

    async def restart_trainer(self, *, observer: Observer, lineage: Lineage) -> Roles:
        """Start a trainer in place of a lost one, for another session: all its ranks, if one is lost. The engines stay, idle,
        until it publishes: no generate call is in flight any more. What the lost one left in shared memory is removed."""
        lost, self.trainers, self._lost_trainer = self.trainers, [], None
        for rank in lost:
            rank.give_up("was lost")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_SECONDS):
                await asyncio.gather(*(rank.ended.wait() for rank in lost))
        for path in self._shared_folder.glob(f"{self.prefix}-*"):
            if path.is_file():  # engines have folders there
                path.unlink(missing_ok=True)
        self.pool.delivery.forget()
        if self._lender is not None:
            await self._lender.recall()
        if self._failure is None:  # otherwise the last engine is lost too, and `_watch` ends the next session
            self._has_failed.clear()
        self._serve(observer, lineage)
        await self._place_trainers()
        starting = [asyncio.ensure_future(self._start(rank)) for rank in self.trainers]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        if self._recipe.engine.sleeps:
            await self.pool.wake()
        await self.pool.resume()
        return self._roles_with(self.trainers).with_stop_ids(self._stop_ids)

    async def _say_goodbye(self) -> None:
        for process in self._started:
            process.say_goodbye()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*(process.ended.wait() for process in self._started if process.streams))

    async def start_engine(self, process: RoleProcess, *, is_first: bool = True) -> dict[str, Any]:
        """Start an engine and return its `build` answer. If its process ends meanwhile, it is restarted within its budget. A
        first start that raises or hangs is not: the next would too."""
        while True:
            try:
                return await self._start(process)
            except RoleFailed as error:
                if is_first and (process.verdict or not process.lost.is_set()):
                    raise
                process.give_up("could not be started")
                process = await self._start_again(process, error)

    async def _start_again(self, process: RoleProcess, error: RoleFailed) -> RoleProcess:
        """A new process in place of a lost engine, after a pause; raises `error` if its budget is spent or its host is gone."""
        if process.host is not None:
            await process.ended.wait()  # it may hold its GPU's memory until then
            if process.host.is_gone:
                raise error
        budget = self._restarts[process.name]
        seconds = budget.spend(error)
        self._say(f"{error}\n  it is started again ({budget.num_spent} of {budget.most}) in {seconds:.0f} s")
        await asyncio.sleep(seconds)
        return self.start_process(process.place)

    async def _start(self, process: RoleProcess) -> dict[str, Any]:
        """Connect a process, build its role and watch it; an engine joins the pool. Errors name the process and its log."""
        deadline = self._recipe.deadline
        try:
            arriving = await self._connect(process)
            told: dict[str, Any] = await process.control.call("build", timeout=deadline, **self._build)
            if process.role == "engine":
                await self._join(process, arriving["data"], relay=told["relay"])
            else:
                self._spawn(self._on_lost_trainer(process))
        except TimeoutError as error:
            process.give_up(f"has been loading its model for {deadline:g} s (deadline)")
            raise await process.explain() from error
        except StreamClosed as error:
            raise await process.explain() from error
        except RemoteError as error:
            raise process.failed(error) from error
        except SyncError as error:
            raise RoleFailed(f"{process.name} was not brought to the weights: {error}\n  log {process.log}") from error
        return told

    async def _connect(self, process: RoleProcess) -> dict[str, asyncio.Future[Stream]]:
        process.watch_end()
        arriving = self.introduce(process)
        control = await process.open(
            "control", arriving["control"], deadline=self._recipe.deadline, notices=self._notices(process)
        )
        self._spawn(process.read(control))
        self._spawn(self._keep_pinging(process))
        return arriving

    def _notices(self, process: RoleProcess) -> dict[str, Callable[[Any], None]]:
        """What a process may tell over its control stream."""
        return {}

    async def _join(self, process: RoleProcess, data: asyncio.Future[Stream], *, relay: str) -> None:
        def report(_: str, told: dict[str, Any]) -> None:
            self._take_report(process, told)

        more: dict[str, Any] = {"log": process.log, "clock_ahead": 0.0 if process.host is None else process.host.wall.seconds}
        engine = RemoteEngine(process.name, self.pool, control=process.control, on_report=report, **more)
        engine.data = await process.open("data", data, deadline=self._recipe.deadline, notices=engine.notices())
        self._spawn(process.read(engine.data))
        self._relays[process.name] = relay
        if process.index == LENT and self._lender is not None:
            await self._lender.take(engine)
        else:
            await self.pool.join(engine)
        self._spawn(self._replace(process, engine))

    # Watch

    async def _watch(self) -> None:
        """Waits for a failure that no restart of an engine fixes, and raises it."""
        await self._has_failed.wait()
        assert self._failure is not None or self._lost_trainer is not None
        raise self._failure or await (self._lost_trainer or self.trainers[0]).explain()

    async def _on_lost_trainer(self, trainer: RoleProcess) -> None:
        """Waits for a trainer's process to be lost; ends the session then. Engines that join or catch up just now do so without
        it."""
        await trainer.lost.wait()
        self._timelines["trainer"].forget(trainer.name)
        if trainer in self.trainers:  # else it is given up because another rank was lost
            self._lost_trainer = self._lost_trainer or trainer
            self.pool.delivery.forget()
            self._has_failed.set()

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        """Waits for an engine to be lost; restarts it then, or goes on without it while others are left."""
        await process.lost.wait()
        error = await process.explain()
        process.give_up("was lost")
        self.pool.lose(engine)
        self._timelines["engine"].forget(process.name)
        if not isinstance(error, RoleFailed):  # a setting or the model, and no restart changes it
            raise error
        try:
            await self.start_engine(await self._start_again(process, error), is_first=False)
            self._say(f"{process.name} is back")
        except RoleFailed as spent:
            self._give_up(process.place)
            if process.index == LENT:
                self._say(f"{spent}\n  the run goes on, and nothing is lent")
                return
            engines = [each for each in self._places.values() if each.role == "engine" and each.index != LENT]
            left = sum(not each.is_over for each in engines)
            lost = sum(each.name in self._given_up for each in engines)
            if not left and not self._can_wait_for_engines:
                raise
            self._say(f"{spent}\n  the run goes on with {left} of {left + lost} engines")

    def _give_up(self, place: Place) -> None:
        place.is_over = True
        self._given_up.append(place.name)

    def _losses(self) -> dict[str, Any]:
        """For the summary."""
        restarts = {name: place.incarnation - 1 for name, place in self._places.items() if place.incarnation > 1}
        return {"restarts": restarts, "engines_given_up": list(self._given_up)}
