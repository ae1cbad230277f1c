"""What environments that push talk to: Atropos's interface for environments (`/register-env`, `/scored_data`, …), and the one
through which its managed servers sample tokens (`/generate`), so that the policy's tokens are the engine's own."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import logging
import secrets
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from headrace.engine import ApiError, Body, LoopServer, bad, bearer, check_token_ids, read_body, read_stops, tell_failures
from headrace.envs.client import EngineClient
from headrace.envs.endpoint import SAMPLED_BY_THE_RUN, digest_of
from headrace.envs.scored_groups import SampledSequences, read_groups
from headrace.records import Rollout, Source

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from headrace.envs.pushed import PushedEnvironment
    from headrace.envs.scored_groups import ScoredGroup

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("headrace")
_MOST = 2**31 - 1
_MOST_SAMPLES = 1024
_REMEMBERED_GROUPS = 4096
_MOST_ENVIRONMENTS = 1024  # of a sender
_LONGEST_NAME = 256


class Sender:
    """Who holds one of the tokens: it pushes what was sampled for it, and nobody else does."""

    def __init__(self, token: str, *, max_tokens: int) -> None:
        self.digest = digest_of(token)
        self.sampled = SampledSequences(max_tokens)
        self.refused = Counter[str]()
        """Pushes, by what was wrong with them."""
        self.accepted: deque[bytes] = deque(maxlen=_REMEMBERED_GROUPS)
        """The digests of its last groups."""


@dataclass(eq=False)
class _Registered:
    """An environment."""

    sender: Sender
    name: str
    weight: float
    is_connected: bool = True


class PushServer(LoopServer):
    def __init__(self, run: PushedEnvironment, listener: socket.socket, *, max_bytes: int) -> None:
        self._run = run
        self._senders = {sender.digest: sender for sender in run.senders}
        self._environments: dict[int, _Registered] = {}
        self._ids = itertools.count()
        self._names = (f"pushed-{secrets.token_hex(4)}.{number}" for number in itertools.count())
        self._version = 0
        routes = [
            web.get("/health", self._health),
            web.post("/generate", self._generate),
            web.post("/register-env", self._register),
            web.post("/disconnect-env", self._disconnect),
            web.get("/info", self._info),
            web.get("/wandb_info", self._wandb_info),
            web.get("/status", self._status),
            web.get("/status-env", self._status_env),
            web.post("/scored_data", self._scored_data),
            web.post("/scored_data_list", self._scored_data),
        ]
        name = "the service for environments that push"
        super().__init__(listener, routes, name=name, around=[tell_failures, self._note_refused], max_body=max_bytes)
        log.info("environments push to %s", run.url)

    @web.middleware
    async def _note_refused(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: nothing is read of one without a token."""
        sender = self._sender(request)
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:
            if request.path.startswith("/scored_data"):
                reason = str(getattr(error, "code", None) or getattr(error, "status", 500))
                sender.refused[reason] += 1
                if sender.refused[reason] == 1 and reason != "later":
                    log.warning("a pushed group is refused (%s): %s; others are only counted", reason, error)
            raise

    def _sender(self, request: web.Request) -> Sender:
        sender = self._senders.get(digest_of(bearer(request) or _password(request)))
        if sender is None:
            raise ApiError(401, "the token is none of HEADRACE_PUSH_TOKENS", code="invalid_api_key")
        return sender

    # Sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """vLLM's own interface, as Atropos's servers of the type vllm call it: token ids in, token ids and logprobs out. Waits
        for a place in the run, without which nothing could be done with what is sampled."""
        sender, body = self._sender(request), await read_body(request)
        await self._run.has_place()
        client = self._run.client
        assert client is not None
        prompt = Body(body.take("prompt", dict, {}))
        ids = check_token_ids(prompt.take("prompt_token_ids"), "prompt_token_ids", vocabulary=len(client.encoder.tokenizer))
        prompt.end(within="prompt")
        if not ids:
            raise bad("prompt_token_ids", "is empty")
        count = body.number("n", 1, low=1, high=_MOST_SAMPLES)
        most = body.number("max_tokens", _MOST, low=1, high=_MOST)
        stops = read_stops(body.take("stop"))
        body.end({**SAMPLED_BY_THE_RUN, "logprobs": (0, 1), "model": (...,), "stream": (False,)})
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(self._sample(client, sender, ids, most, stops)) for _ in range(count)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        rollouts = [call.result() for call in calls]
        sampled = [rollout.token_ids[len(ids) :].tolist() for rollout in rollouts]
        logprobs = [
            [[{str(token): float(logprob)}] for token, logprob in zip(new, rollout.logprobs[len(ids) :], strict=True)]
            for new, rollout in zip(sampled, rollouts, strict=True)
        ]
        reasons = [rollout.finish_reason and rollout.finish_reason.value for rollout in rollouts]
        return web.json_response({"token_ids": sampled, "logprobs": logprobs, "finish_reasons": reasons})

    async def _sample(
        self, client: EngineClient, sender: Sender, ids: tuple[int, ...], max_tokens: int, stop: tuple[str, ...]
    ) -> Rollout:
        """A prompt that begins with what was sampled for the same sender continues that."""
        id = next(self._names)
        names: dict[str, Any] = {"id": id, "episode": id, "group": id, "index": 0, "policy": client.policy}
        earlier = sender.sampled.find(ids)
        if earlier is None:
            rollout = Rollout.from_prompt(np.array(ids, dtype=np.int32), id=id).replace(**names)
        else:
            rest = ids[len(earlier) :]
            rollout = earlier.replace(**names)
            rollout = rollout.append(np.array(rest, dtype=np.int32), source=Source.TOOL) if rest else rollout
        own = EngineClient(
            engine=client.engine,
            encoder=client.encoder,
            policy=client.policy,
            episode=id,
            group=id,
            index=0,
            sampling=client.sampling,
            seed=client.seed,
            limit=client.limit,
            leased=None if client.leased is None else set(),
        )
        try:
            longer = await own.generate(rollout, max_tokens=max_tokens, stop=stop)
        finally:
            if own.leased is not None:
                own.release()
        if len(longer) <= len(ids):
            message = f"the prompt has {len(ids)} tokens, which leaves no room in the context for an answer"
            raise ApiError(400, message, param="prompt_token_ids", code="context_length_exceeded")
        self._version = max(self._version, int(longer.versions.max()))
        sender.sampled.add([longer])
        return longer

    # Pushing

    async def _scored_data(self, request: web.Request) -> web.StreamResponse:
        sender, is_list = self._sender(request), request.path.endswith("_list")
        raw = await request.read()
        if request.content_type != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, not {request.content_type}")
        groups = await asyncio.to_thread(read_groups, raw, is_list=is_list)
        for group in groups:
            self._registered(group.environment, sender)
            if len(group.sequences) != (self._run.group_size or len(group.sequences)):
                problem = f"has {len(group.sequences)} sequences; train.group_size is {self._run.group_size}"
                raise bad("tokens", problem, code="group_size")
        for group in groups:
            await self._push(group, sender)
        return web.json_response({"status": "received", **({"groups_processed": len(groups)} if is_list else {})})

    async def _push(self, group: ScoredGroup, sender: Sender) -> None:
        """What is refused or finds no place can be pushed again; what was accepted and comes again is accepted once."""
        try:
            rollouts = group.take(sender.sampled)
        except ApiError:
            if group.digest in sender.accepted:
                return
            raise
        try:
            await self._run.fill(group.scored(rollouts))
        except BaseException:
            sender.sampled.add(rollouts)
            raise
        sender.accepted.append(group.digest)

    # What environments ask

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _register(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        name, weight = body.take("desired_name", str) or "environment", body.take("weight", float, 1.0)
        size = body.number("group_size", self._run.group_size, low=1, high=_MOST)
        if size != self._run.group_size:
            raise bad("group_size", f"is {size}; train.group_size is {self._run.group_size}", code="group_size")
        body.end({"max_token_length": (...,), "min_batch_allocation": ()})
        if len(name) > _LONGEST_NAME:
            raise bad("desired_name", f"has {len(name)} characters; the most is {_LONGEST_NAME}")
        sender, id = self._sender(request), next(self._ids)
        theirs = [old for old, each in self._environments.items() if each.sender is sender]
        if len(theirs) >= _MOST_ENVIRONMENTS:  # the first that has left, else the oldest: one that restarts often leaves many
            del self._environments[next((old for old in theirs if not self._environments[old].is_connected), theirs[0])]
        same = sum(each.name == name for each in self._environments.values())
        self._environments[id] = _Registered(sender, name, weight)
        names = {"env_id": id, "wandb_name": f"{name}_{same}", "checkpoint_dir": ""}
        return web.json_response(
            {"status": "success", **names, "starting_step": 0, "checkpoint_interval": 0, "num_steps": _MOST}
        )

    async def _disconnect(self, request: web.Request) -> web.StreamResponse:
        (await self._named(request)).is_connected = False
        return web.json_response({"status": "success"})

    async def _info(self, request: web.Request) -> web.StreamResponse:
        """What Atropos calls a batch is all that the run takes before it trains: its own gate is the ceiling."""
        size = self._run.most_open * self._run.group_size
        return web.json_response({"batch_size": size, "max_token_len": -1})

    async def _wandb_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"group": None, "project": None})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        sender = self._sender(request)
        counts = {"accepted": self._run.num_accepted, "refused": dict(sender.refused), "remembered": len(sender.sampled)}
        return web.json_response({**self._state(), "open": self._run.num_open, **counts})

    async def _status_env(self, request: web.Request) -> web.StreamResponse:
        environment = await self._named(request)
        total = sum(max(0.0, each.weight) for each in self._environments.values() if each.is_connected)
        more = {"unallocated_fraction": 1.0, "self_queue_size": 0, "max_group_size": self._run.group_size}
        return web.json_response({**self._state(), **more, "env_weight": max(0.01, environment.weight / (total or 1.0))})

    def _state(self) -> dict[str, int]:
        return {"current_step": self._version, "queue_size": max(0, self._run.most_open - self._run.num_open)}

    async def _named(self, request: web.Request) -> _Registered:
        found = self._registered((await read_body(request)).take("env_id", int), self._sender(request))
        if found is None:
            raise bad("env_id", "is missing")
        return found

    def _registered(self, id: int | None, sender: Sender) -> _Registered | None:
        """One of the sender's own environments. None if no id is given."""
        if id is None:
            return None
        found = self._environments.get(id)
        if found is None or found.sender is not sender:
            raise ApiError(403, f"env_id: {id} is no environment that this token registered", code="env_id")
        return found


def _password(request: web.Request) -> str:
    """That of http://:TOKEN@HOST, for clients that can be given a URL and no header."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
