"""The engine behind HTTP. The server waits for the engine's increments and never decodes in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headrace.engine.server.address import is_loopback
from headrace.engine.server.body import ApiError, bad, check_token_ids, shown
from headrace.engine.server.completion import Completion
from headrace.engine.server.grammar import Grammars
from headrace.engine.server.http import Events, bearer, listening, read_body, stream_events, tell_failures
from headrace.engine.server.metrics import Metrics
from headrace.engine.server.requests import MAX_CHOICES, CompletionRequest
from headrace.errors import in_words
from headrace.partial import Interrupt
from headrace.records import Rollout

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from aiohttp.typedefs import Handler

    from headrace.engine.protocol import EngineState, ServedEngine
    from headrace.engine.request import HeldAdapter
    from headrace.engine.server.text import ServedModel

_SHUTDOWN_SECONDS = 5.0
_CLIENT_LEFT = 499
_SCORED_AT_ONCE = 8192  # tokens


class CompletionServer:
    """Serves an engine that is already decoding. `probe` (default: `engine.state`) returns if the decode loop is alive:
    `/health` waits `health_deadline` seconds for it; after `stall_deadline` seconds the engine has failed and all requests end.

    An API token, if set, is needed for everything but `/health`. `/control/` needs the control token; without one it is closed.
    Without an API token the Host header must name loopback or `host`: else a web page could have its own name resolve to
    127.0.0.1, and a browser would let it read our answers (DNS rebinding).

    At most `max_choices` are in flight, decoded or waiting; what is more gets a 429.
    """

    def __init__(
        self,
        engine: ServedEngine,
        served: ServedModel,
        *,
        api_token: str | None = None,
        control_token: str | None = None,
        host: str = "localhost",
        max_choices: int = MAX_CHOICES,
        probe: Callable[[], Awaitable[object]] | None = None,
        health_deadline: float = 10.0,
        stall_deadline: float = 600.0,
    ) -> None:
        self.failed = asyncio.Event()  # set when the engine has failed; its owner then stops the server
        self.failure = ""
        self._engine, self._served, self._probe = engine, served, probe or engine.state
        self._api_token, self._control_token, self._host = api_token, control_token, host
        self._num_choices, self._max_choices = 0, max_choices
        self._health_deadline, self._stall_deadline = health_deadline, stall_deadline
        self._grammars = Grammars(served)
        self._in_flight: set[Completion] = set()
        self._ended: ApiError | None = None  # why requests are no longer answered
        self._is_paused = False
        self._metrics = Metrics()
        self._started = int(time.time())

    @contextlib.asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer requests while the block runs; at its end, end open streams and free the port."""
        routes = [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._completions),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{name:.+}", self._models),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics_page),
            web.post("/control/pause", self._pause),
            web.post("/control/resume", self._resume),
            web.post("/control/score", self._score),
            web.get("/control/state", self._control_state),
        ]
        async with listening(
            listener, routes, around=[self._count, tell_failures, self._check], shutdown_seconds=_SHUTDOWN_SECONDS
        ):
            watch = asyncio.create_task(self._watch())
            try:
                yield
            finally:
                watch.cancel()
                self._end(ApiError(503, "the server is shutting down", code="shutting_down"))

    def fail(self, reason: str) -> None:
        """The engine is lost: end all requests instead of letting them wait. The first reason stands."""
        if not self.failure:
            self.failure = f"the engine failed: {reason}"
            self._end(ApiError(503, self.failure, code="engine_failed"))
            self.failed.set()

    def _end(self, error: ApiError) -> None:
        """End every request in flight, and every later one, with this error."""
        self._ended = error
        for completion in self._in_flight:
            completion.fail(error)

    async def _watch(self) -> None:
        """Probes the decode loop every second; if no answer comes, the engine has failed."""
        try:
            while True:
                await self._state(self._stall_deadline)
                await asyncio.sleep(1.0)
        except Exception as error:  # noqa: BLE001  (the engine's end, whatever its reason)
            self.fail(in_words(error))

    async def _state(self, deadline: float) -> EngineState:
        """Raises if the engine has failed, or does not answer in time."""
        if self.failure:
            raise RuntimeError(self.failure)
        try:
            async with asyncio.timeout(deadline):
                await self._probe()
                return await self._engine.state()
        except TimeoutError as error:
            raise TimeoutError(f"no answer for {deadline:g} s") from error

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        resource = request.match_info.route.resource
        endpoint = "other" if resource is None else resource.canonical
        status = _CLIENT_LEFT  # unless there is an answer
        try:
            response = await handler(request)
            status = response.failed_with if isinstance(response, Events) else response.status
            return response
        finally:
            self._metrics.requests[endpoint, status] += 1
            if endpoint.endswith("/completions"):
                self._metrics.request.observe(time.perf_counter() - started)

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whether its client may ask this."""
        host, is_control = request.headers.get("Host", ""), request.path.startswith("/control")
        if not self._api_token and not is_loopback(host, own=self._host):
            message = f"without an API token this server answers to localhost, not to {shown(host)!r}; set HEADRACE_API_TOKEN"
            raise ApiError(403, message, code="host_not_allowed")
        token, what = (self._control_token, "control") if is_control else (self._api_token, "API")
        if is_control and not token:
            message = "control is closed: no control token is set; start the server with HEADRACE_CONTROL_TOKEN"
            raise ApiError(403, message, code="control_closed")
        given = bearer(request).encode(errors="surrogateescape")
        if token and request.path != "/health" and not hmac.compare_digest(given, token.encode()):
            raise ApiError(401, f"send the {what} token as `Authorization: Bearer …`", code="invalid_api_key")
        return await handler(request)

    # What everyone may ask

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        is_chat = request.path == "/v1/chat/completions"
        with self._admitted(1):  # bodies are bounded in number too
            parsed = CompletionRequest(await read_body(request), self._served, is_chat=is_chat)
            if parsed.grammar is not None:
                grammar = await self._grammars.compile(parsed.grammar)
                parsed.shaping = dataclasses.replace(parsed.shaping, grammar=grammar)
        with self._admitted(len(parsed.prompts) * parsed.num_choices):
            scores = await self._logprobs(parsed.prompts, parsed.held) if parsed.echo and parsed.logprobs else ()
            if self._ended is not None:
                raise self._ended
            completion = Completion(parsed, self._served, prompt_logprobs=scores)
            self._in_flight.add(completion)
            try:
                async with contextlib.aclosing(completion.choices(self._engine)) as choices:
                    if parsed.stream:
                        return await stream_events(request, self._events(completion, choices))
                    found = [choice async for choice in choices]
                    found.sort(key=lambda choice: choice["index"])
                    return web.json_response(completion.answer(found, is_last=True))
            finally:
                self._in_flight.discard(completion)

    @contextlib.contextmanager
    def _admitted(self, num_choices: int) -> Iterator[None]:
        """Counts choices that are in flight, and refuses those beyond the limit. An idle server takes any request."""
        if self._num_choices and self._num_choices + num_choices > self._max_choices:
            message = f"the queue is full: {self._num_choices} completions are decoded or waiting; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        self._num_choices += num_choices
        try:
            yield
        finally:
            self._num_choices -= num_choices

    async def _events(
        self, completion: Completion, choices: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        started = time.perf_counter()
        is_first = True
        async for choice in choices:
            if is_first:
                self._metrics.first_token.observe(time.perf_counter() - started)
            is_first = False
            yield completion.answer([choice])
        if completion.request.include_usage:
            yield completion.answer([], is_last=True)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """A list of the model and its adapters, or one of them by its name."""
        served = self._served
        card = {"object": "model", "created": self._started, "owned_by": "headrace", "max_model_len": served.context}
        cards = {served.model_name: {"id": served.model_name, **card}}
        cards |= {name: {"id": name, **card, "parent": served.model_name} for name in served.adapters}
        if "name" not in request.match_info:
            return web.json_response({"object": "list", "data": list(cards.values())})
        if request.match_info["name"] not in cards:
            raise ApiError(404, "this model is not served here", param="model", code="model_not_found")
        return web.json_response(cards[request.match_info["name"]])

    async def _health(self, request: web.Request) -> web.StreamResponse:
        try:
            state = await self._state(self._health_deadline)
        except Exception as error:  # noqa: BLE001  (the engine's failure is the answer)
            return web.json_response({"status": "failing", "reason": self.failure or in_words(error)}, status=503)
        return web.json_response({"status": "ok", "running": state.running, "waiting": state.waiting, "slots": state.slots})

    async def _metrics_page(self, request: web.Request) -> web.StreamResponse:
        try:
            state = await self._state(self._health_deadline)
        except Exception:  # noqa: BLE001  (the page then says that the engine is not up)
            state = None
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.render(state).encode(), headers=headers)

    async def _logprobs(self, sequences: Sequence[Sequence[int]], held: HeldAdapter | None = None) -> list[list[float | None]]:
        """The logprob of each token given those before it, at temperature 1; None for the first."""
        rollouts = [Rollout.from_prompt(list(ids), id=f"score-{index}") for index, ids in enumerate(sequences)]
        options = {} if held is None else {"held": held}
        scores = list[list[float | None]]()
        while len(scores) < len(rollouts):  # a few at a time: other requests are decoded in between
            ends = itertools.accumulate(map(len, rollouts[len(scores) :]))
            some = rollouts[len(scores) :][: max(1, sum(end <= _SCORED_AT_ONCE for end in ends))]
            scores += [[None, *values[1:].tolist()] for values in await self._engine.score(some, **options)]
        return scores

    # What only the holder of the control token may ask

    async def _control_state(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({**dataclasses.asdict(await self._engine.state()), "paused": self._is_paused})

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        """Stop decoding; with `drain`, answers once rollouts in flight have finished."""
        body = await read_body(request)
        interrupt = body.take("interrupt", default="keep")
        choices = [choice.value for choice in Interrupt if choice is not Interrupt.LEASE]  # nothing is trained here
        body.end()
        if interrupt not in choices:
            raise bad("interrupt", f"must be one of {', '.join(choices)}")
        await self._engine.pause(Interrupt(interrupt))
        self._is_paused = True
        return await self._control_state(request)

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        (await read_body(request)).end()
        await self._engine.resume()
        self._is_paused = False
        return await self._control_state(request)

    async def _score(self, request: web.Request) -> web.StreamResponse:
        """The version is null if new weights came meanwhile."""
        body = await read_body(request)
        given = body.take("token_ids")
        body.end()
        if not isinstance(given, list) or not given:
            raise bad("token_ids", "must be a list of token ids or a list of such lists, and not empty")
        lists = given if isinstance(given[0], list) else [given]
        if len(lists) > MAX_CHOICES:
            raise bad("token_ids", f"{len(lists)} sequences are more than {MAX_CHOICES} in one request")
        for ids in lists:
            num_tokens = len(check_token_ids(ids, "token_ids", vocabulary=self._served.vocabulary))
            if not 0 < num_tokens <= self._served.context:
                raise bad("token_ids", f"a sequence of {num_tokens} tokens; it must have 1 to {self._served.context}")
        before = (await self._engine.state()).version
        logprobs = await self._logprobs(lists)
        after = (await self._engine.state()).version
        return web.json_response({"version": before if before == after else None, "logprobs": logprobs})
