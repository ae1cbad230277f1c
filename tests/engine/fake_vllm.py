"""A server that talks like vLLM and draws tokens by counting: to be late, to answer nonsense, to die at a chosen moment."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from headrace.engine.vllm.api import VllmApi
from headrace.engine.vllm.engine import VllmEngine
from headrace.model.weights import StagedWeights
from headrace.observe import Timeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from headrace.engine.vllm.handover import Handover

OLD, NEW = "0.26.0", "0.32.0"
_PATHS = ("/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache")
_REQUEST = {"properties": {"cache_salt": {}, "token_ids": {}}}


@dataclass
class Fake:
    """What it does, and what was asked of it. Token n of a call is 10 + n; its logprob is always the same."""

    version: str = NEW
    paths: tuple[str, ...] = _PATHS
    pace: float = 0.002
    """Seconds between two tokens."""
    fault: str = ""
    """Of a generate call: `garbage`, `broken off`, `refused`, `refused late`, `failed`, `silent`: it never says anything,
    `restarted`: it knows no adapter any more, or `unnamed`: which weights drew what it never says."""
    logprob: float | None = -0.5
    candidates: tuple[tuple[int, float], ...] = ()
    """Of which as many come with every token as are requested, and their logprobs."""
    most_candidates: int = 1 << 30
    """That a call may request (`--max-logprobs`)."""
    failing: set[str] = field(default_factory=set)
    """Paths that answer with status 500."""
    hanging: set[str] = field(default_factory=set)
    """Paths that never answer."""
    resets: int = 0
    """Calls that find their connection cut before any of the answer."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    connections: list[Any] = field(default_factory=list)
    """That of every call."""
    weight_version: str = "default"
    is_sampled_by: list[list[str]] = field(default_factory=list)
    """Of each call, the weights of each token."""
    together: int = 1
    """Tokens in an event, where the call does not say."""
    routed: tuple[int, int] = (0, 0)
    """Decoder layers and experts per token of the routing that it reports (`--enable-return-routed-experts`), if any: token t
    is sent to expert t + layer + place."""
    holds_at: int = -1
    """The token before which every call stands still."""
    _go_on: asyncio.Event = field(default_factory=asyncio.Event)
    _aborts: int = 0
    _num_reloads: int = 0
    _num_active: int = 0

    @property
    def is_new(self) -> bool:
        return self.version == NEW

    def app(self) -> web.Application:
        self._go_on.set()
        app = web.Application(middlewares=[self._connect])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/openapi.json", self._schema)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/get_world_size", self._world_size)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/{call}", self._call)
        app.router.add_post("/v1/{call}", self._call)
        return app

    @web.middleware
    async def _connect(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        self.connections.append(request.transport)
        if self.resets and request.transport is not None:
            self.resets -= 1
            self.asked.append((request.path, "reset"))
            request.transport.abort()
            return web.Response()
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=500 if "/health" in self.failing else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 64}]})

    async def _schema(self, _: web.Request) -> web.Response:
        paths = {path: {} for path in (*self.paths, *(("/update_weight_version",) if self.is_new else ()))}
        schemas = {"GenerateRequest": _REQUEST}
        if self.is_new:
            schemas["GenerateTokensStreamChoice"] = {"properties": {"weight_versions": {}}}
        return web.json_response({"paths": paths, "components": {"schemas": schemas}})

    async def _world_size(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": 2})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n')

    async def _call(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, {**request.query, **body}))
        if request.path in self.hanging:
            await asyncio.sleep(3600)
        if request.path in self.failing:
            return web.json_response({"error": {"message": "the disk is full"}}, status=500)
        if request.path == "/pause":
            while request.query["mode"] == "wait" and self._num_active:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            self._go_on.clear()
            self._aborts += request.query["mode"] == "abort"
        elif request.path == "/resume":
            self._go_on.set()
        elif request.path == "/update_weight_version":
            self.weight_version = body["new_version"]
        elif request.path == "/collective_rpc" and not self.is_new:
            self._num_reloads += 1
            self.weight_version = f"life:{self._num_reloads - 1}"
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(("generate", body))
        if self.fault == "restarted":
            return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)
        if self.fault == "refused":
            return web.json_response({"error": {"message": "too long for me"}}, status=400)
        if "prompt_logprobs" in body["sampling_params"]:
            scored = [{str(token): {"logprob": self.logprob}} for token in body["token_ids"]]
            return web.json_response({"prompt_logprobs": [None, *scored[1:]]})
        if (asked := body["sampling_params"]["logprobs"]) > self.most_candidates:
            told = f"Requested sample logprobs of {asked}, which is greater than max allowed: {self.most_candidates}"
            return web.json_response({"error": {"message": told}}, status=400)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.fault == "silent":
            await asyncio.sleep(3600)
        self._num_active += 1
        try:
            await self._draw(body, answer, request)
        finally:
            self._num_active -= 1
        return answer

    async def _draw(self, body: dict[str, Any], answer: web.StreamResponse, request: web.Request) -> None:
        versions, unsaid, aborts = [], [], self._aborts
        self.is_sampled_by.append(versions)
        most, every = body["sampling_params"]["max_tokens"], body["sampling_params"].get("stream_interval", self.together)
        for place in range(most):
            await asyncio.sleep(self.pace)
            while self.holds_at == place and self._aborts == aborts and self._go_on.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            if unsaid and not self._go_on.is_set() and every == self.together:
                await self._say(answer, unsaid, None, versions, body)
                unsaid = []
            while not self._go_on.is_set() and self._aborts == aborts:  # noqa: ASYNC110  (two things may end it)
                await asyncio.sleep(0.002)
            if self._aborts > aborts:
                if self.is_new and self.fault != "unnamed":
                    await self._say(answer, unsaid, "abort", versions, body)
                break
            if place == 3 and self.fault:
                await self._misbehave(answer, request)
            versions.append(self.weight_version)
            unsaid.append(place)
            if place == 0 or place + 1 == most or len(unsaid) >= every:
                await self._say(answer, unsaid, "length" if place + 1 == most else None, versions, body)
                unsaid = []
        await answer.write(b"data: [DONE]\n\n")

    def _candidates(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        sent = self.candidates[: body["sampling_params"]["logprobs"]]
        return [{"token_id": token, "logprob": logprob} for token, logprob in sent]

    async def _misbehave(self, answer: web.StreamResponse, request: web.Request) -> None:
        if self.fault == "garbage":
            await answer.write(b'data: {"choices": [{"token_ids": [7, 8], "logprobs": null}]}\n\n')
        elif self.fault == "refused late":
            await answer.write(b'data: {"error": {"message": "Requested sample logprobs of 300", "code": 400}}\n\n')
        elif self.fault == "failed":
            await answer.write(b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n')
        elif self.fault == "broken off" and request.transport is not None:
            request.transport.abort()

    async def _say(
        self, answer: web.StreamResponse, places: list[int], finish: str | None, versions: list[str], body: dict[str, Any]
    ) -> None:
        ids = [10 + place for place in places]
        content = [{"token_id": i} if self.is_new else {"token": f"token_id:{i}"} for i in ids]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {
                "content": [{**each, "logprob": self.logprob, "top_logprobs": self._candidates(body)} for each in content]
            },
            "finish_reason": finish,
        }
        if self.is_new and finish is not None and self.fault != "unnamed":
            starts = [at for at in range(len(versions)) if at == 0 or versions[at] != versions[at - 1]]
            stops = [*starts[1:], len(versions)][: len(starts)]  # none if it was aborted before its first token
            choice["weight_versions"] = [
                {"version": versions[a], "start": a, "end": b} for a, b in zip(starts, stops, strict=True)
            ]
        if finish is not None and all(self.routed):
            choice["routed_experts"] = self._routing(len(body["token_ids"]) + len(versions) - 1)
        await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def _routing(self, num_tokens: int) -> str:
        file = io.BytesIO()
        np.save(file, np.indices((num_tokens, *self.routed)).sum(axis=0).astype(np.uint8))
        return base64.b64encode(file.getvalue()).decode()


@contextlib.asynccontextmanager
async def serving(fake: Fake) -> AsyncIterator[str]:
    """Its address."""
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def talking(url: str, **options: Any) -> AsyncIterator[VllmApi]:
    api = VllmApi(url, **options)
    try:
        yield api
    finally:
        await api.close()


@contextlib.asynccontextmanager
async def engine_over(
    fake: Fake, model: Any, *, handover: Handover, staged: Any = None, **options: Any
) -> AsyncIterator[VllmEngine]:
    """An engine that holds nothing yet. `staged`: what is updated, by default all of the model."""
    async with serving(fake) as url, talking(url, log="server.log") as api:
        about = await api.about()
        await handover.open(api, about.version)
        engine = VllmEngine(
            api,
            about,
            name="engine-0",
            **{"slots": 2, "context": 64, "vocabulary": 200},
            model=model,
            staged=StagedWeights(staged or model, in_place=False),
            handover=handover,
            timeline=Timeline("engine"),
            **options,
        )
        engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def grown(engine: VllmEngine, num_tokens: int) -> None:
    """Until the engine has sampled so many tokens."""
    while (await engine.state()).tokens < num_tokens:  # noqa: ASYNC110  (an engine has no event for each number)
        await asyncio.sleep(0.001)
