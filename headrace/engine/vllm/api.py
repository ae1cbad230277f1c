"""vLLM's HTTP interface: paths, bodies and answers, of every supported release. No other file knows them.

The server is a stock `vllm serve` with VLLM_SERVER_DEV_MODE=1, which opens pausing, weight updates and calls to its workers.
Tokens go in and out over `/inference/v1/generate`. `server_checks` finds out what a release lacks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from headrace.records import Array, Sampling

_SHORT = 60.0  # seconds for a quick call
_UPDATE_SECONDS = 1800.0  # for a large model to load new weights
_SCORE_SECONDS = 600.0
_CONNECT_SECONDS = 60.0  # a server whose interpreter is busy accepts connections late
_MISSED = 5  # failed health checks in a row after which a server counts as dead
_RETRY_SECONDS = 0.1  # before the one retry of a GET that could not connect
_LONGEST_LINE = 64 << 20  # bytes of a stream's event: those with the whole vocabulary's logprobs are long
_MISSING = 1e-3  # the most probability that may lie outside a sampling mask before it counts as incomplete
_LOST = -9998.0  # vLLM writes -9999 for minus infinity and for NaN
_GENERATE = "/inference/v1/generate"
_LOAD_ADAPTER = "/v1/load_lora_adapter"


class VllmError(RuntimeError):
    """A call to a server failed; the message names the server, the call and the server's log."""


class VllmRefused(VllmError):
    """The server refused the call; its state is unchanged."""


class MaskIncomplete(VllmRefused):
    """It is not known which tokens could have been sampled."""


class VllmGone(VllmError):
    """The server does not answer, or answers nonsense: it counts as dead."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event of a stream."""

    token_ids: list[int]
    logprobs: list[float]
    masks: list[Array | None] | None = None
    """For each token, the ids that could have been sampled, if candidates were requested; None if there may be more of them
    than candidates. That depends on the tokens before it alone, never on the one sampled."""
    finish: str | None = None
    """`stop`, `length`, `abort`; None while more may come."""
    spans: Sequence[tuple[str, int, int]] = ()
    """(weight version, start, stop) over all of the call's tokens, if the server reports them at the end."""
    entropies: list[float] | None = None
    """Of the distribution of each token, in nats, if candidates were requested; true where the token's mask is complete."""
    routing: Array | None = None
    """[prompt and sampled tokens but the last, decoder layers, top_k]: the experts they were sent to, at a call's end; 0 in
    layers without experts."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself."""

    version: str
    interface: frozenset[str]
    """Its paths, and the fields of its messages as `message.field`."""


class VllmApi:
    """One server, used from one event loop. Every call has its own connection: a server closes idle ones, and a call sent at
    that moment would be lost."""

    def __init__(self, url: str, *, token: str = "", log: str = "") -> None:
        """`url`: its address, or `unix:PATH`, a Unix socket."""
        self.url, self.log = url.rstrip("/"), log
        path = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = self.url if path is None else "http://localhost"
        how: dict[str, Any] = {"limit": 0, "force_close": True}
        self._num_missed = 0  # health checks that failed in a row
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            connector=aiohttp.TCPConnector(**how) if path is None else aiohttp.UnixConnector(path, **how),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        await self._session.close()

    # About the server

    async def is_up(self) -> bool:
        try:
            async with self._call("GET", "/health", seconds=10):
                return True
        except VllmError:
            return False

    async def check(self) -> None:
        """Raises once so many checks in a row have failed that it counts as dead."""
        self._num_missed = 0 if await self.is_up() else self._num_missed + 1
        if self._num_missed >= _MISSED:
            raise self.gone("it does not answer")

    async def about(self) -> ServerInfo:
        async with self._call("GET", "/version") as answer:
            version = str((await answer.json())["version"])
        async with self._call("GET", "/openapi.json") as answer:
            schema = await answer.json()
            messages = schema["components"]["schemas"].items()
            fields = [f"{name.partition('-')[0]}.{field}" for name, each in messages for field in each.get("properties", ())]
            return ServerInfo(version, frozenset([*schema["paths"], *fields]))

    async def context(self) -> int:
        """The most tokens that a rollout may have there."""
        async with self._call("GET", "/v1/models") as answer:
            return int((await answer.json())["data"][0]["max_model_len"])

    async def num_workers(self) -> int:
        """Its processes that hold weights, each with a GPU."""
        async with self._call("GET", "/get_world_size") as answer:
            return int((await answer.json())["world_size"])

    # Generation

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        salt: str,
        num_candidates: int,
        every: int = 1,
        adapter: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """One call, piece by piece. Only calls with the same `salt` share cached prefixes. `num_candidates` of the likeliest
        tokens come with each token, to tell which could have been sampled. Pieces after the first have `every` tokens; releases
        before 0.27 only do one. `adapter` is the name of one that was loaded."""
        body: dict[str, Any] = {
            **_model(adapter),
            "token_ids": token_ids,
            "stream": True,
            "cache_salt": salt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_tokens": max_tokens,
                "min_tokens": min(sampling.min_tokens, max_tokens) if sampling.stop_ids else 0,  # vLLM adds the model's own
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "seed": sampling.seed,
                "logprobs": num_candidates,
                "detokenize": False,
            },
        }
        if every > 1:
            body["sampling_params"]["stream_interval"] = every
        finish = None
        async with self._call("POST", _GENERATE, body=body, seconds=None) as answer:
            async for event in _events(answer.content):
                message = json.loads(event)
                if "error" in message:  # of this call alone, or the end of the server
                    raise self._error(_GENERATE, message["error"].get("code", 500), message)
                for choice in message["choices"]:
                    piece = self._piece(choice, num_candidates=num_candidates)
                    finish = piece.finish or finish
                    yield piece
        if finish is None:  # releases before 0.28 end the stream of an aborted call without saying so
            yield Piece([], [], finish="abort")

    async def prompt_logprobs(
        self, token_ids: list[int], *, salt: str, whole: bool, adapter: str = ""
    ) -> tuple[Array, list[dict[int, float]]]:
        """([tokens] float32 under the model's own distribution, the first 0; with `whole`, all logprobs for each token after
        it)."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": -1 if whole else 0, "detokenize": False}
        body = {**_model(adapter), "token_ids": token_ids, "cache_salt": salt, "sampling_params": sampling}
        async with self._call("POST", _GENERATE, body=body, seconds=_SCORE_SECONDS) as answer:
            rows = (await answer.json())["prompt_logprobs"][1:]
            told = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in rows]
            values = [0.0, *(row[token] for row, token in zip(told, token_ids[1:], strict=True))]
            return np.asarray(values, np.float32), told if whole else []

    # Pausing and weights

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """`keep`: running calls stop where they are. `abort`: they end. Later calls wait."""
        await self._post(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        await self._post("/resume")

    async def drop_cache(self) -> None:
        """Drop the KV cache; running calls recompute theirs. Only while it is paused."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        async with self._call("POST", path, body={}) as answer:
            text = await answer.text()  # some releases say nothing
            if text and json.loads(text).get("success") is False:
                raise VllmRefused(f"{self._where(path)}: its KV cache could not be dropped")

    async def reload(self, folder: str) -> None:
        """Load the weights of a saved model. Only while it is paused."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._post("/collective_rpc", body, seconds=_UPDATE_SECONDS)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter beside those it has. It may sample meanwhile."""
        await self._post(_LOAD_ADAPTER, {"lora_name": name, "lora_path": folder}, seconds=_UPDATE_SECONDS)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. The server frees its memory when another one needs it."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def init_transfer(self, told: Mapping[str, Any]) -> None:
        """Tell it how weights will come. Called once, before the first update."""
        await self._post("/init_weight_transfer_engine", {"init_info": told}, seconds=_UPDATE_SECONDS)

    # New weights over its weight-transfer interface, only while it is paused

    async def start_update(self) -> None:
        await self._post("/start_weight_update", seconds=_UPDATE_SECONDS)

    async def update_weights(self, told: Mapping[str, Any]) -> None:
        await self._post("/update_weights", {"update_info": told}, seconds=_UPDATE_SECONDS)

    async def finish_update(self) -> None:
        await self._post("/finish_weight_update", seconds=_UPDATE_SECONDS)

    async def name_version(self, name: str) -> None:
        """Set the version that it reports, at the end of a call, for tokens sampled from now on."""
        await self._post("/update_weight_version", {"new_version": name})

    # One call

    async def _post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = _SHORT) -> None:
        async with self._call("POST", path, body=body or {}, seconds=seconds) as answer:
            await answer.read()

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, seconds: float | None = _SHORT
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer, to be parsed within: if it is malformed, the server counts as dead. Commands are never repeated; a GET
        is, once, if it cannot connect (and by aiohttp, if a connection breaks before any of the answer came)."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            try:
                answer = await self._session.request(method, self._base + path, json=body, timeout=timeout)
            except aiohttp.ClientConnectorError:
                if method != "GET":
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
                answer = await self._session.request(method, self._base + path, timeout=timeout)
            async with answer:
                if answer.status != 200:
                    text = await answer.text()
                    raise self._error(path, answer.status, json.loads(text) if text.startswith("{") else text)
                yield answer
        except TimeoutError as error:
            raise VllmGone(f"{self._where(path)}: no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise VllmGone(f"{self._where(path)}: {str(error) or repr(error)}") from error
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise VllmGone(f"{self._where(path)}: an answer that makes no sense: {error!r}") from error

    def gone(self, told: str) -> VllmGone:
        """The error that ends the engine."""
        return VllmGone(f"vLLM at {self.url}: {told}{self._see_log}")

    @property
    def _see_log(self) -> str:
        return f", log {self.log}" if self.log else ""

    def _where(self, path: str) -> str:
        return f"vLLM at {self.url}, call {path.partition('?')[0]}{self._see_log}"

    def _error(self, path: str, status: int, message: Any) -> VllmError:  # noqa: ANN401
        """From an error's body: plain text, or one of the shapes vLLM wraps it in."""
        while isinstance(message, dict):
            message = next((message[key] for key in ("error", "detail", "message") if key in message), str(message))
        is_lost = (path, status) == (_GENERATE, 404)  # a call's adapter: the server is not the one that loaded it
        is_refusal = (400 <= status < 500 and not is_lost) or path == _LOAD_ADAPTER  # 500 says that it cannot use the adapter
        kind = VllmRefused if is_refusal else VllmGone
        return kind(f"{self._where(path)}: status {status}: {str(message)[:500] or 'it gave no reason'}")

    def _piece(self, choice: Mapping[str, Any], *, num_candidates: int) -> Piece:
        token_ids, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        if len(content) != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens and {len(content)} logprobs")
        masks, entropies = self._distributions(content, num_candidates=num_candidates) if num_candidates else (None, None)
        return Piece(
            token_ids,
            [_logprob(entry) for entry in content],
            masks,
            choice["finish_reason"],
            [(str(each["version"]), int(each["start"]), int(each["end"])) for each in choice.get("weight_versions") or ()],
            entropies,
            _array(choice["routed_experts"]) if choice.get("routed_experts") else None,
        )

    def _distributions(self, content: list[dict[str, Any]], *, num_candidates: int) -> tuple[list[Array | None], list[float]]:
        """For each token, those with any probability in the distribution it was sampled from, and that one's entropy."""
        masks: list[Array | None] = []
        entropies: list[float] = []
        for entry in content:
            top = {_id(each): _logprob(each) for each in entry.get("top_logprobs") or ()}
            left = {token: logprob for token, logprob in top.items() if not math.isnan(logprob)}
            is_cut_off = len(left) >= num_candidates  # none of them is impossible: perhaps others are possible too
            left[_id(entry)] = _logprob(entry)
            entropies.append(sum(-math.exp(logprob) * logprob for logprob in left.values()))
            if is_cut_off:
                masks.append(None)
                continue
            mass = sum(map(math.exp, left.values()))
            if mass < 1 - _MISSING:
                raise MaskIncomplete(
                    f"{self._where(_GENERATE)}: the {len(left)} tokens that came with a logprob have a probability of "
                    f"{mass:.4f} together, and no others could have been sampled"
                )
            masks.append(np.asarray(sorted(left), np.int32))
        return masks, entropies


def _model(adapter: str) -> dict[str, str]:
    """The field that names an adapter; without it a call is the model's own."""
    return {"model": adapter} if adapter else {}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, up to the last."""
    unread = b""
    async for chunk in content.iter_any():
        *lines, unread = (unread + chunk).split(b"\n")
        if len(unread) > _LONGEST_LINE:
            raise aiohttp.ClientPayloadError(f"an event of more than {_LONGEST_LINE >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise aiohttp.ClientPayloadError("the stream broke off")


def _array(text: str) -> Array:
    """An array as vLLM sends it: the bytes of an .npy file, in base64."""
    return np.asarray(np.lib.format.read_array(io.BytesIO(base64.b64decode(text))))  # without objects, which are pickled


def _logprob(entry: Mapping[str, Any]) -> float:
    """NaN if the model's logits were not finite: newer releases then write minus infinity, older ones null."""
    value = entry["logprob"]
    return math.nan if value is None or value <= _LOST else float(value)


def _id(entry: Mapping[str, Any]) -> int:
    """Newer releases give the number, older ones a text that ends with it: `token_id:7`."""
    return int(entry["token_id"] if "token_id" in entry else entry["token"].rpartition("token_id:")[2])
