"""vLLM's HTTP interface: paths, bodies and answers, of every supported release. No other file knows them.

The server is a stock `vllm serve` with VLLM_SERVER_DEV_MODE=1, which opens pausing, weight updates and calls to its workers.
Tokens go in and out over `/inference/v1/generate`. `abilities` finds out what a release lacks.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence

    from headrace.records import Array, Sampling

    PauseMode = Literal["keep", "wait", "abort"]

_SHORT = 60.0  # seconds for a quick call
_UPDATE_SECONDS = 1800.0  # for a large model to load new weights
_CONNECT_SECONDS = 60.0  # a server whose interpreter is busy accepts connections late
_RETRY_SECONDS = 0.1  # before the one retry of a GET that could not connect
_LONGEST_LINE = 64 << 20  # bytes of a stream's event: those with the whole vocabulary's logprobs are long
_LOST = -9998.0  # vLLM writes -9999 for minus infinity and for NaN
_TOKEN = re.compile(r"token_id:(\d+)$")


class VllmError(RuntimeError):
    """A call to a server failed; the message names the server, the call and the server's log."""


class VllmRefused(VllmError):
    """The server refused the call; its state is unchanged."""


class VllmGone(VllmError):
    """The server does not answer, or answers nonsense: it counts as dead."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that could have been sampled at one position."""

    ids: Array
    share: float = 1.0
    """Their total probability: less than 1 if the server did not name them all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event of a stream."""

    token_ids: list[int]
    logprobs: list[float]
    candidates: list[Candidates] | None = None
    """For each token, those that could have been sampled, if requested."""
    finish: str | None = None
    """`stop`, `length`, `abort`; None while more may come."""
    spans: list[tuple[str, int, int]] | None = None
    """(weight version, start, stop) over all of the call's tokens, if the server reports them at the end."""
    routing: Array | None = None
    """[tokens - 1, MoE layers, top k] of prompt and output, if the server reports it."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself."""

    version: str
    paths: frozenset[str]
    fields: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The fields of each message of its interface."""

    def has(self, message: str, name: str) -> bool:
        """Whether any message whose name starts with `message` has the field."""
        return any(name in names for key, names in self.fields.items() if key.startswith(message))


class VllmApi:
    """One server, used from one event loop. Every call has its own connection: a server closes idle ones, and a call sent at
    that moment would be lost."""

    def __init__(self, url: str, *, token: str = "", log: str = "") -> None:
        self.url, self.log = url.rstrip("/"), log
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        await self._session.close()

    # About the server

    async def is_up(self) -> bool:
        try:
            async with self._get("/health", seconds=10) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def about(self) -> ServerInfo:
        version, schema = await self._get_json("/version"), await self._get_json("/openapi.json")
        with self._parsing("/openapi.json"):
            messages = schema["components"]["schemas"]
            fields = {name: frozenset(message.get("properties", {})) for name, message in messages.items()}
            return ServerInfo(str(version["version"]), frozenset(schema["paths"]), fields)

    async def served(self) -> tuple[str, int]:
        """(its model's name, the most tokens it takes)."""
        models = await self._get_json("/v1/models")
        with self._parsing("/v1/models"):
            first = models["data"][0]
            return str(first["id"]), int(first["max_model_len"])

    async def num_workers(self) -> int:
        """Its processes that hold weights, each with a GPU."""
        told = await self._get_json("/get_world_size")
        with self._parsing("/get_world_size"):
            return int(told["world_size"])

    async def cache(self) -> tuple[int, int]:
        """(tokens in a block of its KV cache, number of blocks); (1, 0) if it does not say."""
        text = await self._text("/metrics")
        told = re.search(r"vllm:cache_config_info\{([^}]*)\}", text)
        found = dict(re.findall(r'(block_size|num_gpu_blocks)="(\d+)"', told[1] if told else ""))
        return int(found.get("block_size", 1)), int(found.get("num_gpu_blocks", 0))

    # Generation

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        name: str,
        max_tokens: int,
        seed: int,
        salt: str,
        num_candidates: int,
        model: str,
        every: int = 1,
    ) -> AsyncGenerator[Piece, None]:
        """One call, piece by piece. Only calls with the same `salt` share cached prefixes. `num_candidates` of the likeliest
        tokens come with each token, to tell which could have been sampled. Pieces after the first have `every` tokens; releases
        before 0.27 only do one."""
        body: dict[str, Any] = {
            "request_id": name,
            "model": model,
            "token_ids": [int(token) for token in token_ids],
            "stream": True,
            "cache_salt": salt,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or -1,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_tokens": max_tokens,
                "min_tokens": min(sampling.min_tokens, max_tokens),
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "seed": seed,
                "logprobs": num_candidates,
                "detokenize": False,
            },
        }
        if every > 1:
            body["sampling_params"]["stream_interval"] = every
        path = "/inference/v1/generate"
        finish = None
        try:
            async with self._session.post(self.url + path, json=body) as answer:
                await self._check(path, answer)
                async for event in _events(answer.content):
                    piece = self._piece(path, event, has_candidates=num_candidates > 0)
                    finish = piece.finish or finish
                    yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(path, error) from error
        if finish is None:  # releases before 0.28 end the stream of an aborted call without saying so
            yield Piece([], [], finish="abort")

    def _piece(self, path: str, event: bytes, *, has_candidates: bool) -> Piece:
        with self._parsing(path, f" in {event[:200]!r}"):
            message = json.loads(event)
            if "error" in message:
                raise self._failed(path, message)
            if not message["choices"]:
                return Piece([], [])
            choice = message["choices"][0]
            token_ids = [int(token) for token in choice["token_ids"] or ()]
            content = (choice["logprobs"] or {}).get("content") or []
            if len(content) != len(token_ids):
                raise ValueError(f"{len(token_ids)} tokens and {len(content)} logprobs")
            candidates = None
            if has_candidates:
                masks = choice.get("sampling_mask")
                rows = [Candidates(np.asarray(row, np.int32)) for row in masks] if masks else None
                candidates = rows or [_candidates(entry) for entry in content]
            spans = choice.get("weight_versions")
            return Piece(
                token_ids,
                [_logprob(entry) for entry in content],
                candidates,
                choice["finish_reason"],
                None if spans is None else [(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans],
                _routing(choice.get("routed_experts")),
            )

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, model: str, salt: str, whole: bool, seconds: float = 600.0
    ) -> tuple[Array, list[dict[int, float]]]:
        """([tokens] float32 under the model's own distribution, the first 0; with `whole`, all logprobs for each token after
        it)."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": -1 if whole else 0, "detokenize": False}
        ids = [int(token) for token in token_ids]
        body = {"model": model, "token_ids": ids, "cache_salt": salt, "sampling_params": sampling}
        answer = await self._post("/inference/v1/generate", body, seconds=seconds)
        with self._parsing("/inference/v1/generate"):
            rows = answer["prompt_logprobs"][1:]
            if len(rows) != len(token_ids) - 1:
                raise ValueError(f"{len(rows)} rows for {len(token_ids)} tokens")
            told = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in rows]
            values = [0.0, *(row[token] for row, token in zip(told, ids[1:], strict=True))]
        return np.asarray(values, np.float32), told if whole else []

    # Pausing and weights

    async def pause(self, mode: PauseMode, *, seconds: float | None = _SHORT) -> None:
        """`keep`: running calls stop where they are. `wait`: they finish first. `abort`: they end. Later calls wait."""
        await self._post(f"/pause?mode={mode}&clear_cache=false", {}, seconds=seconds)

    async def resume(self) -> None:
        await self._post("/resume", {})

    async def drop_cache(self) -> None:
        """Drop the KV cache; running calls recompute theirs. Only while it is paused."""
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true", {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise VllmRefused(f"{self._where('/reset_prefix_cache')}: its keys and values could not be dropped")

    async def reload(self, folder: str) -> None:
        """Load the weights of a saved model. Only while it is paused."""
        await self._post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}, seconds=_UPDATE_SECONDS
        )

    async def init_transfer(self, told: Mapping[str, Any]) -> None:
        """Tell it how weights will come. Called once, before the first update."""
        await self._post("/init_weight_transfer_engine", {"init_info": dict(told)}, seconds=_UPDATE_SECONDS)

    async def start_update(self) -> None:
        """New weights follow over its weight-transfer interface; it must stay paused until `finish_update`."""
        await self._post("/start_weight_update", {}, seconds=_UPDATE_SECONDS)

    async def update_weights(self, told: Mapping[str, Any]) -> None:
        await self._post("/update_weights", {"update_info": dict(told)}, seconds=_UPDATE_SECONDS)

    async def finish_update(self) -> None:
        await self._post("/finish_weight_update", {}, seconds=_UPDATE_SECONDS)

    async def name_version(self, name: str) -> None:
        """Set the version that it reports, at the end of a call, for tokens sampled from now on."""
        await self._post("/update_weight_version", {"new_version": name})

    # One call

    async def _get_json(self, path: str) -> Any:  # noqa: ANN401
        return self._json(path, await self._text(path))

    async def _text(self, path: str) -> str:
        try:
            async with self._get(path, seconds=_SHORT) as answer:
                await self._check(path, answer)
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(path, error) from error

    @contextlib.asynccontextmanager
    async def _get(self, path: str, *, seconds: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Retries once if it cannot connect; aiohttp itself retries if a connection breaks before any of the answer came."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            answer = await self._session.get(self.url + path, timeout=timeout)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(_RETRY_SECONDS)
            answer = await self._session.get(self.url + path, timeout=timeout)
        async with answer:
            yield answer

    async def _post(self, path: str, body: dict[str, Any], *, seconds: float | None = _SHORT) -> Any:  # noqa: ANN401
        try:
            async with self._session.post(
                self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
            ) as answer:
                await self._check(path, answer)
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(path, error) from error
        return self._json(path, text) if text else None

    async def _check(self, path: str, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200:
            return
        text = await answer.text()
        try:
            told = _told(json.loads(text))
        except ValueError:
            told = text[:300]
        kind = VllmGone if answer.status >= 500 else VllmRefused
        raise kind(f"{self._where(path)}: status {answer.status}: {told or 'it gave no reason'}")

    def _json(self, path: str, text: str) -> Any:  # noqa: ANN401
        with self._parsing(path, f" in {text[:200]!r}"):
            return json.loads(text)

    @contextlib.contextmanager
    def _parsing(self, path: str, inside: str = "") -> Iterator[None]:
        """A malformed answer counts as the server's death."""
        try:
            yield
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, binascii.Error) as error:
            raise VllmGone(f"{self._where(path)}: an answer that makes no sense: {error!r}{inside}") from error

    def _where(self, path: str) -> str:
        log = f", log {self.log}" if self.log else ""
        return f"vLLM at {self.url}, call {path.partition('?')[0]}{log}"

    def _failed(self, path: str, message: dict[str, Any]) -> VllmError:
        """An error inside a stream: a refusal of this call alone, or the end of the server."""
        code = message["error"].get("code") if isinstance(message["error"], dict) else None
        kind = VllmRefused if isinstance(code, int) and 400 <= code < 500 else VllmGone
        return kind(f"{self._where(path)}: the call failed there: {_told(message)}")

    def _gone(self, path: str, error: BaseException) -> VllmGone:
        told = "no answer in time" if isinstance(error, TimeoutError | asyncio.TimeoutError) else str(error) or repr(error)
        return VllmGone(f"{self._where(path)}: {told}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, up to the last."""
    unread = bytearray()
    async for chunk in content.iter_any():
        unread += chunk
        *lines, rest = bytes(unread).split(b"\n")
        unread = bytearray(rest)
        if len(unread) > _LONGEST_LINE:
            raise aiohttp.ClientPayloadError(f"an event of more than {_LONGEST_LINE >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise aiohttp.ClientPayloadError("the stream broke off")


def _logprob(entry: Mapping[str, Any]) -> float:
    """NaN if the model's logits were not finite: newer releases then write minus infinity, older ones null."""
    value = entry["logprob"]
    return float("nan") if value is None or value <= _LOST else float(value)


def _candidates(entry: Mapping[str, Any]) -> Candidates:
    """The tokens with any probability in the distribution that was sampled from."""
    logprobs = {_id(each): _logprob(each) for each in (entry, *(entry.get("top_logprobs") or ()))}
    left = {token: value for token, value in logprobs.items() if not math.isnan(value)}
    return Candidates(np.asarray(sorted(left), np.int32), sum(math.exp(value) for value in left.values()))


def _id(entry: Mapping[str, Any]) -> int:
    """Newer releases give the number, older ones a text that contains it."""
    if "token_id" in entry:
        return int(entry["token_id"])
    found = _TOKEN.search(entry["token"])
    if found is None:
        raise ValueError(f"no token id: {entry['token']!r}")
    return int(found[1])


def _routing(text: str | None) -> Array | None:
    """A .npy file of whole numbers, in base64."""
    if text is None:
        return None
    data = io.BytesIO(base64.b64decode(text, validate=True))
    if np.lib.format.read_magic(data) != (1, 0):
        raise ValueError("routed experts in a form of .npy that is not known")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(data)
    if is_fortran or dtype.kind not in "iu":
        raise ValueError(f"routed experts of dtype {dtype}")
    return np.frombuffer(data.read(), dtype).reshape(shape)


def _told(message: Any) -> str:  # noqa: ANN401
    """The reason in an error's body: plain text, or one of the two shapes vLLM wraps it in."""
    if isinstance(message, dict):
        for key in ("error", "detail", "message"):
            if key in message:
                return _told(message[key])
    return str(message)[:500]
