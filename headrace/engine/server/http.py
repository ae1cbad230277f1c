"""What answers over HTTP have in common: JSON bodies, errors as OpenAI tells them, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headrace.engine.protocol import PromptTooLong, UnusablePrompt
from headrace.engine.server.body import ApiError, Body
from headrace.engine.shaping import GrammarError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from aiohttp.typedefs import Handler, Middleware

MAX_BODY = 16 * 2**20
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}  # of errors, by status
_log = logging.getLogger("headrace.server")


class Events(web.StreamResponse):
    """A stream of server-sent events, which starts with status 200 and may still fail."""

    failed_with = 200

    def __init__(self) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def send(self, event: dict[str, Any]) -> None:
        """One event; those of OpenAI's responses have names."""
        head = f"event: {event['type']}\n" if "type" in event else ""
        await self.write(f"{head}data: {json.dumps(event)}\n\n".encode())


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[dict[str, Any], None],
    *,
    failed: Callable[[ApiError], dict[str, Any]] = ApiError.body,
    last: bytes = b"data: [DONE]\n\n",
) -> Events:
    """Answer with these events. A failure before the first of them gets a status of its own; a later one is told as the event
    that `failed` makes of it."""
    response = Events()
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.send(event)
    except ConnectionError:
        raise
    except Exception as error:
        if not response.prepared:
            raise
        told = explain(error)
        response.failed_with = told.status
        await response.send(failed(told))
    await response.write(last)
    await response.write_eof()
    return response


@web.middleware
async def tell_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around a request: tells the client of a failure as OpenAI does; the log has the traceback of one that is ours."""
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001  (the client is told)
        return error_response(error)


@contextlib.asynccontextmanager
async def listening(
    listener: socket.socket,
    routes: Sequence[web.RouteDef],
    *,
    around: Sequence[Middleware] = (tell_failures,),
    max_body: int = MAX_BODY,
    shutdown_seconds: float = 1.0,
) -> AsyncIterator[None]:
    """Answer requests while the block runs; at its end, end open streams and free the port. `around` each: the first is the
    outermost."""
    app = web.Application(middlewares=around, client_max_size=max_body)
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_seconds)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()
        listener.close()


class LoopServer:
    """Listens from when it is made until its event loop ends."""

    def __init__(
        self,
        listener: socket.socket,
        routes: Sequence[web.RouteDef],
        *,
        name: str,
        around: Sequence[Middleware] = (tell_failures,),
        max_body: int = MAX_BODY,
    ) -> None:
        serving = self._serve(listening(listener, routes, around=around, max_body=max_body), name)
        self._serving = asyncio.get_running_loop().create_task(serving)  # cancelled with all others at the end of a run

    @property
    def is_open(self) -> bool:
        """Whether it serves this event loop."""
        return not self._serving.done() and self._serving.get_loop() is asyncio.get_running_loop()

    async def _serve(self, server: contextlib.AbstractAsyncContextManager[None], name: str) -> None:
        try:
            async with server:
                await asyncio.Event().wait()
        except Exception:
            logging.getLogger("headrace").exception("%s has failed", name)
            raise


def bearer(request: web.Request) -> str:
    """The token that a request sends, or an empty text."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


async def read_body(request: web.Request) -> Body:
    """A JSON body. Other content types are refused, so that web pages cannot post here through a browser."""
    raw = await request.read()
    if raw and request.content_type != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {request.content_type}")
    return Body.parse(raw)


def error_response(error: Exception) -> web.Response:
    told = explain(error)
    headers = dict(_HEADERS.get(told.status, {}))
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = error.headers["Allow"]
    if isinstance(error, web.RequestPayloadError):  # the rest cannot be read, so the connection takes no more requests
        headers["Connection"] = "close"
    return web.json_response(told.body(), status=told.status, headers=headers)


def explain(error: Exception) -> ApiError:
    """What a client is told about a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, error.text or error.reason)
    if isinstance(error, web.RequestPayloadError):
        return ApiError(400, "the body cannot be read: it is not what its Content-Encoding or Transfer-Encoding says")
    if isinstance(error, UnusablePrompt):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return ApiError(400, str(error), param="prompt", code=code)
    if isinstance(error, GrammarError):
        return ApiError(400, f"the grammar cannot be followed: {error}", code="grammar_failed")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed: {type(error).__name__}")
