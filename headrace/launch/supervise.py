"""Watches the processes of a run: a lost engine is restarted, a lost trainer ends the run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from headrace.engine import EnginePool, RemoteEngine
from headrace.errors import SyncError
from headrace.launch.process import PING_GRACE_SECONDS, RoleFailed
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headrace.config import Recipe
    from headrace.launch.local import LocalProcesses
    from headrace.launch.process import RoleProcess
    from headrace.observe import MirroredTimeline
    from headrace.rpc import Stream

_PING_SECONDS = 1.0


class Supervisor:
    """Connects and watches processes, restarts engines, and raises from `watch` what a restart cannot fix."""

    def __init__(
        self,
        recipe: Recipe,
        starter: LocalProcesses,
        *,
        build: dict[str, Any],
        timelines: dict[str, MirroredTimeline],
        say: Callable[[str], None],
    ) -> None:
        """`build`: arguments of each process's `build` call."""
        self._recipe, self._starter, self._timelines, self._say = recipe, starter, timelines, say
        self._build_arguments = build
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
        processes = self._processes.values()
        return "".join(f"\n  {each.name} ({each.handle.describe()}): {each.doing}, log {each.log}" for each in processes)

    async def refresh(self) -> None:
        """Request every process's timeline now; one that does not answer keeps its last."""
        await asyncio.gather(*(self._ping(each, PING_GRACE_SECONDS) for each in self._processes.values()))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._failure.done():
            self._failure.exception()

    # Start

    async def start_trainer(self, process: RoleProcess) -> None:
        await self._start(process)
        self._spawn(self._end_run_without(process))

    async def start_engine(self, process: RoleProcess, *, is_first: bool = True) -> dict[str, Any]:
        """Start an engine and return its `build` answer. If its process ends meanwhile, it is restarted, up to
        `engine.restarts` times. A first start that raises or hangs is not: the next would too."""
        while True:
            try:
                return await self._start(process)
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

    async def _start(self, process: RoleProcess) -> dict[str, Any]:
        """Connect a process and build its role; an engine then joins the pool. Errors name the process and its log."""
        deadline = self._recipe.deadline
        try:
            arriving = await self._connect(process)
            told: dict[str, Any] = await process.control.call("build", timeout=deadline, **self._build_arguments)
            if process.role == "engine":
                await self._join(process, arriving["data"], relay=told["relay"])
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
        arriving = self._starter.introduce(process)
        control = await process.open("control", arriving["control"], deadline=self._recipe.deadline, notices={})
        self._processes[process.name] = process
        self._spawn(process.read(control))
        self._spawn(self._keep_pinging(process))
        return arriving

    async def _join(self, process: RoleProcess, data: asyncio.Future[Stream], *, relay: str) -> None:
        report = self._timelines["engine"].take
        engine = RemoteEngine(process.name, self.pool, control=process.control, on_report=report, log=process.log)
        engine.data = await process.open("data", data, deadline=self._recipe.deadline, notices=engine.notices())
        self._spawn(process.read(engine.data))
        self.relays[process.name] = relay
        await self.pool.join(engine)
        self._spawn(self._replace(process, engine))

    # Watch

    async def _keep_pinging(self, process: RoleProcess) -> None:
        """Give the process up if a ping stays unanswered for `heartbeat` seconds."""
        heartbeat = self._recipe.heartbeat
        while not process.lost.is_set():
            asked = time.monotonic()
            if not await self._ping(process, heartbeat) and not process.lost.is_set():
                silence = f"has not answered for {time.monotonic() - asked:.0f} s (heartbeat = {heartbeat:g})"
                process.give_up(f"{silence}; it was last at {process.doing}")
            await asyncio.sleep(min(_PING_SECONDS, heartbeat / 4))

    async def _ping(self, process: RoleProcess, seconds: float) -> bool:
        report = await process.ping(seconds)
        if report is None:
            return False
        if process.role == "engine":
            self.engine_peak = max(self.engine_peak, int(process.state.get("memory_peak", 0)))
        self._timelines[process.role].take(process.name, report)
        return True

    async def _end_run_without(self, trainer: RoleProcess) -> None:
        """Waits for the trainer to be lost; ends the run then."""
        await trainer.lost.wait()
        raise await trainer.explain()

    async def _replace(self, process: RoleProcess, engine: RemoteEngine) -> None:
        """Waits for an engine to be lost; restarts it then."""
        await process.lost.wait()
        error = await process.explain()
        process.give_up("was lost")
        self.pool.lose(engine)
        self._timelines["engine"].forget(process.name)
        await self.start_engine(self._start_again(process, error), is_first=False)
        self._say(f"{process.name} is back")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background; what it raises ends the run."""

        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._failure.done():
                self._failure.set_exception(error)

        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(on_end)
