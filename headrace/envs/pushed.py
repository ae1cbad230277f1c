"""Environments that run elsewhere and push scored groups, as Atropos's do. An episode of the run is a place in a group: it
waits until a group is pushed, and takes one of its sequences. So gate, buffer, staleness and accounting are those of any run,
and a group that finds no place waits with its sender."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.engine import ApiError, bind, url_of
from headrace.envs.client import EngineClient
from headrace.envs.push_server import PushServer, Sender
from headrace.envs.single_turn import SingleTurn
from headrace.records import Episode
from headrace.settings import ConfigError, check

if TYPE_CHECKING:
    from headrace.envs.client import Client
    from headrace.records import Plain, Rollout

TOKENS = "HEADRACE_PUSH_TOKENS"
_SHORTEST_TOKEN = 16
_SIBLING_SECONDS = 30.0
"""How long a place waits for the others of its group."""
_KEPT = 16
"""Filled groups that are kept: places that are cancelled before they have ended, with a leg, are filled alike in the next."""


@dataclass(eq=False)
class _OpenGroup:
    size: int
    places: dict[int, tuple[EngineClient, asyncio.Future[Rollout]]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.places) == self.size and not any(place.done() for _, place in self.places.values())


class PushedEnvironment:
    """Waits for what other processes push. They authenticate with one of the tokens in HEADRACE_PUSH_TOKENS."""

    name = "pushed"
    may_idle = True
    outlives_failures = True  # the service is the run's, not an episode's

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        wait: float = 60.0,
        max_mb: int = 64,
        remembered_tokens: int = 8_000_000,
    ) -> None:
        """`host`, `port`: where it listens. `wait`: seconds that a push waits for a place before it is told to come again.
        `max_mb`: of a request. `remembered_tokens`: of what each sender has sampled and not pushed; 14 bytes each."""
        check(0 <= wait <= 3600, "environment.options.wait", wait, "seconds, at most 3600")
        check(1 <= max_mb <= 1024, "environment.options.max_mb", max_mb, "from 1 to 1024")
        check(remembered_tokens >= 1, "environment.options.remembered_tokens", remembered_tokens, "≥ 1")
        tokens = os.environ.get(TOKENS, "").split()
        if not tokens or min(map(len, tokens)) < _SHORTEST_TOKEN or len(set(tokens)) < len(tokens):
            what = f"set it to a token of at least {_SHORTEST_TOKEN} characters for each sender, separated by spaces"
            raise ConfigError(f"{TOKENS}: {what}, such as {secrets.token_urlsafe(24)}")
        self._where, self._wait, self._max_bytes = (host, port), wait, max_mb << 20
        self.senders = [Sender(token, max_tokens=remembered_tokens) for token in tokens]
        self._listener = bind(host, port, has_token=True)  # now: early senders wait until the run is ready
        self.url = url_of(self._listener)
        self._server: PushServer | None = None
        self._open: dict[str, _OpenGroup] = {}
        self._filled: dict[str, dict[int, Rollout]] = {}
        self._has_place = asyncio.Event()
        self.client: EngineClient | None = None
        """Of the newest place: what is sampled for senders is sampled as it says."""
        self.num_accepted = 0
        self.most_open = 0

    @property
    def group_size(self) -> int:
        return self.client.group_size if self.client is not None else 0

    @property
    def push_counts(self) -> dict[str, int]:
        """Pushes so far that were accepted, and that were refused, by reason."""
        refused = sum((sender.refused for sender in self.senders), Counter[str]())
        return {"accepted": self.num_accepted, **{f"refused/{reason}": count for reason, count in sorted(refused.items())}}

    @property
    def num_open(self) -> int:
        """Groups that could be pushed now."""
        return sum(group.is_complete for group in self._open.values())

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        """In an evaluation, which nobody pushes to, one prompt and one answer."""
        if not isinstance(client, EngineClient):
            raise ConfigError("environment.processes: must be 0, since what is pushed comes to the launcher")
        if not client.group_size:
            return await SingleTurn().run(task, client)
        self._serve(client)
        started = time.time()
        rollout = self._filled.get(client.group, {}).get(client.index) or await self._place(client)
        names: dict[str, Any] = {"id": client.episode, "group": client.group, "environment": self.name, "task": task}
        return Episode(**names, rollouts=(rollout,), started=started, finished=time.time())

    def _serve(self, client: EngineClient) -> None:
        client.clock.lift()  # `deadline`, not `episode.timeout`, bounds how long a place stays open
        self.client = client
        if self._server is None or not self._server.is_open:
            if self._server is not None:
                self._listener, self._has_place = bind(*self._where, has_token=True), asyncio.Event()
                self.url = url_of(self._listener)
            self._server = PushServer(self, self._listener, max_bytes=self._max_bytes)

    async def _place(self, client: EngineClient) -> Rollout:
        """Waits for a push. Woken by `fill`."""
        group = self._open.setdefault(client.group, _OpenGroup(client.group_size))
        place: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        group.places[client.index] = client, place
        if group.is_complete:
            self.most_open = max(self.most_open, self.num_open)
            self._has_place.set()
        try:
            await asyncio.wait({place}, timeout=_SIBLING_SECONDS)
            if not place.done() and not group.is_complete:
                raise RuntimeError(
                    f"{len(group.places)} of {group.size} episodes of a group have started, the others not within "
                    f"{_SIBLING_SECONDS:g} s: environment.concurrency is too small, or they had ended before a restart"
                )
            return await place
        finally:
            group.places.pop(client.index, None)
            if not group.places:
                self._open.pop(client.group, None)

    async def has_place(self) -> None:
        """Waits until a group could be pushed. Woken by the last place of a group."""
        while not self.num_open:
            self._has_place.clear()
            await self._has_place.wait()

    async def fill(self, rollouts: list[Rollout]) -> None:
        """Hands a group to the run. Raises a 503 if it has no place for one in time."""
        try:
            async with asyncio.timeout(self._wait):
                await self.has_place()
        except TimeoutError:
            raise ApiError(503, "the run has no place for another group now; push it again later", code="later") from None
        name, group = next((name, group) for name, group in self._open.items() if group.is_complete)
        del self._open[name]
        self._filled[name] = {}
        for index, rollout in zip(sorted(group.places), rollouts, strict=True):
            client, place = group.places[index]
            labels: dict[str, Any] = {"id": client.episode, "episode": client.episode, "group": client.group, "index": index}
            self._filled[name][index] = rollout.replace(**labels)
            place.set_result(self._filled[name][index])
        self.num_accepted += 1
        while len(self._filled) > _KEPT:
            del self._filled[next(iter(self._filled))]
