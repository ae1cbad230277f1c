"""Environments in processes of their own: `environment.processes`.

        launcher                                            process (`headrace.launch.environment_child`)
        run(task, client) ──── run: task, names ──────────► the environment's run(task, client)
           generate at the engines ◄── generate: tokens ───  client.generate
                              ─── sampled: new tokens ─────► its on_tokens, if it has one
                              ─── tokens, logprobs … ──────►
           ◄──────────────────── the episode ──────────────

Rollouts and episodes cross as columns, as between all processes; nothing is pickled. A process that dies, or does not end an
episode that is cancelled, is replaced. If it had one episode, that fails. If it had several, nobody knows whose fault it is,
and none fails. Either way each is run again apart, in a process that has no other, until it ends without losing that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from headrace.engine import PromptTooLong, UnusablePrompt
from headrace.envs.single_turn import EnvironmentFailed, is_of
from headrace.helper_process import how_it_ended, kill_helper, start_helper
from headrace.records import frames, pack_rollouts, unpack_episodes, unpack_rollouts
from headrace.rpc import Peer, RemoteError, StreamClosed, open_socket
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.engine import Increment
    from headrace.envs.client import EngineClient
    from headrace.records import Episode, Plain

log = logging.getLogger("headrace")
_START_SECONDS = 300.0
"""How long a process may take to import and make its environment."""
_CANCEL_SECONDS = 5.0
"""How long a cancelled episode may take to end, before its process is killed."""
_MAX_BYTES = 1 << 30
"""Of an episode or rollout that a process sends."""
_MAX_LOG, _LOG_SECONDS = 100_000_000, 1.0
"""Bytes of the log, and how often they are looked at."""
REFUSALS = {"PromptTooLong": PromptTooLong, "UnusablePrompt": UnusablePrompt}
"""Errors that keep their kind between processes."""


class ProcessLost(EnvironmentFailed):
    """The process has ended."""


class ProcessEnvironment:
    """An environment that runs in `num` processes, started when first needed. Each episode goes to the one with fewest. As many
    more run suspects, one at a time."""

    def __init__(
        self,
        name: str,
        build: dict[str, Any],
        *,
        num: int,
        concurrency: int,
        can_resume: bool,
        log: Path | None,
        may_idle: bool = False,
    ) -> None:
        """`build`: the plain settings that the process makes the environment from. What it prints goes to `log`."""
        self.name, self.can_resume, self.may_idle = name, can_resume, may_idle
        self.places = asyncio.Semaphore(concurrency) if concurrency else None
        self._build, self._num, self._log = build, num, log
        self._processes: list[_Process] = []
        self._ending: list[_Process] = []
        """Killed, and yet to be noticed by their readers, which only these references keep from garbage collection."""
        self.num_ended = 0
        """Processes that died or were killed."""
        self._suspects: set[str] = set()
        """Episodes that were in a process when it ended."""
        self._apart, self._num_apart = asyncio.Semaphore(num), 0

    async def run(self, task: dict[str, Plain], client: EngineClient) -> Episode:
        if client.episode not in self._suspects:
            process = self._process()
            try:
                return await process.run(task, client)
            except ProcessLost as lost:
                if len(process.held) < 2:
                    raise
                if not process.is_told:
                    process.is_told = True
                    told = "environment %r %s; the %d episodes in it are run again, apart from others"
                    log.warning(told, self.name, lost, len(process.held))
            finally:
                self._suspects.update(process.held)
        return await self._run_apart(task, client)

    async def _run_apart(self, task: dict[str, Plain], client: EngineClient) -> Episode:
        """Waits for one of `num` places. Woken by a suspect that ends."""
        self._num_apart += 1
        try:
            with client.clock.stopped():
                await self._apart.acquire()
            try:
                client.begin_again()
                process = self._process(is_apart=True)
                try:
                    return await process.run(task, client)
                finally:
                    if not process.has_ended:
                        self._suspects.discard(client.episode)
            finally:
                self._apart.release()
        finally:
            self._num_apart -= 1
            for process in self._processes:
                if process.is_apart and not self._num_apart:
                    process.kill()

    def _process(self, *, is_apart: bool = False) -> _Process:
        """The one with fewest episodes; another if not all have been started."""
        alive = [process for process in self._processes if not process.has_ended]
        self.num_ended += len(self._processes) - len(alive)
        ended = (process for process in (*self._ending, *self._processes) if process.has_ended)
        self._ending, self._processes = [process for process in ended if process.is_open], alive
        alike = [process for process in alive if process.is_apart == is_apart]
        idle = min(alike, key=lambda process: len(process.clients), default=None)
        if idle is None or (idle.clients and len(alike) < self._num):
            idle = _Process(self._build, log=self._log, is_apart=is_apart)
            self._processes.append(idle)
        return idle

    async def serve(self) -> None:
        """Runs beside the loops; when it is cancelled, the processes end."""
        try:
            while True:
                await asyncio.sleep(_LOG_SECONDS)
                if self._log is not None:
                    await asyncio.to_thread(_keep_short, self._log)
        finally:
            for process in self._processes:
                process.kill()
            self._processes = []


def _keep_short(log: Path) -> None:
    """A full log becomes `.1`. It is copied and emptied, not renamed, since the processes have it open to append to."""
    size = log.stat().st_size if log.exists() else 0
    if size > _MAX_LOG:
        with contextlib.suppress(OSError), log.open("rb") as file, log.with_name(f"{log.name}.1").open("wb") as full:
            for start in range(0, size, 1 << 20):
                full.write(file.read(min(size - start, 1 << 20)))
        os.truncate(log, 0)


class _Process:
    """One process and the clients of the episodes in it."""

    def __init__(self, build: dict[str, Any], *, log: Path | None, is_apart: bool) -> None:
        self.is_apart, self.is_told = is_apart, False
        self.clients: dict[str, EngineClient] = {}
        self.held: tuple[str, ...] = ()
        """The episodes in it when it ended; none if it ended before it had started."""
        self._calls: dict[int, tuple[str, asyncio.Task[Any]]] = {}  # generate calls by number, with their episode
        self.has_ended, self._has_started, self._build = False, False, build
        own, other = socket.socketpair()
        with other, contextlib.nullcontext() if log is None else log.open("a") as file:
            arguments: dict[str, Any] = {"log": 2 if file is None else file, "pass_fds": [other.fileno()]}
            self._process = start_helper("headrace.launch.environment_child", str(other.fileno()), stdin=-3, **arguments)
        self._started: asyncio.Task[Peer] = asyncio.ensure_future(self._start(own))
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Its stream is open at this end."""
        return self._reading is not None and not self._reading.done()

    async def _start(self, own: socket.socket) -> Peer:
        calls, notices = {"generate": self._generate}, {"cancel": self._cancel}
        peer = Peer(await open_socket(own), calls=calls, notices=notices, max_bytes=_MAX_BYTES)
        self._reading = asyncio.ensure_future(self._read(peer))
        await peer.call("start", timeout=_START_SECONDS, build=self._build)
        self._has_started = True
        return peer

    async def _read(self, peer: Peer) -> None:
        try:
            await peer.run()
        except (StreamClosed, frames.WireError):
            pass
        finally:
            self.kill()
            peer.stream.close()

    async def run(self, task: dict[str, Plain], client: EngineClient) -> Episode:
        self.clients[client.episode] = client
        try:
            with client.clock.busy():
                peer = await asyncio.shield(self._started)
            names = {"episode": client.episode, "group": client.group, "index": client.index, "policy": client.policy}
            answer = peer.begin("run", task=task, names=names)
            try:
                await asyncio.wait({answer})
            except asyncio.CancelledError:
                with contextlib.suppress(StreamClosed):
                    peer.notify("cancel", client.episode)
                    if not (await asyncio.wait({answer}, timeout=_CANCEL_SECONDS))[0]:
                        self.kill()
                raise
            (episode,) = unpack_episodes(answer.result())
            return episode
        except RemoteError as error:
            if error.is_config:
                raise ConfigError(error.message) from error
            if error.kind in REFUSALS:
                raise REFUSALS[error.kind](error.message) from error
            raise EnvironmentFailed(f"raised {error}{error.frame and f', {error.frame}'}") from error
        except (StreamClosed, TimeoutError) as error:
            self.kill()
            status = await asyncio.to_thread(self._process.wait)
            raise ProcessLost(f"lost its process, which {how_it_ended(status)}") from error
        finally:
            del self.clients[client.episode]
            for name, call in list(self._calls.values()):  # of tasks that the environment left behind
                if name == client.episode:
                    call.cancel()

    def _cancel(self, number: int) -> None:
        if number in self._calls:
            self._calls[number][1].cancel()

    async def _generate(
        self, episode: str, rollout: dict[str, Any], max_tokens: int, stop: list[str], number: int, is_streamed: bool
    ) -> dict[str, Any]:
        (prompt,) = unpack_rollouts(rollout)
        client = self.clients.get(episode)
        if client is None or prompt.episode != episode:
            raise LookupError(f"episode {episode!r} does not run here")
        if prompt.id in client.generated and not is_of(prompt, client.generated[prompt.id]):
            raise ValueError(f"rollout {prompt.id!r} has other sampled tokens than the engine's")
        task, peer = asyncio.current_task(), self._started.result()
        assert task is not None
        self._calls[number] = episode, task

        def tell(new: Increment) -> None:
            reason = None if new.finish_reason is None else new.finish_reason.value
            with contextlib.suppress(StreamClosed):  # the call is about to fail
                peer.notify("sampled", [number, new.token_ids, new.logprobs, new.versions, reason])

        try:
            limits: dict[str, Any] = {"max_tokens": int(max_tokens), "stop": tuple(map(str, stop))}
            return pack_rollouts([await client.generate(prompt, **limits, on_tokens=tell if is_streamed else None)])
        except asyncio.CancelledError:
            raise RuntimeError("cancelled") from None
        finally:
            del self._calls[number]

    def kill(self) -> None:
        if not self.has_ended and self._has_started:
            self.held = tuple(self.clients)
        self.has_ended = True
        kill_helper(self._process)
