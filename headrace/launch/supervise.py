"""Watching over the processes of a run: each is asked every second how it is, and is started again or named when it fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.engine import EnginePool, Member
from headrace.errors import SyncError
from headrace.launch.placement import choose_transport
from headrace.launch.processes import Child, Processes, RoleFailed
from headrace.model import ModelError
from headrace.rpc import Peer, RemoteError, Stream, StreamClosed
from headrace.settings import ConfigError, to_dict

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from headrace.observe import MirroredTimeline
    from headrace.sync import Lineage

_PING_SECONDS = 1.0
_GRACE_SECONDS = 2.0
"""For an answer that lies unread because this process was itself held up."""


class Supervisor:
    """Connects processes, watches them, mends what it can, and raises the rest from `watch`."""

    def __init__(
        self,
        processes: Processes,
        *,
        model: str,
        lineage: Lineage,
        timelines: dict[str, MirroredTimeline],
        say: Callable[[str], None],
        most_blocks: int = 0,
    ) -> None:
        """`most_blocks`: KV blocks that each engine can use, where that is known."""
        self._most_blocks = most_blocks
        self._processes, self._recipe = processes, processes.recipe
        self._model, self._lineage, self._timelines, self._say = model, lineage, timelines, say
        self._children: dict[str, Child] = {}
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.pool = EnginePool()
        self.relays: dict[str, str] = {}
        """Where each engine hands weights on, where it does."""
        self.num_restarts = 0
        self.engine_peak = 0
        """Bytes of memory, by what engines say of themselves; of those that are gone too."""

    async def watch(self) -> None:
        """Waits for a failure that cannot be mended, and raises it."""
        await asyncio.shield(self._failure)

    def describe(self) -> str:
        """Each process, what it was last seen at, and its log."""
        return "".join(
            f"\n  {child.name} (process {child.process.pid}): {child.doing}, log {child.log}"
            for child in self._children.values()
        )

    async def start_trainer(self, child: Child) -> dict[str, Any]:
        """Connect and build the trainer; what it said of itself."""
        await self._connect(child, ("control",))
        told = await self._build(child, index=0)
        self._spawn(self._end_with(child))
        return told

    async def start_engine(self, child: Child, *, index: int, is_first: bool = True) -> dict[str, Any]:
        """Connect and build an engine and put it in the pool; what it said of itself. If its process ends meanwhile it is
        started again while `engine.restarts` last; if the first one raises or hangs instead, so would the next."""
        while True:
            try:
                return await self._start_engine(child, index=index)
            except RoleFailed as error:
                if is_first and (child.verdict or not child.lost.is_set()):
                    raise
                child.give_up("could not be started")
                child = self._spawn_again(child, error)

    def _spawn_again(self, child: Child, error: Exception) -> Child:
        """A new process in place of one that is lost; raises when there have been too many."""
        most = self._recipe.engine.restarts
        if self.num_restarts >= most:
            raise RoleFailed(f"{error}\n  engine.restarts = {most} are spent")
        self.num_restarts += 1
        self._say(f"{error}\n  it is started again ({self.num_restarts} of {most})")
        return self._processes.spawn("engine", child.name)

    async def _start_engine(self, child: Child, *, index: int) -> dict[str, Any]:
        arriving = await self._connect(child, ("control", "data"))
        member = Member(child.name, control=child.control, on_report=self._timelines["engine"].take, log=str(child.log))
        try:
            told = await self._build(child, index=index)
            await self._take_data(child, member, arriving["data"])
            self.relays[child.name] = str(told["relay"])
            await self.pool.join(member)
        except StreamClosed as error:
            raise await child.explain() from error
        except RemoteError as error:
            raise child.failed(error) from error
        except SyncError as error:
            raise RoleFailed(f"{child.name} was not brought to the weights: {error}\n  log {child.log}") from error
        self._spawn(self._replace(child, member, index))
        return told

    async def refresh(self) -> None:
        """Ask every process for its timeline now; one that does not answer keeps its last."""
        await asyncio.gather(*(self._ping(child, seconds=_GRACE_SECONDS) for child in list(self._children.values())))

    def close(self) -> None:
        """Stop watching: the run is over."""
        for task in list(self._tasks):
            task.cancel()
        if self._failure.done():
            self._failure.exception()

    # Beginning

    async def _connect(self, child: Child, channels: tuple[str, ...]) -> dict[str, asyncio.Future[Any]]:
        arriving = self._processes.connect(child, channels)
        stream = await self._or_end(child, arriving["control"])
        child.peer = Peer(stream, notices={"failed": lambda error: setattr(child, "told", RemoteError(**error))})
        self._children[child.name] = child
        self._spawn(self._read(child, child.peer))
        self._spawn(self._keep_asking(child))
        return arriving

    async def _take_data(self, child: Child, member: Member, arriving: asyncio.Future[Any]) -> None:
        stream = await self._or_end(child, arriving)
        member.data = child.data = Peer(stream, notices=member.notices())
        self._spawn(self._read(child, child.data))

    async def _or_end(self, child: Child, arriving: asyncio.Future[Any]) -> Stream:
        """The stream that is to come, unless the process ends first or lets the deadline pass."""
        ended = asyncio.ensure_future(child.lost.wait())
        deadline = self._recipe.deadline
        await asyncio.wait({arriving, ended}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if arriving.done():
            return arriving.result()  # type: ignore[no-any-return]
        if not child.lost.is_set():
            child.give_up(f"has not connected for {deadline:g} s (deadline)")
        raise await child.explain()

    async def _build(self, child: Child, *, index: int) -> dict[str, Any]:
        deadline = self._recipe.deadline
        try:
            told = await child.control.call(
                "build",
                timeout=deadline,
                recipe=to_dict(self._recipe),
                model=self._model,
                lineage={"id": self._lineage.id, "ancestors": self._lineage.ancestors},
                ends=asdict(self._processes.ends(choose_transport(self._recipe))),
                index=index,
                most_blocks=self._most_blocks,
            )
        except TimeoutError as error:
            child.give_up(f"has been loading its model for {deadline:g} s (deadline)")
            raise await child.explain() from error
        except RemoteError as error:
            raise child.failed(error) from error
        except StreamClosed as error:
            raise await child.explain() from error
        return dict(told)

    # Watching

    async def _read(self, child: Child, peer: Peer) -> None:
        """Until a stream closes; without one of its streams a process is lost."""
        try:
            await peer.run()
        except asyncio.CancelledError:  # the run is ended here: nobody need wait to learn why the process is gone
            child.verdict = child.verdict or "was left when the run was ended"
            child.settled.set()
            raise
        except StreamClosed:
            child.lost.set()
        except ValueError as error:
            child.give_up(f"sent what cannot be read: {error}")
        finally:
            for each in (child.peer, child.data):
                if each is not None:
                    each.stream.close()

    async def _keep_asking(self, child: Child) -> None:
        """A process that leaves a question open for `heartbeat` seconds is given up."""
        heartbeat = self._recipe.heartbeat
        while not child.lost.is_set():
            asked = time.monotonic()
            if not await self._ping(child, seconds=heartbeat) and not child.lost.is_set():
                stopped = ", it is stopped (SIGSTOP)" if _is_stopped(child.process.pid) else ""
                child.give_up(
                    f"has not answered for {time.monotonic() - asked:.0f} s (heartbeat = {heartbeat:g}){stopped}; it was last "
                    f"at {child.doing}"
                )
            await asyncio.sleep(min(_PING_SECONDS, heartbeat / 4))

    async def _ping(self, child: Child, *, seconds: float) -> bool:
        try:
            answer = child.control.begin("ping")
            for wait in (seconds, _GRACE_SECONDS):
                await asyncio.wait({answer}, timeout=wait)
            if not answer.done():
                answer.cancel()
                return False
            told = answer.result()
        except StreamClosed:
            child.lost.set()
            return False
        child.state, child.doing = told["state"], told["report"]["state"]
        if child.role == "engine":
            self.engine_peak = max(self.engine_peak, int(child.state.get("memory_peak", 0)))
        self._timelines[child.role].take(child.name, told["report"])
        return True

    # When one is lost

    async def _end_with(self, child: Child) -> None:
        """Waits for the trainer to be lost, which ends the run."""
        await child.lost.wait()
        self._fail(await child.explain())

    async def _replace(self, child: Child, member: Member, index: int) -> None:
        """Waits for an engine to be lost, and starts it again."""
        await child.lost.wait()
        error = await child.explain()
        child.process.kill()
        self.pool.lose(member)
        self._timelines["engine"].forget(child.name)
        try:
            await self.start_engine(self._spawn_again(child, error), index=index, is_first=False)
        except (RoleFailed, ConfigError, ModelError) as wrong:
            self._fail(wrong)
        else:
            self._say(f"{child.name} is back")

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


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
