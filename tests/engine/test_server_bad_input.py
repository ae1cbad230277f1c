"""Whatever a client sends, it is told what is wrong with it, by name, and everyone else is still served."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from test_server import CONTEXT, Bench, serving

from headrace.engine.server.http import MAX_BODY
from headrace.model.tiny import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMPLETIONS, CHAT, SCORE, PAUSE = "/v1/completions", "/v1/chat/completions", "/control/score", "/control/pause"
PLAIN = {
    COMPLETIONS: {"prompt": "1", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2},
    SCORE: {"token_ids": [5, 6]},
    PAUSE: {},
}
JSON_TYPE = {"Content-Type": "application/json"}
CONTROL = {"Authorization": "Bearer control"}


@contextlib.asynccontextmanager
async def still_serving(model: str, **options: Any) -> AsyncIterator[Bench]:
    """A server that still answers when the test is over."""
    async with serving(model, control_token="control", **options) as bench:
        yield bench
        assert (await bench.complete(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        assert (await bench.get("/health"))[0] == 200


@pytest.fixture
def bench(tiny_model: str) -> Any:
    return still_serving(tiny_model)


async def send(bench: Bench, path: str, data: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    async with bench.http.post(bench.url + path, data=data, headers={**JSON_TYPE, **CONTROL, **headers}) as response:
        return response.status, (await response.json())["error"]


def with_field(path: str, name: str, text: str) -> bytes:
    """A body whose field is this JSON text, which need not be JSON."""
    rest = {key: value for key, value in PLAIN[path].items() if key != name}
    return f'{{"{name}": {text}, {json.dumps(rest)[1:]}'.replace(", }", "}").encode()


WRONG = [
    # path, field, its JSON text, what is told
    (COMPLETIONS, "prompt", "[5, 1099511627776]", "token id 1099511627776 is outside the vocabulary of 102"),
    (COMPLETIONS, "prompt", "[5, -1]", "token id -1 is outside"),
    (COMPLETIONS, "prompt", "[5, 1e3]", "the list holds a number"),
    (COMPLETIONS, "prompt", "[5.0]", "the list holds a number"),
    (COMPLETIONS, "prompt", "[true, 5]", "it holds true or false"),
    (COMPLETIONS, "prompt", "[[5, 5.5]]", "it holds a number"),
    (COMPLETIONS, "prompt", '[[5, "6"]]', "it holds text"),
    (COMPLETIONS, "prompt", "[[5, null]]", "it holds null"),
    (COMPLETIONS, "prompt", "[[[5]]]", "it holds a list"),
    (COMPLETIONS, "prompt", '["a", 5]', "the list holds a number"),
    (COMPLETIONS, "prompt", "[[]]", "at least one token"),
    (COMPLETIONS, "prompt", "{}", "must be text, token ids, or a list"),
    (COMPLETIONS, "prompt", "5", "must be text, token ids, or a list"),
    (COMPLETIONS, "prompt", "null", "is missing"),
    (COMPLETIONS, "prompt", f"[{'9' * 4000}]", "999… is outside the vocabulary"),
    (COMPLETIONS, "prompt", json.dumps([5] * CONTEXT), "the prompt has 256 tokens; the context is 256"),
    (COMPLETIONS, "prompt", json.dumps("1" * CONTEXT), "the prompt has 256 tokens; the context is 256"),
    (COMPLETIONS, "prompt", json.dumps(["1"] * 1025), "1025 prompts are more than 1024"),
    (COMPLETIONS, "model", "[]", "must be text, not a list"),
    (COMPLETIONS, "max_tokens", "-1", "must be between 0 and"),
    (COMPLETIONS, "max_tokens", "1.5", "must be a whole number"),
    (COMPLETIONS, "max_tokens", "NaN", "nan is not a number"),
    (COMPLETIONS, "max_completion_tokens", "-5", "must be between 0 and"),
    (COMPLETIONS, "min_tokens", "-1", "must be between 0 and"),
    (COMPLETIONS, "n", "-1", "must be between 1 and 1024"),
    (COMPLETIONS, "n", "1025", "must be between 1 and 1024"),
    (COMPLETIONS, "n", "18446744073709551616", "must be between 1 and 1024"),
    (COMPLETIONS, "best_of", "0", "must be between 1 and"),
    (COMPLETIONS, "temperature", "NaN", "nan is not a number"),
    (COMPLETIONS, "temperature", "Infinity", "inf is not a number"),
    (COMPLETIONS, "temperature", "-Infinity", "-inf is not a number"),
    (COMPLETIONS, "temperature", "1e999", "inf is not a number"),
    (COMPLETIONS, "temperature", "1e300", "between 0 and 100"),
    (COMPLETIONS, "top_p", "-0.1", "between 0 and 1"),
    (COMPLETIONS, "top_p", "1.1", "between 0 and 1"),
    (COMPLETIONS, "min_p", "NaN", "nan is not a number"),
    (COMPLETIONS, "top_k", "-2", "must be between -1 and"),
    (COMPLETIONS, "top_k", '"5"', "must be a whole number, not text"),
    (COMPLETIONS, "seed", "0.5", "must be a whole number"),
    (COMPLETIONS, "seed", "9223372036854775808", "must be between"),
    (COMPLETIONS, "stop", '["a", 3]', "must be text, not a number"),
    (COMPLETIONS, "stop", json.dumps(["a"] * 17), "at most 16"),
    (COMPLETIONS, "stop", '"\\ud800"', "surrogate"),
    (COMPLETIONS, "stop_token_ids", "5", "must be a list of token ids, not a number"),
    (COMPLETIONS, "stop_token_ids", "[1099511627776]", "outside the vocabulary"),
    (COMPLETIONS, "stop_token_ids", "[-1]", "outside the vocabulary"),
    (COMPLETIONS, "stop_token_ids", f"{[1] * 129}", "must be at most 128 token ids"),
    (COMPLETIONS, "logprobs", "-1", "must be between 0 and 20"),
    (COMPLETIONS, "logprobs", "true", "must be a whole number"),
    (COMPLETIONS, "stream", "1", "must be true or false"),
    (COMPLETIONS, "echo", "0", "must be true or false"),
    (COMPLETIONS, "ignore_eos", '"no"', "must be true or false"),
    (COMPLETIONS, "return_token_ids", "[]", "must be true or false"),
    (COMPLETIONS, "skip_special_tokens", "0", "must be true or false"),
    (COMPLETIONS, "add_special_tokens", "{}", "must be true or false"),
    (COMPLETIONS, "stream_options", "[]", "only for stream"),
    (COMPLETIONS, "messages", "[]", "is not a parameter this server knows"),
    (COMPLETIONS, "tools", '[{"type": "function"}]', "is not supported"),
    (COMPLETIONS, "logit_bias", '{"5": NaN}', "nan is not a number"),
    (COMPLETIONS, "x" * 1000, "1", "is not a parameter"),
    (CHAT, "messages", "{}", "must be a list of at least one message"),
    (CHAT, "messages", '"hi"', "must be a list of at least one message"),
    (CHAT, "messages", "null", "must be a list of at least one message"),
    (CHAT, "messages", '[{"content": "x"}]', "must be text, not null"),
    (CHAT, "messages", '[{"role": 3, "content": "x"}]', "must be text, not a number"),
    (CHAT, "messages", '[{"role": "user", "content": 3}]', "must be text, not a number"),
    (CHAT, "messages", '[{"role": "user", "content": {}}]', "must be text, not an object"),
    (CHAT, "messages", '[{"role": "user", "content": ["x"]}]', "only text parts"),
    (CHAT, "messages", '[{"role": "user", "content": [{"type": "text"}]}]', "must be text, not null"),
    (CHAT, "messages", '[{"role": "user", "content": "x", "audio": {"id": "a"}}]', "must be text, not an object"),
    (CHAT, "messages", '[{"role": "user", "content": "x", "weight": NaN}]', "nan is not a number"),
    (CHAT, "messages", json.dumps([{"role": "user", "content": "1" * CONTEXT}]), "the context is 256"),
    (CHAT, "prompt", '"x"', "is not a parameter this server knows"),
    (CHAT, "max_tokens", "0", "generates nothing"),
    (CHAT, "logprobs", "2", "must be true or false"),
    (CHAT, "top_logprobs", "-1", "must be between 0 and 20"),
    (CHAT, "top_logprobs", "21", "must be between 0 and 20"),
    (CHAT, "continue_final_message", '"yes"', "must be true or false"),
    (CHAT, "add_generation_prompt", "3", "must be true or false"),
    (CHAT, "chat_template_kwargs", "[]", "must be an object"),
    (CHAT, "chat_template_kwargs", "false", "must be an object"),
    (CHAT, "chat_template_kwargs", '{"tools": []}', "without chat_template, conversation"),
    (CHAT, "response_format", '{"type": "grammar"}', "is no type of it"),
    (SCORE, "token_ids", "null", "must be a list of token ids"),
    (SCORE, "token_ids", "[1099511627776]", "outside the vocabulary"),
    (SCORE, "token_ids", "[5, -1]", "outside the vocabulary"),
    (SCORE, "token_ids", "[5, [6]]", "it holds a list"),
    (SCORE, "token_ids", "[[5], 6]", "must be a list of token ids, not a number"),
    (SCORE, "token_ids", "[5.5]", "it holds a number"),
    (SCORE, "token_ids", "[true]", "it holds true or false"),
    (SCORE, "token_ids", "[NaN]", "nan is not a number"),
    (SCORE, "token_ids", json.dumps([[5]] * 1025), "1025 sequences are more than 1024"),
    (SCORE, "token_ids", json.dumps([5] * (CONTEXT + 1)), "a sequence of 257 tokens"),
    (SCORE, "temperature", "1", "is not a parameter this server knows"),
    (PAUSE, "interrupt", '["keep"]', "must be one of"),
    (PAUSE, "interrupt", "{}", "must be one of"),
    (PAUSE, "now", "true", "is not a parameter this server knows"),
]


async def test_every_field_that_is_wrong_is_named(bench: Bench):
    for path, name, text, message in WRONG:
        status, error = await send(bench, path, with_field(path, name, text))
        assert status == 400 and message in error["message"], (path, name, text[:80], error)
        assert error["param"].rstrip("…").startswith(name[:50]), (path, name, text[:80], error)
        assert len(error["message"]) < 500 and error["type"] == "invalid_request_error"


def fields(path: str) -> list[str]:
    return sorted({name for where, name, _, _ in WRONG if where == path} | {"user", "metadata", "tools", "guided_json"})


@pytest.mark.parametrize("depth", [101, 300, 900, 100_000])
async def test_deeply_nested_values_are_refused_wherever_they_are(bench: Bench, depth):
    """Some are deep enough for the reader of JSON to give up, some only for those who walk what it read."""
    for path in PLAIN:
        for name in fields(path):
            for opens, closes in (("[", "]"), ('{"a":', "}")):
                value = opens * depth + "1" + closes * depth
                status, error = await send(bench, path, with_field(path, name, value))
                assert status == 400 and ("100 deep" in error["message"] or "not JSON" in error["message"]), (
                    path,
                    name,
                    error,
                )
                assert len(error["message"]) < 500


async def test_values_as_deep_as_schemas_are_taken(bench: Bench):
    for depth in (50, 98):
        value = '{"a":' * depth + "1" + "}" * depth
        async with bench.http.post(bench.url + CHAT, data=with_field(CHAT, "metadata", value), headers=JSON_TYPE) as response:
            assert response.status == 200, await response.text()


async def test_a_body_that_is_no_json_object(bench: Bench):
    for path in PLAIN:
        for data in (
            b"{",
            b"[1]",
            b"3",
            b"NaN",
            b'"x"',
            b"null",
            b"\xff\xfe",
            b'{"a": 1}x',
            b"{'prompt': 1}",
            b'{"n": 01}',
        ):
            status, error = await send(bench, path, data)
            assert status == 400 and error["code"] == "invalid_json", (path, data, error)
        status, error = await send(bench, path, b'{"n": ' + b"9" * 5000 + b"}")
        assert status == 400 and "not JSON" in error["message"]
    for path in (COMPLETIONS, CHAT, SCORE):
        status, error = await send(bench, path, b"")
        assert status == 400 and error["param"] in ("prompt", "messages", "token_ids")


async def test_a_body_that_is_of_another_type_or_does_not_unpack(bench: Bench):
    body = json.dumps(PLAIN[COMPLETIONS]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"):
        for path in PLAIN:
            status, error = await send(bench, path, body, **{"Content-Type": kind})
            assert status == 415 and "must be application/json" in error["message"]
    zipped = {"Content-Encoding": "gzip"}
    async with bench.http.post(bench.url + COMPLETIONS, data=gzip.compress(body), headers={**JSON_TYPE, **zipped}) as good:
        assert good.status == 200
    assert (await send(bench, COMPLETIONS, b"not gzip", **zipped))[0] == 400
    assert (await send(bench, COMPLETIONS, gzip.compress(b" " * (MAX_BODY + 1)), **zipped))[0] == 413


async def test_what_is_not_http_ends_its_own_connection_only(bench: Bench):
    port = int(bench.url.rsplit(":", 1)[1])
    for data in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GARBAGE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), timeout=10)
        assert answer == b"" or b" 400 " in answer.splitlines()[0]
        writer.close()


async def test_text_that_cannot_fit_is_refused_unread(bench: Bench):
    """Megabytes take many seconds to tokenize, in which the server would answer nobody."""
    text = json.dumps("1 " * 4_000_000)
    for path, name, value in (
        (COMPLETIONS, "prompt", text),
        (COMPLETIONS, "prompt", f"[{text}]"),
        (CHAT, "messages", f'[{{"role": "user", "content": {text}}}]'),
    ):
        began = time.process_time()
        status, error = await send(bench, path, with_field(path, name, value))
        assert status == 400 and error["code"] == "context_length_exceeded" and error["param"] == name, error
        assert time.process_time() - began < 3
    status, error = await send(bench, COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps("<|end|>" * 300)))
    assert status == 400 and "the prompt has 300 tokens" in error["message"]


async def test_token_ids_the_tokenizer_has_and_the_model_has_not_are_refused(tiny_model):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    async with still_serving(tiny_model, tokenizer=tokenizer) as bench:
        for path, name, value in (
            (COMPLETIONS, "prompt", '"1<extra>"'),
            (CHAT, "messages", '[{"role": "user", "content": "<extra>"}]'),
        ):
            status, error = await send(bench, path, with_field(path, name, value))
            assert status == 400 and error["param"] == name
            assert "token id 102, which is outside the model's vocabulary of 102" in error["message"]
