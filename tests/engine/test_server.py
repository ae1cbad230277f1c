"""The server as OpenAI's own client meets it, over a real engine on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from test_server_text import byte_tokenizer

from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.engine.server.address import bind, url_of
from headrace.engine.server.app import CompletionServer
from headrace.engine.server.http import MAX_BODY
from headrace.engine.server.requests import NEUTRAL
from headrace.engine.server.text import ServedModel
from headrace.model.load import load_model, load_tokenizer
from headrace.model.weights import named_tensors
from headrace.observe import Timeline
from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling
from headrace.sync import Lineage, MemoryTransport, WeightSync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from headrace.engine import Engine

CONTEXT = 256
END = 1
NAME = "tiny"
FACTS = {"model_name": NAME, "stop_ids": (END,), "context": CONTEXT, "vocabulary": 102}


@contextlib.contextmanager
def decoding(core: EngineCore, sync: WeightSync) -> Iterator[NativeEngine]:
    """The engine under the server, in a thread of its own as `headrace serve` has it."""
    engine = NativeEngine(core, sync=sync, timeline=Timeline("engine"))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@dataclasses.dataclass
class Bench:
    """A server, its engine, and clients for it."""

    engine: Engine
    core: EngineCore
    sync: WeightSync
    tokenizer: Any
    url: str
    client: AsyncOpenAI
    http: aiohttp.ClientSession

    async def complete(self, prompt: Any = "12+3", **options: Any) -> Any:
        return await self.client.completions.create(model=NAME, prompt=prompt, **_extra(options))

    async def chat(self, **options: Any) -> Any:
        messages = options.pop("messages", [{"role": "user", "content": "12+3"}])
        return await self.client.chat.completions.create(model=NAME, messages=messages, **_extra(options))

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.text()

    async def until(self, holds: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds(await self.engine.state()):  # noqa: ASYNC110  (an engine's state raises no event)
                await asyncio.sleep(0.005)

    async def publish(self, version: int, interrupt: Interrupt) -> None:
        """New weights, the same as the old."""
        tensors = [(name, tensor.clone()) for name, tensor in named_tensors(self.core.model)]
        update = self.sync.offer(version, tensors)
        await self.engine.pause(interrupt)
        await self.engine.load(update)
        await self.engine.resume()
        self.sync.release(update)


OWN = {"top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos", "return_token_ids", "return_tokens_as_token_ids"}
OWN |= {"include_stop_str_in_output", "skip_special_tokens", "add_generation_prompt", "continue_final_message"}
OWN |= {
    "structured_outputs",
    "guided_json",
    "use_beam_search",
    "no_such_parameter",
    "repetition_penalty",
    "chat_template_kwargs",
}


def _extra(options: dict[str, Any]) -> dict[str, Any]:
    """Parameters OpenAI's client does not know go through `extra_body`, as its users send them."""
    known = {name: value for name, value in options.items() if name not in OWN}
    return {**known, "extra_body": {name: value for name, value in options.items() if name in OWN}}


@contextlib.asynccontextmanager
async def serving(model: str, *, slots: int = 8, **options: Any) -> AsyncIterator[Bench]:
    """A served engine."""
    sync = WeightSync(Lineage("life"), MemoryTransport())
    core = EngineCore(load_model(model), name="engine-0", slots=slots, context=CONTEXT)
    tokenizer = options.pop("tokenizer", None) or load_tokenizer(model)
    wrap = options.pop("wrap", lambda engine: engine)
    facts = {name: options.pop(name, value) for name, value in FACTS.items()}
    listener = bind("127.0.0.1", 0, has_token=False)
    url = url_of(listener)
    with decoding(core, sync) as engine:
        server = CompletionServer(wrap(engine), ServedModel(tokenizer, **facts), **options)
        token = options.get("api_token") or "none"
        async with (
            server.listening(listener),
            AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client,
            aiohttp.ClientSession() as http,
        ):
            yield Bench(engine, core, sync, tokenizer, url, client, http)


@pytest.fixture
def opened(tiny_model: str) -> Callable[..., Any]:
    return functools.partial(serving, tiny_model)


@pytest.fixture
def bench(opened: Callable[..., Any]) -> Any:
    return opened()


async def reference(bench: Bench, ids: list[int], **sampling: Any) -> Rollout:
    options = {"max_tokens": 24, "stop_ids": (END,), **sampling}
    return await bench.engine.generate(Rollout.from_prompt(ids, id="reference"), Sampling(**options))


def sampled(rollout: Rollout) -> tuple[list[int], list[float]]:
    here = rollout.is_sampled
    return rollout.token_ids[here].tolist(), rollout.logprobs[here].tolist()


async def test_a_completion_is_what_the_engine_draws(bench: Bench):
    ids = bench.tokenizer("12+3")["input_ids"]
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    expected = await reference(bench, ids, **options)
    answer = await bench.complete(max_tokens=24, logprobs=1, return_token_ids=True, **options)
    choice = answer.choices[0]
    tokens, logprobs = sampled(expected)
    assert choice.token_ids == tokens and choice.prompt_token_ids == ids
    assert choice.logprobs.token_logprobs == logprobs and choice.versions == [0] * len(tokens)
    assert choice.logprobs.tokens == [bench.tokenizer.decode([token]) for token in tokens]
    assert choice.text == bench.tokenizer.decode(tokens, skip_special_tokens=True)
    assert choice.finish_reason == expected.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(tokens))
    assert answer.object == "text_completion" and answer.model == NAME
    as_ids = await bench.complete(max_tokens=24, logprobs=0, return_tokens_as_token_ids=True, **options)
    assert as_ids.choices[0].logprobs.tokens == [f"token_id:{token}" for token in tokens]
    plain = (await bench.complete(max_tokens=24, **options)).choices[0]
    assert plain.text == choice.text and plain.logprobs is None and "token_ids" not in plain.model_dump()


async def test_text_offsets_point_into_the_text(bench: Bench):
    choice = (await bench.complete(max_tokens=40, seed=1, logprobs=0, ignore_eos=True, echo=True)).choices[0]
    pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all(choice.text[at : at + len(token)] == token for token, at in pairs if not token.startswith("<|"))


async def test_a_prompt_may_be_text_or_ids_or_several_of_either(bench: Bench):
    first, second = bench.tokenizer("12+3")["input_ids"], bench.tokenizer("abc")["input_ids"]
    options = {"max_tokens": 8, "seed": 3, "return_token_ids": True}
    one, other = [sampled(await reference(bench, ids, max_tokens=8, seed=3))[0] for ids in (first, second)]
    for prompt in ("12+3", first, ["12+3"], [first]):
        assert [c.token_ids for c in (await bench.complete(prompt, **options)).choices] == [one]
    for prompt in (["12+3", "abc"], [first, second]):
        answer = await bench.complete(prompt, **options)
        assert [c.token_ids for c in answer.choices] == [one, other] and [c.index for c in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == len(first) + len(second)


async def test_n_choices_have_seeds_of_their_own(bench: Bench):
    ids = bench.tokenizer("12+3")["input_ids"]
    drawn = [sampled(await reference(bench, ids, seed=seed))[0] for seed in (7, 8)]
    answer = await bench.complete(n=2, seed=7, max_tokens=24, return_token_ids=True)
    assert [choice.token_ids for choice in answer.choices] == drawn and drawn[0] != drawn[1]
    free = [(await bench.complete(max_tokens=24)).choices[0].text for _ in range(2)]
    assert free[0] != free[1], "without a seed every request draws anew"
    edge = await bench.complete(n=2, seed=2**63 - 1, max_tokens=4)
    assert len(edge.choices) == 2


async def test_chat_goes_through_the_template(bench: Bench):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": [{"type": "text", "text": "12+3"}]}]
    flat = [messages[0], {"role": "user", "content": "12+3"}]
    ids = bench.tokenizer.apply_chat_template(flat, add_generation_prompt=True, return_dict=False)
    expected = await reference(bench, ids, seed=4)
    tokens, logprobs = sampled(expected)
    options = {"seed": 4, "logprobs": True, "return_token_ids": True}
    answer = await bench.chat(messages=messages, max_completion_tokens=24, **options)
    choice = answer.choices[0]
    assert choice.token_ids == tokens and answer.prompt_token_ids == ids == choice.prompt_token_ids
    assert choice.message.role == "assistant"
    assert choice.message.content == bench.tokenizer.decode(tokens, skip_special_tokens=True)
    assert [entry.logprob for entry in choice.logprobs.content] == logprobs
    first = choice.logprobs.content[0]
    assert bytes(first.bytes).decode() == first.token and first.top_logprobs == []
    longest = await bench.chat(seed=4, ignore_eos=True)
    assert longest.usage.total_tokens == CONTEXT and longest.choices[0].finish_reason == "length"
    begun = [{"role": "user", "content": "12+3"}, {"role": "assistant", "content": "15"}]
    more = await bench.chat(messages=begun, continue_final_message=True, return_token_ids=True, max_tokens=1)
    assert bench.tokenizer.decode(more.prompt_token_ids).endswith("<|assistant|>15")


async def test_a_model_without_a_template_says_so(opened, tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = None
    async with opened(tokenizer=tokenizer) as bench:
        with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
            await bench.chat()


@pytest.mark.parametrize(
    "options", [{}, {"n": 3}, {"stop": ["a", "0"]}, {"logprobs": 0, "return_token_ids": True, "echo": True}]
)
async def test_a_stream_adds_up_to_the_whole(bench: Bench, options):
    options_ = {"max_tokens": 60, "seed": 9, **options}
    whole = await bench.complete(**options_)
    texts = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(whole.choices)
    tokens: list[int] = []
    logprobs: list[float] = []
    offsets: list[int] = []
    chunks = [c async for c in await bench.complete(stream=True, stream_options={"include_usage": True}, **options_)]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert chunk.usage is None and reasons[choice.index] is None
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
        if "logprobs" in options:
            tokens += choice.token_ids
            logprobs += choice.logprobs.token_logprobs
            offsets += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and len(chunks) > 3
    if "logprobs" in options:
        only = whole.choices[0]
        assert tokens == only.token_ids and logprobs == only.logprobs.token_logprobs
        assert offsets == only.logprobs.text_offset and chunks[0].choices[0].prompt_token_ids == only.prompt_token_ids


async def test_a_chat_stream_adds_up_to_the_whole(bench: Bench):
    options = {"max_tokens": 40, "seed": 2, "logprobs": True, "return_token_ids": True}
    whole = await bench.chat(**options)
    chunks = [chunk async for chunk in await bench.chat(stream=True, **options)]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    told = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert told == whole.choices[0].logprobs.content
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, whole.choices[0].finish_reason]


async def test_characters_of_several_tokens_are_streamed_whole(opened):
    tokenizer = byte_tokenizer()  # the model knows the first 102 tokens: letters and the bytes around é, ü, ß
    async with opened(tokenizer=tokenizer) as bench:
        for seed in range(4):
            options = {"max_tokens": 100, "seed": seed, "return_token_ids": True, "ignore_eos": True}
            whole = (await bench.complete([5, 6], **options)).choices[0]
            parts = [chunk.choices[0].text async for chunk in await bench.complete([5, 6], stream=True, **options)]
            assert "".join(parts) == whole.text
            assert whole.text == tokenizer.decode(whole.token_ids, skip_special_tokens=True)


async def test_stop_strings_end_a_completion_across_tokens(bench: Bench):
    free = (await bench.complete(max_tokens=60, seed=6, return_token_ids=True, ignore_eos=True)).choices[0]
    stop = free.text[20:23]
    at = free.text.index(stop)
    options = {"max_tokens": 60, "seed": 6, "ignore_eos": True, "return_token_ids": True, "stop": [stop, "never"]}
    choice = (await bench.complete(**options)).choices[0]
    assert choice.text == free.text[:at] and choice.finish_reason == "stop" and choice.stop_reason == stop
    assert choice.token_ids == free.token_ids[: len(choice.token_ids)] and len(choice.token_ids) < 60
    parts = [chunk.choices[0].text async for chunk in await bench.complete(stream=True, **options)]
    assert "".join(parts) == choice.text
    kept = (await bench.complete(include_stop_str_in_output=True, **options)).choices[0]
    assert kept.text == free.text[: at + 3]
    await bench.until(lambda state: state.running == 0)


async def test_stop_tokens_are_in_the_ids_and_not_in_the_text(bench: Bench):
    free = (await bench.complete(max_tokens=60, seed=6, return_token_ids=True, ignore_eos=True)).choices[0]
    stop = free.token_ids[9]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    options = {"max_tokens": 60, "seed": 6, "ignore_eos": True, "return_token_ids": True, "stop_token_ids": [stop]}
    choice = (await bench.complete(**options)).choices[0]
    assert choice.token_ids == cut and (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == bench.tokenizer.decode(cut[:-1], skip_special_tokens=True)
    kept = (await bench.complete(include_stop_str_in_output=True, **options)).choices[0]
    assert kept.text == bench.tokenizer.decode(cut, skip_special_tokens=True)
    later = (await bench.complete(min_tokens=len(cut), **options)).choices[0]
    assert len(later.token_ids) > len(cut) and stop not in later.token_ids[: len(cut)]
    ended = (await bench.complete(max_tokens=8, stop_token_ids=list(range(102)), return_token_ids=True)).choices[0]
    assert len(ended.token_ids) == 1 and ended.text == ""


async def test_echo_gives_the_prompt_and_its_logprobs(bench: Bench):
    ids = bench.tokenizer("12+3")["input_ids"]
    (scores,) = await bench.engine.score([Rollout.from_prompt(ids, id="p")])
    choice = (await bench.complete(echo=True, logprobs=1, max_tokens=5, seed=1)).choices[0]
    plain = (await bench.complete(max_tokens=5, seed=1, logprobs=1)).choices[0]
    assert choice.text == "12+3" + plain.text
    assert choice.logprobs.token_logprobs == [None, *scores[1:].tolist(), *plain.logprobs.token_logprobs]
    nothing = await bench.complete(ids, echo=True, logprobs=0, max_tokens=0)
    assert nothing.choices[0].text == "12+3" and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs.token_logprobs == [None, *scores[1:].tolist()]


async def test_prompts_are_scored_a_few_at_a_time(bench: Bench, monkeypatch):
    """Other requests are decoded in between."""
    ids, score, at_once = bench.tokenizer("12+3")["input_ids"], bench.engine.score, []

    async def counted(rollouts):
        at_once.append(len(rollouts))
        return await score(rollouts)

    monkeypatch.setattr(bench.engine, "score", counted)
    monkeypatch.setattr("headrace.engine.server.app._SCORED_AT_ONCE", 2 * len(ids) + 1)
    choices = (await bench.complete([ids] * 5, echo=True, logprobs=0, max_tokens=0)).choices
    assert at_once == [2, 2, 1] and [choice.index for choice in choices] == [0, 1, 2, 3, 4]
    scores = [choice.logprobs.token_logprobs[1:] for choice in choices]
    assert np.ptp(scores, axis=0).max() < 1e-5


async def test_requests_share_decode_steps(bench: Bench):
    steps, step = [], bench.core.step

    def counted() -> Any:
        steps.append(1)
        return step()

    bench.core.step = counted
    await bench.engine.pause(Interrupt.KEEP)
    asked = [asyncio.create_task(bench.complete(max_tokens=20, ignore_eos=True, seed=seed)) for seed in range(8)]
    await bench.until(lambda state: state.waiting == 8)
    await bench.engine.resume()
    assert {answer.usage.completion_tokens for answer in await asyncio.gather(*asked)} == {20}
    assert len(steps) == 20


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slots(bench: Bench, stream):
    free = (await bench.engine.state()).free_blocks
    body = {"prompt": "1", "max_tokens": 200, "ignore_eos": True, "n": 12, "stream": stream}
    await bench.engine.pause(Interrupt.KEEP)
    leaving = asyncio.create_task(bench.post("/v1/completions", body))
    await bench.until(lambda state: state.waiting == 12)
    await bench.engine.resume()
    await bench.until(lambda state: state.running == 8 and state.waiting == 4)
    leaving.cancel()
    await bench.until(lambda state: (state.running, state.waiting, state.free_blocks) == (0, 0, free))
    assert (await bench.engine.state()).tokens < 12 * 200
    _, page = await bench.get("/metrics")
    assert 'headrace_requests_total{endpoint="/v1/completions",status="499"} 1' in page


@pytest.mark.parametrize("interrupt", [Interrupt.ABORT, Interrupt.RETRACT])
@pytest.mark.parametrize("stream", [True, False])
async def test_new_weights_interrupt_and_the_answer_goes_on(bench: Bench, stream, interrupt):
    options = {"max_tokens": 150, "seed": 3, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    whole = (await bench.complete(**options)).choices[0]
    before = (await bench.engine.state()).tokens

    async def ask() -> tuple[list[int], list[int], str, list[float]]:
        if not stream:
            choice = (await bench.complete(**options)).choices[0]
            return choice.token_ids, choice.versions, choice.text, choice.logprobs.token_logprobs
        tokens, versions, text, logprobs = [], [], "", []
        async for chunk in await bench.complete(stream=True, **options):
            tokens += chunk.choices[0].token_ids
            versions += chunk.choices[0].versions
            text += chunk.choices[0].text
            logprobs += chunk.choices[0].logprobs.token_logprobs
        assert chunk.choices[0].finish_reason == "length"
        return tokens, versions, text, logprobs

    asked = asyncio.create_task(ask())
    for version in (1, 2):
        await bench.until(lambda state, enough=before + 20 * version: state.tokens >= enough)
        await bench.publish(version, interrupt)
    tokens, versions, text, logprobs = await asked
    assert set(versions) == {0, 1, 2} and versions == sorted(versions)
    assert (tokens, text) == (whole.token_ids, whole.text), "the same weights and seed draw the same tokens on"
    np.testing.assert_allclose(logprobs, whole.logprobs.token_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "must be a number, not text"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": 1e-6}, "temperature", "at least 0.01"),
        ({"top_p": 0}, "top_p", "must be in (0, 1]"),
        ({"top_k": 1.5}, "top_k", "whole number"),
        ({"min_p": 1}, "min_p", "must be in [0, 1)"),
        ({"max_tokens": 0}, "max_tokens", "generates nothing"),
        ({"max_tokens": True}, "max_tokens", "whole number"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens"),
        ({"n": 0}, "n", "between 1 and"),
        ({"n": 10**9}, "n", "between 1 and"),
        ({"seed": 2**64}, "seed", "between"),
        ({"stop": [""]}, "stop", "empty stop string"),
        ({"stop": 3}, "stop", "must be text"),
        ({"stop_token_ids": [102]}, "stop_token_ids", "outside the vocabulary of 102"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"best_of": 3}, "best_of", "ask for n"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"guided_json": {}}, "guided_json", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"no_such_parameter": 1}, "no_such_parameter", "not a parameter this server knows"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for stream"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": [[1], []]}, "prompt", "at least one token"),
        ({"prompt": [5, 102]}, "prompt", "token id 102 is outside the vocabulary of 102"),
        ({"prompt": [5, -1]}, "prompt", "token id -1"),
        ({"prompt": [5, "a"]}, "prompt", "the list holds a number"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(bench: Bench, options, param, message):
    status, body = await bench.post("/v1/completions", {"prompt": "1", **options})
    error = body["error"]
    assert status == 400 and error["param"] == param and message in error["message"], body
    assert error["type"] == "invalid_request_error" and error.keys() == {"message", "type", "param", "code"}
    assert (await bench.complete(max_tokens=1)).choices, "and the server goes on"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "only for logprobs = true"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"echo": True}, "echo", "not a parameter"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only text parts"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ],
)
async def test_what_a_chat_cannot_do_is_refused_by_name(bench: Bench, options, param, message):
    status, body = await bench.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], **options})
    assert status == 400 and body["error"]["param"] == param and message in body["error"]["message"], body


ODD = [None, True, False, 0, 1, -1, 0.5, 1e300, 2**70, -(2**63), float("nan"), "", "x", [], [0], [[]], ["x"], {}, {"a": 1}]
NAMES = [
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "echo", "logprobs", "top_logprobs", "best_of"),
    *("return_token_ids", "return_tokens_as_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "response_format", "structured_outputs"),
    *("stream_options", "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    *NEUTRAL,
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_nothing_a_client_sends_is_a_server_error(bench: Bench, path):
    plain = {
        "max_tokens": 2,
        **({"prompt": "1"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "1"}]}),
    }
    told = set()
    for name in NAMES:
        bodies = [{**plain, name: value} for value in ODD]
        for (status, body), sent in zip(await asyncio.gather(*(bench.post(path, b) for b in bodies)), bodies, strict=True):
            assert status in (200, 400, 404), (sent, body)
            told.add(status)
    assert told == {200, 400, 404} and (await bench.complete(max_tokens=1)).choices


async def test_values_that_ask_for_nothing_are_accepted(bench: Bench):
    nothing = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "user": "me",
    }
    assert (await bench.complete(max_tokens=1, **nothing)).choices
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "store": True,
    }
    assert (await bench.chat(max_tokens=1, top_logprobs=0, logprobs=True, **nothing)).choices


async def test_errors_have_the_statuses_openai_gives_them(bench: Bench):
    with pytest.raises(openai.NotFoundError) as missing:
        await bench.client.completions.create(model="gpt", prompt="1")
    assert missing.value.code == "model_not_found" and "'tiny'" in missing.value.message
    with pytest.raises(openai.BadRequestError) as long:
        await bench.complete([5] * CONTEXT)
    assert long.value.code == "context_length_exceeded" and str(CONTEXT) in long.value.message
    fits = await bench.complete([5] * (CONTEXT - 1), max_tokens=50, stream=False)
    assert fits.usage.completion_tokens == 1
    json_type = {"Content-Type": "application/json"}
    for data, status, message in (
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "must be a JSON object, not a list"),
        (b'{"prompt": "\xff"}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b" " * (MAX_BODY + 1), 413, "exceeded"),
    ):
        async with bench.http.post(f"{bench.url}/v1/completions", data=data, headers=json_type) as response:
            assert response.status == status and message in (await response.json())["error"]["message"]
    async with bench.http.post(f"{bench.url}/v1/completions", data=b'{"prompt": "1"}') as response:
        assert response.status == 415 and "application/json" in (await response.json())["error"]["message"]
    status, text = await bench.get("/v1/nowhere")
    assert status == 404 and "Not Found" in json.loads(text)["error"]["message"]
    assert (await bench.get("/v1/completions"))[0] == 405


async def test_models_are_listed(opened):
    async with opened(model_name="org/name") as bench:
        listed = [model async for model in bench.client.models.list()]
        assert [model.id for model in listed] == ["org/name"] and listed[0].max_model_len == CONTEXT
        assert (await bench.client.models.retrieve("org/name")).id == "org/name"
        with pytest.raises(openai.NotFoundError):
            await bench.client.models.retrieve("other")


async def test_the_api_token_is_asked_for(opened):
    async with opened(api_token="secret", control_token="other") as bench:
        assert (await bench.complete(max_tokens=1)).choices
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"Authorization": "Bearer é"},
        ):
            status, body = await bench.post("/v1/completions", {"prompt": "1"}, headers=headers)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
            assert (await bench.get("/metrics", headers=headers))[0] == 401
            assert (await bench.get("/v1/models", headers=headers))[0] == 401
        assert (await bench.get("/health"))[0] == 200
        assert (await bench.get("/control/state", headers={"Authorization": "Bearer secret"}))[0] == 401


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/control/state", "/absent"])
async def test_a_web_page_that_resolves_its_own_name_to_this_server_is_refused(opened, path):
    async with opened(host="mine") as bench:
        port = bench.url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "192.0.2.1", "[", "localhost.evil"):
            status, body = await bench.get(path, headers={"Host": host})
            assert status == 403 and json.loads(body)["error"]["code"] == "host_not_allowed", host
        for host in ("localhost", f"localhost:{port}", "LOCALHOST:1", f"127.0.0.1:{port}", f"[::1]:{port}", f"mine:{port}"):
            assert "host_not_allowed" not in (await bench.get(path, headers={"Host": host}))[1], host


async def test_a_server_with_a_token_answers_to_every_name(opened):
    """As behind a proxy: no web page knows the token."""
    async with opened(api_token="secret") as bench:
        headers = {"Host": "models.example", "Authorization": "Bearer secret"}
        assert (await bench.get("/v1/models", headers=headers))[0] == 200


async def test_what_finds_the_queue_full_is_told_to_come_again(opened):
    async with opened(slots=1, max_choices=3) as bench:
        await bench.engine.pause(Interrupt.KEEP)
        waiting = [asyncio.create_task(bench.complete(max_tokens=2)) for _ in range(3)]
        await bench.until(lambda state: state.running + state.waiting == 3)
        for path in ("/v1/completions", "/v1/chat/completions"):
            async with bench.http.post(bench.url + path, json={}) as response:
                assert response.status == 429 and response.headers["Retry-After"] == "1"
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert "3 completions are decoded or waiting" in error["message"]
        waiting.pop().cancel()
        await bench.until(lambda state: state.running + state.waiting == 2)
        with pytest.raises(openai.RateLimitError):
            await bench.complete(n=2)
        waiting.append(asyncio.create_task(bench.complete(max_tokens=2)))
        await bench.engine.resume()
        assert all(answer.choices for answer in await asyncio.gather(*waiting))
        assert len((await bench.complete(n=5, max_tokens=1)).choices) == 5, "an idle server takes any request"
        assert 'endpoint="/v1/completions",status="429"} 2' in (await bench.get("/metrics"))[1]


async def test_control_is_closed_without_a_token_of_its_own(opened):
    async with opened(api_token="secret") as bench:
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Bearer "}):
            status, body = await bench.post("/control/pause", {}, headers=headers)
            assert status == 403 and "HEADRACE_CONTROL_TOKEN" in body["error"]["message"]


async def test_control_pauses_resumes_and_scores(opened):
    async with opened(control_token="control") as bench:
        auth = {"headers": {"Authorization": "Bearer control"}}
        assert (await bench.post("/control/pause", {"interrupt": "stop"}, **auth))[0] == 400
        status, state = await bench.post("/control/pause", {"interrupt": "keep"}, **auth)
        assert status == 200 and state["paused"]
        asked = asyncio.create_task(bench.complete(max_tokens=20, ignore_eos=True))
        await bench.until(lambda state: state.waiting == 1)
        _, text = await bench.get("/control/state", **auth)
        assert json.loads(text)["waiting"] == 1 and json.loads(text)["tokens"] == 0
        _, state = await bench.post("/control/resume", None, **auth)
        assert not state["paused"] and (await asked).usage.completion_tokens == 20

        asked = asyncio.create_task(bench.complete(max_tokens=100, ignore_eos=True))
        await bench.until(lambda state: state.running == 1)
        _, state = await bench.post("/control/pause", {"interrupt": "drain"}, **auth)
        assert state["running"] == 0 and (await asked).usage.completion_tokens == 100
        await bench.post("/control/resume", {}, **auth)

        asked = asyncio.create_task(bench.complete(max_tokens=100, ignore_eos=True))
        await bench.until(lambda state: state.running == 1)
        _, state = await bench.post("/control/pause", {"interrupt": "retract"}, **auth)
        assert (state["running"], state["waiting"]) == (0, 1) and not asked.done()
        await bench.post("/control/resume", {}, **auth)
        assert (await asked).usage.completion_tokens == 100

        ids = [[5, 6, 7], [8, 9]]
        scores = await bench.engine.score([Rollout.from_prompt(row, id="r") for row in ids])
        status, body = await bench.post("/control/score", {"token_ids": ids}, **auth)
        assert status == 200 and body["version"] == 0
        assert body["logprobs"] == [[None, *values[1:].tolist()] for values in scores]
        for wrong in ([[102]], [[]], [], "text", [[5] * (CONTEXT + 1)]):
            assert (await bench.post("/control/score", {"token_ids": wrong}, **auth))[0] == 400


async def test_metrics_are_prometheus_text(bench: Bench):
    await bench.complete(max_tokens=7, ignore_eos=True)
    assert [chunk async for chunk in await bench.chat(stream=True, max_tokens=5, ignore_eos=True)]
    await bench.post("/v1/completions", {"prompt": 3})
    await bench.get("/nowhere/" + "x" * 50)
    await bench.until(lambda state: state.running == 0)
    status, page = await bench.get("/metrics")
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    named = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert status == 200 and all(any(key.startswith(name) for name in named) for key in values)
    assert values["headrace_tokens_drawn_total"] == "12" and values["headrace_slots"] == "8"
    assert values["headrace_requests_running"] == values["headrace_requests_waiting"] == "0"
    assert values["headrace_weight_version"] == "0" and int(values["headrace_free_blocks"]) > 0
    assert values['headrace_requests_total{endpoint="/v1/completions",status="200"}'] == "1"
    assert values['headrace_requests_total{endpoint="/v1/completions",status="400"}'] == "1"
    assert values['headrace_requests_total{endpoint="other",status="404"}'] == "1"
    assert values["headrace_time_to_first_token_seconds_count"] == "1"
    assert values["headrace_request_seconds_count"] == "3"
    buckets = [int(value) for key, value in values.items() if key.startswith("headrace_request_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 3


class Broken:
    """An engine whose state can stop answering, and whose calls can fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def state(self) -> Any:
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return await self._engine.state()


async def test_health_follows_the_engine(opened):
    engines: list[Broken] = []
    async with opened(wrap=lambda engine: engines.append(Broken(engine)) or engines[0], health_deadline=0.2) as bench:
        status, text = await bench.get("/health")
        assert status == 200 and json.loads(text)["status"] == "ok"
        engines[0].answers.clear()
        status, text = await bench.get("/health")
        assert status == 503 and "no answer for 0.2 s" in json.loads(text)["reason"]
        assert "headrace_engine_up 0" in (await bench.get("/metrics"))[1]
        engines[0].answers.set()
        assert (await bench.get("/health"))[0] == 200


@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_requests_in_flight_are_told_when_the_engine_fails(opened, how):
    engines: list[Broken] = []
    async with opened(wrap=lambda engine: engines.append(Broken(engine)) or engines[0], stall_deadline=0.5) as bench:
        stream = await bench.complete(max_tokens=240, ignore_eos=True, stream=True)
        await anext(stream)
        await bench.engine.pause(Interrupt.KEEP)
        asked = asyncio.create_task(bench.complete(max_tokens=240))
        if how == "raises":
            engines[0].error = RuntimeError("out of memory")
        else:
            engines[0].answers.clear()
        reason = "out of memory" if how == "raises" else "no answer for 0.5 s"
        with pytest.raises(openai.InternalServerError, match=reason):
            await asked
        with pytest.raises(openai.APIError, match=reason):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match=reason):
            await bench.complete()
        status, text = await bench.get("/health")
        assert status == 503 and reason in json.loads(text)["reason"]
        await bench.until(lambda state: (state.running, state.waiting) == (0, 0))


async def test_a_failed_call_is_a_server_error(opened):
    class Failing(Broken):
        async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
            raise KeyError("a secret of the inside")

    async with opened(wrap=Failing) as bench:
        status, body = await bench.post("/v1/completions", {"prompt": "1", "n": 3})
        assert status == 500 and body["error"]["type"] == "server_error" and "secret" not in body["error"]["message"]


async def test_shutting_down_ends_open_streams(tiny_model):
    core = EngineCore(load_model(tiny_model), name="engine-0", slots=4, context=CONTEXT)
    listener = bind("127.0.0.1", 0, has_token=False)
    url = url_of(listener)
    with decoding(core, WeightSync(Lineage("life"), MemoryTransport())) as engine:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        server = CompletionServer(engine, ServedModel(load_tokenizer(tiny_model), **FACTS))
        async with asyncio.timeout(10), server.listening(listener):
            extra = {"ignore_eos": True}
            stream = await client.completions.create(model=NAME, prompt="1", max_tokens=250, stream=True, extra_body=extra)
            await anext(aiter(stream))
            await engine.pause(Interrupt.KEEP)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        await engine.between_steps(lambda: None)  # what was posted before is done
        state = await engine.state()
        assert (state.running, state.waiting) == (0, 0)
        again = bind("127.0.0.1", int(url.rsplit(":", 1)[1]), has_token=False)
        again.close()


async def test_the_finish_reason_of_an_engine_that_stops_at_once(opened):
    """An abort before the first token, and one that carries tokens: both are resumed, none shows."""

    class Aborting(Broken):
        calls = 0

        async def stream(self, rollout: Rollout, sampling: Sampling) -> Any:
            type(self).calls += 1
            if self.calls == 3:  # engines resume such calls before they start new ones
                assert rollout.finish_reason is FinishReason.ABORT
            if self.calls == 1:
                from headrace.engine import Increment

                yield Increment((), (), (), FinishReason.ABORT)
                return
            async for part in self._engine.stream(rollout, sampling):
                if self.calls == 2 and len(rollout) == 1:
                    yield dataclasses.replace(part, finish_reason=FinishReason.ABORT)
                    return
                yield part

    async with opened(wrap=Aborting) as bench:
        options = {"max_tokens": 9, "seed": 1, "ignore_eos": True}
        expected = (await bench.complete("1", **options)).choices[0].text
        chunks = [chunk async for chunk in await bench.complete("1", stream=True, **options)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected and Aborting.calls == 3
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_importing_the_package_and_the_command_line_brings_no_server() -> None:
    script = "import sys, headrace, headrace.cli, headrace.engine; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
