"""The engine behind HTTP. The server waits for the engine's increments and never decodes in its own thread.

If an API token is set, everything but `/health` needs it. `/control/` needs the control token, and is closed if none is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headrace.engine.protocol import PromptTooLong, UnusablePrompt
from headrace.engine.server.answers import Answer
from headrace.engine.server.body import ApiError, Body
from headrace.engine.server.calls import Calls
from headrace.engine.server.control import Control
from headrace.engine.server.metrics import Metrics
from headrace.engine.server.requests import parse_chat, parse_completion
from headrace.engine.server.text import ServedModel
from headrace.records import Rollout

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from transformers import PreTrainedTokenizerBase

    from headrace.engine.protocol import Engine, EngineState
    from headrace.engine.server.calls import Piece
    from headrace.engine.server.requests import CompletionRequest

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 16 * 2**20
_SHUTDOWN_SECONDS = 5.0
_CLIENT_LEFT = 499
_log = logging.getLogger("headrace.server")


def make_app(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_name: str,
    stop_ids: tuple[int, ...],
    context: int,
    vocabulary: int,
    api_token: str | None = None,
    control_token: str | None = None,
    probe: Callable[[], Awaitable[object]] | None = None,
    health_deadline: float = 10.0,
    stall_deadline: float = 600.0,
) -> web.Application:
    """The application over an engine that is already decoding. `probe` (default: `engine.state`) returns if the decode loop is
    alive: `/health` waits `health_deadline` seconds for it; after `stall_deadline` seconds the engine has failed and all
    requests end."""
    served = ServedModel(tokenizer, model_name=model_name, context=context, vocabulary=vocabulary, stop_ids=tuple(stop_ids))
    server = Server(engine, served, probe=probe, health_deadline=health_deadline, stall_deadline=stall_deadline)
    middlewares = [server.observe, _explain, _token_check(api_token, control_token)]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[SERVER] = server
    app.cleanup_ctx.append(server.watching)
    app.on_shutdown.append(server.on_shutdown)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/v1/models/{name:.+}", server.model)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics_page)
    control = Control(engine, served)
    for path, answer in control.posts.items():
        app.router.add_post(path, _json_handler(answer))
    app.router.add_get("/control/state", _json_handler(control.state))
    return app


@contextlib.asynccontextmanager
async def listening(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Answer requests while the block runs; at its end, end open streams and free the port."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()
        listener.close()


class Server:
    """The handlers and the state they share."""

    def __init__(
        self,
        engine: Engine,
        served: ServedModel,
        *,
        probe: Callable[[], Awaitable[object]] | None,
        health_deadline: float,
        stall_deadline: float,
    ) -> None:
        self.failed = asyncio.Event()  # set when the engine has failed; its owner then stops the server
        self.failure = ""
        self._engine, self._served, self._probe = engine, served, probe or engine.state
        self._health_deadline, self._stall_deadline = health_deadline, stall_deadline
        self._calls = Calls(engine, served)
        self._metrics = Metrics()
        self._started = int(time.time())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        ask = parse_completion(await read_body(request), self._served)
        return await self._answer(request, ask, name=f"cmpl-{uuid.uuid4().hex}")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        ask = parse_chat(await read_body(request), self._served)
        return await self._answer(request, ask, name=f"chatcmpl-{uuid.uuid4().hex}")

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name != self._served.model_name:
            raise ApiError(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
        return web.json_response(self._card())

    async def health(self, request: web.Request) -> web.StreamResponse:
        try:
            state = await self._state()
        except Exception as error:  # noqa: BLE001  (the engine's failure is the answer)
            reason = self.failure or str(error) or type(error).__name__
            return web.json_response({"status": "failing", "reason": reason}, status=503)
        return web.json_response({"status": "ok", "running": state.running, "waiting": state.waiting, "slots": state.slots})

    async def metrics_page(self, request: web.Request) -> web.StreamResponse:
        try:
            state = await self._state()
        except Exception:  # noqa: BLE001  (the page then says that the engine is not up)
            state = None
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.render(state).encode(), headers=headers)

    @web.middleware
    async def observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost middleware: counts every request by its status."""
        started = time.perf_counter()
        resource = request.match_info.route.resource
        endpoint = "other" if resource is None else resource.canonical
        status = _CLIENT_LEFT  # unless the handler answers
        try:
            response = await handler(request)
            status = response.failed_with if isinstance(response, Events) else response.status
            return response
        finally:
            self._metrics.requests[endpoint, status] += 1
            if endpoint.endswith("/completions"):
                self._metrics.request.observe(time.perf_counter() - started)

    async def watching(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the engine while the application runs."""
        watch = asyncio.create_task(self._watch())
        yield
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)

    async def on_shutdown(self, app: web.Application) -> None:
        self._calls.end(ApiError(503, "the server is shutting down", code="shutting_down"))

    def fail(self, reason: str) -> None:
        """The engine is lost: end all requests instead of letting them wait."""
        self.failure = f"the engine failed: {reason}"
        self._calls.end(ApiError(503, self.failure, code="engine_failed"))
        self.failed.set()

    async def _watch(self) -> None:
        """Probes the decode loop every second; if no answer comes, the engine has failed."""
        while True:
            try:
                async with asyncio.timeout(self._stall_deadline):
                    await self._probe()
            except Exception as error:  # noqa: BLE001  (the engine's end, whatever its reason)
                is_late = isinstance(error, TimeoutError)
                self.fail(f"no answer for {self._stall_deadline:g} s" if is_late else f"{type(error).__name__}: {error}")
                return
            await asyncio.sleep(1.0)

    async def _state(self) -> EngineState:
        if self.failure:
            raise RuntimeError(self.failure)
        try:
            async with asyncio.timeout(self._health_deadline):
                await self._probe()
                return await self._engine.state()
        except TimeoutError as error:
            raise TimeoutError(f"the engine has not answered for {self._health_deadline:g} s") from error

    def _card(self) -> dict[str, Any]:
        name, context = self._served.model_name, self._served.context
        return {"id": name, "object": "model", "created": self._started, "owned_by": "headrace", "max_model_len": context}

    async def _answer(self, request: web.Request, ask: CompletionRequest, *, name: str) -> web.StreamResponse:
        prompt_logprobs = await self._score_prompts(ask) if ask.echo and ask.logprobs else []
        answer = Answer(ask, self._served, id=name, prompt_logprobs=prompt_logprobs)
        async with contextlib.aclosing(self._calls.pieces(ask, name=name)) as pieces:
            if ask.stream:
                return await self._stream(request, answer, pieces)
            return web.json_response(answer.whole([piece async for piece in pieces]))

    async def _score_prompts(self, ask: CompletionRequest) -> list[list[float | None]]:
        rollouts = [Rollout.from_prompt(list(ids), id=f"echo-{index}") for index, ids in enumerate(ask.prompts)]
        return [[None, *values[1:].tolist()] for values in await self._engine.score(rollouts)]

    async def _stream(self, request: web.Request, answer: Answer, pieces: AsyncGenerator[Piece, None]) -> web.StreamResponse:
        """Server-sent events. A failure before the first piece still gets its own status."""
        started = time.perf_counter()
        first = await anext(pieces)
        self._metrics.first_token.observe(time.perf_counter() - started)
        response = Events(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await _send(response, answer.chunk(first))
            async for piece in pieces:
                await _send(response, answer.chunk(piece))
            if answer.ask.include_usage:
                await _send(response, answer.last_chunk())
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001  (reported inside the stream: it is too late for a status)
            told = explain(error)
            response.failed_with = told.status
            await _send(response, told.body())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class Events(web.StreamResponse):
    """A stream, which starts with status 200 and may still fail."""

    failed_with = 200


SERVER: web.AppKey[Server] = web.AppKey("server", Server)


def _token_check(api_token: str | None, control_token: str | None) -> Any:  # noqa: ANN401  (aiohttp's type of a middleware)
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/control"):
            if not control_token:
                message = "control is closed: no control token is set; start the server with HEADRACE_CONTROL_TOKEN"
                raise ApiError(403, message, code="control_closed")
            _require(request, control_token, "the control token")
        elif api_token and request.path != "/health":
            _require(request, api_token, "the API token")
        return await handler(request)

    return check


def _require(request: web.Request, token: str, what: str) -> None:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token.encode())
    if kind.lower() != "bearer" or not is_right:
        raise ApiError(401, f"send {what} as `Authorization: Bearer …`", code="invalid_api_key")


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every failure into OpenAI's error object."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except web.HTTPException as error:
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
        told = ApiError(error.status, f"{request.method} {request.path}: {error.text or error.reason}")
    except web.RequestPayloadError:  # the rest cannot be read either, so the connection takes no more requests
        headers["Connection"] = "close"
        told = ApiError(400, "the body cannot be read: it is not what its Content-Encoding or Transfer-Encoding says")
    except Exception as error:  # noqa: BLE001  (the client is told, the log has the traceback)
        told = explain(error)
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(told.body(), status=told.status, headers=headers)


def explain(error: Exception) -> ApiError:
    """What a client is told about a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnusablePrompt):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return ApiError(400, str(error), param="prompt", code=code)
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}")


async def read_body(request: web.Request) -> Body:
    """A JSON body. Other content types are refused, so that web pages cannot post here through a browser."""
    raw = await request.read()
    if raw and request.content_type != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {request.content_type}")
    return Body.parse(raw)


def _json_handler(answer: Callable[[Body], Awaitable[dict[str, Any]]]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(await answer(await read_body(request)))

    return handler


async def _send(response: web.StreamResponse, event: dict[str, Any] | None) -> None:
    if event is not None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
