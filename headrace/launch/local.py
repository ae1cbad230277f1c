"""`orchestrate = "local"`: engines and trainer in their own processes on this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.launch.build import make_roles
from headrace.launch.forecast import count_parameters
from headrace.launch.heartbeat import SILENT_HEARTBEATS, send_heartbeats
from headrace.launch.placement import Order, choose_transport, place_on_this_host
from headrace.launch.process import ChildProcess, RoleProcess
from headrace.launch.supervise import Supervisor
from headrace.leftovers import Claim, sweep
from headrace.rpc import Listener, socket_place
from headrace.score import RewardWorkers
from headrace.settings import to_dict
from headrace.sync import TransportConfig, is_pushed, routed, shared_folder, transport_class
from headrace.trainer import RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from types import TracebackType

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.launch.process import ProcessHandle
    from headrace.observe import Observer
    from headrace.records import WeightUpdate
    from headrace.rpc import Stream
    from headrace.run import Roles
    from headrace.sync import Lineage

_GOODBYE_SECONDS = 2.0
"""Processes that have not ended by themselves by then (most take hundredths of a second) are killed."""
_SWITCH_SECONDS = 0.001
"""Thread switch interval: how long a computing reward may block the event loop; Python's default is 0.005."""


class LocalProcesses:
    """A context manager. Entering starts the processes, which import while the launcher prepares, and removes leftovers of
    killed runs on this host; `roles` connects the processes; leaving removes all processes, sockets and shared memory."""

    reporting_roles = ("engine", "trainer")

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self.prefix = f"headrace-{os.getpid()}-{secrets.token_hex(4)}"
        self._shared_folder = shared_folder(recipe.sync.folder)
        self._transport = TransportConfig(
            transport=choose_transport(recipe),
            folder=str(self._shared_folder),
            prefix=self.prefix,
            host=recipe.sync.host,
            token=secrets.token_hex(32),
            deadline=recipe.sync.deadline,
        )
        self._places = dict.fromkeys((self._shared_folder, socket_place()))
        """Folders in which the run makes shared memory and sockets."""
        self._incarnations: Counter[str] = Counter()
        self._started: list[RoleProcess] = []
        self._newest: dict[str, ProcessHandle] = {}
        """Of each name, the incarnation that is sent heartbeats."""
        self._on_exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for place in self._places:
            sweep(place)
        try:
            self.engines = [self.start_process("engine", index) for index in range(self._recipe.engine.num_engines)]
            self.trainer = self.start_process("trainer", 0)
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill_all()
        self._on_exit.close()

    def _kill_all(self) -> None:
        for process in self._started:
            process.handle.kill()
        for process in self._started:
            process.handle.wait()

    def start_process(self, role: str, index: int) -> RoleProcess:
        """Called at the start, and again to restart a lost engine: a new incarnation."""
        name = f"engine-{index}" if role == "engine" else role
        self._incarnations[name] += 1
        placement = place_on_this_host(
            self._recipe, role, index, name=name, run_folder=self._folder, shared_folder=self._shared_folder
        )
        handle, incarnation = ChildProcess(name, placement), self._incarnations[name]
        process = RoleProcess(name, role, handle=handle, placement=placement, index=index, incarnation=incarnation)
        self._started.append(process)
        return process

    async def listen(self) -> None:
        """Accept connections and send heartbeats. The claims keep other runs from removing our sockets and shared memory."""
        self.claims = [Claim(place, self.prefix) for place in self._places]
        for claim in self.claims:
            self._on_exit.callback(claim.release)
        self._listener = await Listener.on_this_host(token=self._transport.token, prefix=self.prefix)
        self._on_exit.callback(self._listener.close)
        self._on_exit.callback(send_heartbeats(self._newest, self._recipe.heartbeat))

    def introduce(self, process: RoleProcess) -> dict[str, asyncio.Future[Stream]]:
        """Send a process its order; return the streams it will open."""
        name, incarnation = process.name, process.incarnation
        channels = ("control", "data") if process.role == "engine" else ("control",)
        arriving = {channel: self._listener.expect(name, channel, incarnation=incarnation) for channel in channels}
        order = Order(
            name=name,
            role=process.role,
            index=process.index,
            incarnation=incarnation,
            placement=process.placement,
            address=self._listener.address,
            transport=self._transport,
            silence=SILENT_HEARTBEATS * self._recipe.heartbeat,
            deadline=self._recipe.deadline,
        )
        process.handle.order(order)
        self._newest[name] = process.handle
        return arriving

    @contextlib.asynccontextmanager
    async def roles(
        self, model_path: str, given: UserInputs, *, observer: Observer, lineage: Lineage, most_blocks: int = 0
    ) -> AsyncIterator[Roles]:
        """Connect all processes and load their models in parallel; the first failure is raised. When the block ends they end by
        themselves; if it was interrupted, `__exit__` kills them."""
        recipe = self._recipe
        weight_bytes = count_parameters(Path(model_path)) * {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
        transport_class(self._transport.transport).check_space(self._transport, weight_bytes)
        build = {
            "recipe": to_dict(recipe),
            "model": model_path,
            "lineage": {"id": lineage.id, "ancestors": lineage.ancestors},
            "most_blocks": most_blocks,
        }
        supervisor = Supervisor(recipe, self, build=build, timelines=observer.mirrored(), say=observer.screen.say)
        try:
            with contextlib.ExitStack() as watching:
                watching.callback(sys.setswitchinterval, sys.getswitchinterval())
                sys.setswitchinterval(_SWITCH_SECONDS)
                watching.callback(supervisor.close)
                log = watching.enter_context((self._folder / "logs" / "launcher.log").open("a"))
                workers = RewardWorkers(recipe.reward.workers, timeout=recipe.reward.timeout, stacks=log)
                watching.callback(workers.close)
                yield await self._connect_all(supervisor, model_path, given, workers)
        except Exception:
            await self._say_goodbye()
            raise
        await self._say_goodbye()

    async def _connect_all(self, supervisor: Supervisor, model_path: str, given: UserInputs, workers: RewardWorkers) -> Roles:
        recipe = self._recipe
        await self.listen()
        trainer = RemoteTrainer(self.trainer, deadline=recipe.deadline)
        delivery = supervisor.pool.delivery
        delivery.source, delivery.patience = TrainerSource(trainer, relays=supervisor.relays), recipe.sync.patience
        starting: list[asyncio.Task[Any]] = [asyncio.ensure_future(supervisor.start_engine(each)) for each in self.engines]
        starting.append(asyncio.ensure_future(supervisor.start_trainer(self.trainer)))
        try:
            roles = make_roles(
                recipe,
                model_path,
                given,
                engine=supervisor.pool,
                trainer=trainer,
                workers=workers,
                services=(supervisor.watch,),
                describe=supervisor.describe,
                versions=lambda: supervisor.pool.versions,
                engine_peak=lambda: supervisor.engine_peak,
                refresh=supervisor.refresh,
            )
            engine, *_ = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            raise
        return roles.with_stop_ids(engine["stop_ids"])

    async def _say_goodbye(self) -> None:
        for process in self._started:
            process.say_goodbye()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*(process.ended.wait() for process in self._started if process.streams))


class TrainerSource:
    """A `WeightSource` over a trainer in another process. `relays`: engine name -> the address at which it relays weights."""

    def __init__(self, trainer: RemoteTrainer, *, relays: Mapping[str, str]) -> None:
        self._trainer, self._relays = trainer, relays

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        return routed(update, [self._relays[name] for name in receivers])

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        if is_pushed(update):
            await self._trainer.send(update, receivers)

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        return await self._trainer.catch_up(version)
