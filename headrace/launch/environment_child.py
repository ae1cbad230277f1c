"""What a process of `environment.processes` runs: an environment by name, whose clients generate in the launcher.

It ends when the launcher's end of its socket is closed, in the middle of an episode too.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine import Increment
from headrace.envs import REFUSALS, Client, EnvironmentSettings, PromptEncoder, make_environment
from headrace.helper_process import end_with_launcher, print_whole_lines
from headrace.model import ModelSettings, load_tokenizer
from headrace.records import Episode, FinishReason, Rollout, pack_episodes, pack_rollouts, unpack_rollouts
from headrace.rpc import Peer, RemoteError, StreamClosed, open_socket
from headrace.settings import build as build_settings

if TYPE_CHECKING:
    from headrace.engine import OnTokens
    from headrace.envs import Environment
    from headrace.records import Plain


_NUMBERS = itertools.count()  # of generate calls


@dataclass(eq=False, kw_only=True)
class _ProcessClient(Client):
    peer: Peer
    streams: dict[int, OnTokens]
    """By the numbers of their calls; of all clients of the process."""

    async def generate(
        self, rollout: Rollout, *, max_tokens: int = 0, stop: tuple[str, ...] = (), on_tokens: OnTokens | None = None
    ) -> Rollout:
        number, is_streamed = next(_NUMBERS), on_tokens is not None
        limits: dict[str, Any] = {"max_tokens": max_tokens, "stop": list(stop), "number": number, "is_streamed": is_streamed}
        if on_tokens is not None:
            self.streams[number] = on_tokens
        try:
            answer = await self.peer.call("generate", episode=self.episode, rollout=pack_rollouts([rollout]), **limits)
        except asyncio.CancelledError:
            with contextlib.suppress(StreamClosed):
                self.peer.notify("cancel", number)
            raise
        except RemoteError as error:
            raise (REFUSALS[error.kind](error.message) if error.kind in REFUSALS else error) from None
        finally:
            self.streams.pop(number, None)
        (generated,) = unpack_rollouts(answer)
        return generated


class _Host:
    """Answers the launcher's calls."""

    def __init__(self) -> None:
        self.peer: Peer
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._streams: dict[int, OnTokens] = {}
        self._encoder: PromptEncoder
        self._environment: Environment

    async def start(self, build: dict[str, Any]) -> None:
        self._encoder = PromptEncoder(load_tokenizer(build["model_path"], build_settings(ModelSettings, build["model"])))
        self._environment = make_environment(build_settings(EnvironmentSettings, build["environment"]))

    async def run(self, task: dict[str, Plain], names: dict[str, Any]) -> dict[str, Any]:
        client = _ProcessClient(encoder=self._encoder, peer=self.peer, streams=self._streams, **names)
        running = asyncio.ensure_future(self._run(task, client))
        self._running[client.episode] = running
        try:
            return pack_episodes([await running])
        except asyncio.CancelledError:
            raise RuntimeError("cancelled") from None
        finally:
            del self._running[client.episode]

    async def _run(self, task: dict[str, Plain], client: Client) -> Episode:
        try:
            episode: object = await self._environment.run(task, client)
        except SystemExit as error:  # it would end the process, and other episodes with it
            raise RuntimeError(f"SystemExit: {error}") from error
        if not isinstance(episode, Episode):
            name = getattr(self._environment, "name", "")
            raise TypeError(f"environment {name!r} returned a {type(episode).__name__}, not an Episode")
        return episode

    def cancel(self, episode: str) -> None:
        if episode in self._running:
            self._running[episode].cancel()

    def sampled(self, new: list[Any]) -> None:
        number, token_ids, logprobs, versions, reason = new
        if number in self._streams:
            ended = None if reason is None else FinishReason(reason)
            increment = Increment(tuple(token_ids), tuple(logprobs), tuple(versions), ended)
            asyncio.get_running_loop().call_soon(self._streams[number], increment)  # it may raise


async def _serve(connection: socket.socket) -> None:
    host = _Host()
    host.peer = Peer(
        await open_socket(connection),
        calls={"start": host.start, "run": host.run},
        notices={"cancel": host.cancel, "sampled": host.sampled},
    )
    with contextlib.suppress(StreamClosed):  # the launcher is done
        await host.peer.run()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    os.dup2(2, 1)
    print_whole_lines()
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_with_launcher(os.dup(connection.fileno()))
    asyncio.run(_serve(connection))


if __name__ == "__main__":
    main()
