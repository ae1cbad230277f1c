"""The OpenAI-compatible endpoint of agents: on loopback, with a key for each episode. A key opens its own episode, as long as
that runs; there is nothing else that a request could name."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headrace.engine import (
    MAX_BODY,
    NEUTRAL,
    ApiError,
    Body,
    Chat,
    Events,
    bad,
    bearer,
    bind,
    check,
    error_response,
    explain,
    read_body,
    read_stops,
    unsupported,
    url_of,
)
from headrace.envs.agent_responses import Responses
from headrace.envs.agent_rollouts import AgentCall, Reply, check_last

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from headrace.envs.agents import Session

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SHUTDOWN_SECONDS = 1.0
_MOST = 2**31
SAMPLED_BY_THE_RUN = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed"), (...,))
"""Parameters that are taken and not used: the run's `[sampling]` decides what is explored."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    **SAMPLED_BY_THE_RUN,
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}


class Endpoint:
    """Listens from when it is made until its event loop ends."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, tuple[Session, Responses]] = {}
        self._listener = bind("127.0.0.1", 0, has_token=True)
        self.base_url = f"{url_of(self._listener)}/v1"
        self._serving = asyncio.get_running_loop().create_task(self._serve())  # cancelled with all others at the end of a run

    @property
    def is_open(self) -> bool:
        """Whether it serves this event loop."""
        return not self._serving.done() and self._serving.get_loop() is asyncio.get_running_loop()

    @contextlib.contextmanager
    def admits(self, session: Session) -> Iterator[None]:
        """Answers to the session's key while the block runs."""
        name = _digest(session.api_key)
        self._sessions[name] = session, Responses()
        try:
            yield
        finally:
            del self._sessions[name]
            session.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._around], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._responses),
                web.post("/v1/reward", self._reward),
                web.get("/v1/models", self._models),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        try:
            await runner.setup()
            await web.SockSite(runner, self._listener).start()
            await asyncio.Event().wait()
        except Exception:
            logging.getLogger("headrace").exception("the endpoint of agents has failed")
            raise
        finally:
            await runner.cleanup()
            self._listener.close()

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request: looks for its episode, and tells the agent of a failure as OpenAI does."""
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  (the agent is told, the log has the traceback)
            return error_response(error)

    def _open(self, request: web.Request) -> tuple[Session, Responses]:
        found = self._sessions.get(_digest(bearer(request)))
        if found is None:
            raise ApiError(401, "the key is that of no episode which runs", code="invalid_api_key")
        return found

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._open(request)
        call = read_call(await read_body(request))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}
        if call.stream:
            return await self._stream_chat(request, session, call, {**head, "object": "chat.completion.chunk"})
        reply = await session.call(call)
        message = {"role": "assistant", **_delta(reply), **({"tool_calls": reply.calls} if reply.calls else {})}
        choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(reply)})

    async def _stream_chat(
        self, request: web.Request, session: Session, call: AgentCall, head: dict[str, Any]
    ) -> web.StreamResponse:
        """Content as it is generated, then the tool calls. The stream starts with the first text, so that a call which fails
        before that has a status."""
        events, choice = Events(), {"index": 0, "finish_reason": None, "logprobs": None}
        deltas: list[dict[str, Any]] = [{"role": "assistant"}]
        try:
            async with contextlib.aclosing(_pieces(session, call)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Reply):
                        reply = piece
                        deltas += ({"tool_calls": [{"index": index, **each}]} for index, each in enumerate(reply.calls))
                    else:
                        deltas.append(piece)
                    if not events.prepared:
                        await events.prepare(request)
                    for delta in deltas:
                        await events.send({**head, "choices": [{**choice, "delta": delta}]})
                    deltas.clear()
            await events.send({**head, "choices": [{**choice, "delta": {}, "finish_reason": _reason(reply)}]})
            if call.include_usage:
                await events.send({**head, "choices": [], "usage": _usage(reply)})
        except ConnectionError:
            raise
        except Exception as error:
            if not events.prepared:
                raise
            await events.send(explain(error).body())  # it is too late for a status
        await events.write(b"data: [DONE]\n\n")
        await events.write_eof()
        return events

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session, responses = self._open(request)
        asked = responses.read(await read_body(request), neutral=SAMPLED_BY_THE_RUN)
        answer = responses.answer(asked, await session.call(asked.call))
        if not asked.call.stream:
            return web.json_response(answer)
        events = Events()
        await events.prepare(request)
        for event in responses.events(answer):
            await events.send(event, name=event["type"])
        await events.write_eof()
        return events

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._open(request)
        rewards = (await read_body(request)).rest()
        if not rewards:
            raise bad("reward", 'is missing; post a number, {"reward": 1.0}, or several by name')
        session.reward({name: check(value, float, name) for name, value in rewards.items()})
        return web.json_response({"rewards": session.rewards})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Any name will do, since there is one model; lists must not be empty."""
        self._open(request)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "headrace"}]})


async def _pieces(session: Session, call: AgentCall) -> AsyncGenerator[dict[str, str] | Reply, None]:
    """Pieces of the answer's message as they are generated, then the reply. Closing it cancels the call, unless a piece of it
    was told: then the call goes on without its reader."""
    told: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()
    answering, has_told = asyncio.ensure_future(session.call(call, told.put_nowait)), False
    answering.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (piece := await told.get()) is not None:
            if not has_told:
                session.keep(answering)
            has_told = True
            yield piece
        yield await answering
    finally:
        if not has_told:
            answering.cancel()


def read_call(body: Body) -> AgentCall:
    """A chat's body; what would change the answer and cannot be done is refused by name."""
    chat = Chat.read(body, is_strict_refused=False)
    check_last(chat.messages)
    if body.number("n", 1, low=1, high=_MOST) != 1:
        raise unsupported("n", "must be 1: each choice would be a rollout of its own, so call once for each")
    max_tokens = body.number("max_tokens", _MOST, low=1, high=_MOST)
    max_tokens = body.number("max_completion_tokens", max_tokens, low=1, high=_MOST)
    stops, stream = read_stops(body.take("stop")), body.take("stream", bool, False)
    options = Body(body.take("stream_options", dict, {}))
    include_usage = options.take("include_usage", bool, False)
    options.end({"include_obfuscation": (...,)}, within="stream_options")
    model = body.take("model", str, "policy")
    body.end(_NEUTRAL)
    return AgentCall(chat, model, max_tokens, stops, stream, include_usage)


def _delta(reply: Reply) -> dict[str, Any]:
    """OpenAI's message but its calls; the content is null if it only calls tools."""
    message = reply.message
    found = {"content": message["content"] or (None if reply.calls else "")}
    return {"reasoning_content": message["reasoning_content"], **found} if message.get("reasoning_content") else found


def _reason(reply: Reply) -> str:
    return "length" if reply.is_truncated else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.num_prompt + reply.num_sampled
    return {"prompt_tokens": reply.num_prompt, "completion_tokens": reply.num_sampled, "total_tokens": total}


def _digest(key: str) -> bytes:
    """Keys are looked up by their hashes, so that the time of a look-up tells nothing of them."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
