"""Watches the processes of a run: a lost engine is restarted, a lost trainer ends the run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine import EnginePool, RemoteEngine
from headrace.errors import SyncError
from headrace.launch.process import PING_GRACE_SECONDS, RoleFailed
from headrace.model import ModelError
from headrace.rpc import RemoteError, StreamClosed
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headrace.config import Recipe
    from headrace.launch.process import RoleProcess
    from headrace.observe import MirroredTimeline
    from headrace.rpc import Stream


class ProcessStarter(Protocol):
    """Starts processes and tells them how to connect; implemented by `LocalProcesses`."""

    def start_process(self, role: str, index: int) -> RoleProcess:
        """Called at the start, and again to restart a lost engine: a new incarnation."""

    def introduce(self, process: RoleProcess, *channels: str) -> dict[str, asyncio.Future[Stream]]:
        """Send a process its order; return the streams it will open."""

    def build_arguments(self, process: RoleProcess) -> dict[str, Any]:
        """Arguments of its `build` call."""


class Supervisor:
    """Connects and watches processes, restarts engines, and raises from `watch` what a restart cannot fix."""

    def __init__(
        self, recipe: Recipe, starter: ProcessStarter, *, timelines: dict[str, MirroredTimeline], say: Callable[[str], None]
    ) -> None:
        self._recipe, self._starter, self._timelines, self._say = recipe, starter, timelines, say
        self._processes: dict[str, RoleProcess] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.pool = EnginePool()
        self.relays: dict[str, str] = {}
        """Engine name -> the address at which it relays weights, or ""."""
        self.num_restarts = 0
        self.engine_peak = 0
        """Peak memory in bytes reported by any engine, lost ones included."""

    async def watch(self) -> None:
        """Waits for a failure that no restart fixes, and raises it."""
        await asyncio.shield(self._failure)

    def describe(self) -> str:
        """Each process, its last reported activity, and its log."""
        lines = (
            f"\n  {each.name} ({each.handle.describe()}): {each.doing}, log {each.log}" for each in self._processes.values()
        )
        return "".join(lines)

    async def refresh(self) -> None:
        """Request every process's timeline now; one that does not answer keeps its last."""
        processes = list(self._processes.values())
        await asyncio.gather(*(each.ping(self._on_report(each), seconds=PING_GRACE_SECONDS) for each in processes))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._failure.done():
            self._failure.exception()

    # Start

    async def start_trainer(self, process: RoleProcess) -> None:
        await self._connect(process, "control")
        await self._build(process)
        self._spawn(self._end_run_without(process))

    async def start_engine(self, process: RoleProcess, *, is_first: bool = True) -> dict[str, Any]:
        """Connect and build an engine, add it to the pool, and return its `build` answer. If its process ends meanwhile, it is
        restarted, up to `engine.restarts` times. A first start that raises or hangs is not: the next would too."""
        while True:
            try:
                return await self._start_engine(process)
            except RoleFailed as error:
                if is_first and (process.verdict or not process.lost.is_set()):
                    raise
                process.give_up("could not be started")
                process = self._start_again(process, error)

    def _start_again(self, process: RoleProcess, error: Exception) -> RoleProcess:
        """A new process in place of a lost one; raises once `engine.restarts` are used up."""
        most = self._recipe.engine.restarts
        if self.num_restarts >= most:
            raise RoleFailed(f"{error}\n  engine.restarts = {most} are spent")
        self.num_restarts += 1
        self._say(f"{error}\n  it is started again ({self.num_restarts} of {most})")
        return self._starter.start_process(process.role, process.index)

    async def _start_engine(self, process: RoleProcess) -> dict[str, Any]:
        arriving = await self._connect(process, "control", "data")
        report = self._timelines["engine"].take
        engine = RemoteEngine(process.name, self.pool, control=process.control, on_report=report, log=process.log)
        try:
            told = await self._build(process)
            data = await process.open("data", arriving["data"], notices=engine.notices(), deadline=self._recipe.deadline)
            engine.data = data
            self._spawn(process.read(data))
            self.relays[process.name] = str(told["relay"])
            await self.pool.join(engine)
        except StreamClosed as error:
            raise await process.explain() from error
        except RemoteError as error:
            raise process.failed(error) from error
        except SyncError as error:
            raise RoleFailed(f"{process.name} was not brought to the weights: {error}\n  log {process.log}") from error
        self._spawn(self._replace(process, engine))
        return told

    async def _connect(self, process: RoleProcess, *channels: str) -> dict[str, asyncio.Future[Stream]]:
        process.watch_end()
        arriving = self._starter.introduce(process, *channels)
        control = await process.open("control", arriving["control"], notices={}, deadline=self._recipe.deadline)
        self._processes[process.name] = process
        self._spawn(process.read(control))
        self._spawn(process.keep_asking(self._recipe.heartbeat, self._on_report(process)))
        return arriving

    async def _build(self, process: RoleProcess) -> dict[str, Any]:
        arguments = self._starter.build_arguments(process)
        return dict(await process.call("build", deadline=self._recipe.deadline, doing="loading its model", **arguments))

    # Watch

    def _on_report(self, process: RoleProcess) -> Callable[[dict[str, Any]], None]:
        def take(report: dict[str, Any]) -> None:
            if process.role == "engine":
                self.engine_peak = max(self.engine_peak, int(process.state.get("memory_peak", 0)))
            self._timelines[process.role].take(process.name, report)

        return take

    async def _end_run_without(self, trainer: RoleProcess) -> None:
        """Waits for the trainer to be lost; ends the run then."""
        await trainer.lost.wait()
        self._fail(await trainer.explain())

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        """Waits for an engine to be lost; restarts it then."""
        await process.lost.wait()
        error = await process.explain()
        process.give_up("was lost")
        self.pool.lose(engine)
        self._timelines["engine"].forget(process.name)
        try:
            await self.start_engine(self._start_again(process, error), is_first=False)
        except (RoleFailed, ConfigError, ModelError) as wrong:
            self._fail(wrong)
        else:
            self._say(f"{process.name} is back")

    def _fail(self, error: Exception) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)
