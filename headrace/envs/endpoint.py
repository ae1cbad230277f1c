"""The OpenAI-compatible endpoint of agents: on loopback, with a key for each episode. A key opens its own episode, as long as
that runs; there is nothing else that a request could name."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from headrace.engine import (
    NEUTRAL,
    ApiError,
    Body,
    Chat,
    LoopServer,
    bad,
    bearer,
    bind,
    check,
    read_body,
    read_stops,
    read_stream_options,
    stream_events,
    unsupported,
    url_of,
)
from headrace.envs.agent_responses import ResponseEvents, Responses
from headrace.envs.agent_rollouts import AgentCall, Reply, check_last

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from headrace.envs.agents import Session

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

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


class Endpoint(LoopServer):
    """All episodes of an event loop share one."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, tuple[Session, Responses]] = {}
        listener = bind("127.0.0.1", 0, has_token=True)
        self.base_url = f"{url_of(listener)}/v1"
        routes = [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/responses", self._responses),
            web.post("/v1/reward", self._reward),
            web.get("/v1/models", self._models),
        ]
        super().__init__(listener, routes, name="the endpoint of agents")

    @contextlib.contextmanager
    def admits(self, session: Session) -> Iterator[None]:
        """Answers to the session's key while the block runs."""
        name = digest_of(session.api_key)
        self._sessions[name] = session, Responses()
        try:
            yield
        finally:
            del self._sessions[name]
            session.close()

    def _open(self, request: web.Request) -> tuple[Session, Responses]:
        found = self._sessions.get(digest_of(bearer(request)))
        if found is None:
            raise ApiError(401, "the key is that of no episode which runs", code="invalid_api_key")
        return found

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, _ = self._open(request)
        call = read_call(await read_body(request))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": call.model}
        if call.stream:
            return await _stream(request, session, call, _Chunks(call, {**head, "object": "chat.completion.chunk"}))
        reply = await session.call(call)
        message = {"role": "assistant", **_delta(reply), **({"tool_calls": reply.calls} if reply.calls else {})}
        choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(reply)})

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        session, responses = self._open(request)
        asked = responses.read(await read_body(request), neutral=SAMPLED_BY_THE_RUN)
        if asked.call.stream:
            return await _stream(request, session, asked.call, ResponseEvents(responses, asked))
        return web.json_response(responses.answer(asked, await session.call(asked.call)))

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


class _Chunks:
    """The stream of a chat: content as it is generated, then the tool calls."""

    last = b"data: [DONE]\n\n"

    def __init__(self, call: AgentCall, head: dict[str, Any]) -> None:
        self._call, self._head, self._has_begun = call, head, False

    def of(self, piece: dict[str, str] | Reply) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            yield self._chunk({"role": "assistant"})
        self._has_begun = True
        if not isinstance(piece, Reply):
            yield self._chunk(piece)
            return
        for index, each in enumerate(piece.calls):
            yield self._chunk({"tool_calls": [{"index": index, **each}]})
        yield self._chunk({}, _reason(piece))
        if self._call.include_usage:
            yield {**self._head, "choices": [], "usage": _usage(piece)}

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


async def _stream(
    request: web.Request, session: Session, call: AgentCall, told: _Chunks | ResponseEvents
) -> web.StreamResponse:
    """Starts with the first text, so that a call which fails before that has a status."""

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(_pieces(session, call)) as pieces:
            async for piece in pieces:
                for event in told.of(piece):
                    yield event

    return await stream_events(request, events(), failed=told.failed, last=told.last)


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
    stops, stream, include_usage = read_stops(body.take("stop")), body.take("stream", bool, False), read_stream_options(body)
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


def digest_of(key: str) -> bytes:
    """Keys are looked up by their hashes, so that the time of a look-up tells nothing of them."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
