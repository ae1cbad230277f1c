"""Tools in a chat: shown to the model by its template, called by it in its text, told to the client as OpenAI does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from hypothesis import given, strategies as st
from test_server import END, NAME, Bench, Broken, serving

from headrace.engine import Increment
from headrace.engine.request import append_call
from headrace.engine.server.tool_calls import MARKED, ToolCallReader, parse_call, read_calls
from headrace.model.tiny import build_tokenizer
from headrace.records import Call, FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TEMPLATE = (
    "{% if tools %}<|system|>Tools:{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}"
    'Call as <tool_call>{"name": N, "arguments": A}</tool_call><|end|>{% endif %}'
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen's: one system message with the tools, calls in markers."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2.5, null]}}\n</tool_call>'
ROME = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
MALFORMED = [
    "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>{"name": "f", "arguments": {}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "f}\n</tool_call>',
]


def tokenizer_with(template: str = TEMPLATE) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Saying(Broken):
    """An engine that says what it is told to: `texts[i]` is what choice i of the i-th prompt comes to."""

    def __init__(self, engine: Any, tokenizer: Any, texts: list[str], *, reason: FinishReason = FinishReason.STOP) -> None:
        super().__init__(engine)
        self.prompts: list[str] = []
        self._tokenizer, self._texts, self._reason = tokenizer, texts, reason

    def _ids(self, rollout: Rollout) -> list[int]:
        self.prompts.append(self._tokenizer.decode(rollout.token_ids.tolist()))
        ids = self._tokenizer(self._texts[rollout.index % len(self._texts)])["input_ids"]
        return [*ids, END] if self._reason is FinishReason.STOP else ids

    async def stream(self, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
        ids = self._ids(rollout)
        for index, token in enumerate(ids):
            yield Increment((token,), (-1.0,), (0,), self._reason if index == len(ids) - 1 else None)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        ids = np.asarray(self._ids(rollout), dtype=np.int32)
        call = Call(
            start=len(rollout),
            stop=len(rollout) + len(ids),
            engine="",
            sampling=sampling,
            finish_reason=self._reason,
            started=0.0,
            finished=0.0,
        )
        values = np.full(len(ids), -1.0, dtype=np.float32)
        versions = np.zeros(len(ids), dtype=np.int32)
        told = {"policy": rollout.policy, "lineage": rollout.lineage, "masks": []}
        return append_call(rollout, call, token_ids=ids, logprobs=values, versions=versions, **told)


@pytest.fixture
def saying(tiny_model: str) -> Callable[..., Any]:
    """Opens a server whose model says the given texts."""

    @contextlib.asynccontextmanager
    async def opening(
        *texts: str, tokenizer: Any = None, reason: FinishReason = FinishReason.STOP, **options: Any
    ) -> AsyncIterator[tuple[Bench, Saying]]:
        tokenizer = tokenizer or tokenizer_with()
        engines: list[Saying] = []

        def wrap(engine: Any) -> Saying:
            engines.append(Saying(engine, tokenizer, list(texts), reason=reason))
            return engines[0]

        settings = {"context": 100_000, "vocabulary": len(tokenizer), **options}
        async with serving(tiny_model, tokenizer=tokenizer, wrap=wrap, **settings) as bench:
            yield bench, engines[0]

    return opening


def read(*pieces: str, max_calls: int = 100) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    reader = ToolCallReader(max_calls=max_calls)
    told = [*(reader.push(piece) for piece in pieces), reader.finish()]
    functions = [call["function"] for _, calls in told for call in calls]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    assert reader.num_given == len(calls)
    return "".join(content for content, _ in told), calls


def test_calls_are_told_apart_from_content() -> None:
    paris, rome = ("get_weather", {"city": "Paris", "days": [1, 2.5, None]}), ("get_weather", {"city": "Rome"})
    assert read("no calls \n") == ("no calls \n", [])
    assert read(PARIS) == ("", [paris])
    assert read(f"Let me look.\n{PARIS}\n{ROME}\n") == ("Let me look.", [paris, rome])
    assert read(f"a {PARIS} b {ROME}") == ("a b", [paris, rome])
    assert read(f"{PARIS}\n{ROME}", max_calls=1) == ("", [paris])
    assert read(f"{PARIS} then {ROME} .", max_calls=1) == (" then .", [paris])
    assert read('<tool_call>{"name": "now"}</tool_call>') == ("", [("now", {})])


def test_an_end_marker_inside_an_argument_does_not_end_the_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "a \\" </tool_call> <tool_call>"}}</tool_call>'
    assert read(text, "!") == ("!", [("f", {"x": 'a " </tool_call> <tool_call>'})])


def test_a_call_whose_end_marker_was_never_said_is_a_call() -> None:
    assert read(PARIS.removesuffix("\n</tool_call>"))[1] == read(PARIS)[1]
    assert read("<tool_call>\n", '{"name": "f"') == ('<tool_call>\n{"name": "f"', [])


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_is_content_and_does_not_take_others_with_it(text: str) -> None:
    assert read(text) == (text, [])
    assert read(f"a {text}\n{ROME}") == (f"a {text}", read(ROME)[1])
    assert parse_call(text.removeprefix("<tool_call>").removesuffix("</tool_call>")) is None


PARTS = ["<tool_call>", "</tool_call>", "<tool", "<", " ", "\n", '"', "\\", "{", "}", "text", PARIS, ROME, '{"name": "f"}']


@given(parts=st.lists(st.sampled_from([*PARTS, *MALFORMED[:6]]), max_size=12), sizes=st.lists(st.integers(0, 40), max_size=60))
def test_pushes_of_any_size_add_up_to_the_same(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    whole = read(text)
    assert read(*pieces, text[at:]) == whole == read(*text)
    if not whole[1]:
        assert whole[0] == text, "nothing is lost where nothing is called"
    if "<tool_call>" not in text:
        assert whole == (text, [])


def test_text_is_given_as_soon_as_it_cannot_be_a_marker() -> None:
    reader = ToolCallReader(max_calls=9)
    assert [reader.push(piece)[0] for piece in ("a", " ", "b<", "tool", "s>", "<tool_call")] == [
        "a",
        "",
        " b",
        "",
        "<tools>",
        "",
    ]
    assert reader.finish() == ("<tool_call", [])


PIECES = [
    "[look(",
    "a=",
    "'x'",
    '"y"',
    "\\",
    "'",
    '"',
    ")",
    "]",
    "{",
    "}",
    "call:look{",
    '<|"|>',
    ":",
    ",",
    " ",
    "1e999",
    "[ARGS]",
]
PIECES += ["\ud800", "NaN", "look\n", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": ', '"arguments": ']


@pytest.mark.parametrize("form", MARKED)
def test_whatever_follows_a_marker_is_content_or_calls(form: str) -> None:
    rng, (shown, opens, closes, _) = random.Random(form), MARKED[form]
    for _ in range(3000):
        text = "so " + opens + "".join(rng.choice([*PIECES, opens, closes]) for _ in range(rng.randint(0, 14)))
        content, calls = read_calls(text, template=shown)
        assert calls or content == text
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


@pytest.mark.parametrize("form", MARKED)
@pytest.mark.parametrize("piece", [*PIECES, *(form.opens for form in MARKED.values()), "'a", '"\\', "call:a{b", "a=(", "x" * 9])
def test_reading_takes_time_linear_in_the_text(form: str, piece: str) -> None:
    shown, opens, closes, _ = MARKED[form]
    started = time.process_time()
    for end in ("", closes):
        read_calls(opens + piece * (400_000 // len(piece)) + end, template=shown)
    assert time.process_time() - started < 10.0, "quadratic time would be minutes"


def test_calls_in_python_are_read() -> None:
    """What LFM2 writes, though its template prints it otherwise."""
    written = """[look(at="it's", n=-1.5, all=True, of=['a', {'k': None}], say='a\\'b, c'), go()]"""
    text = f"<|tool_call_start|>{written}<|tool_call_end|> Wait."
    content, calls = read_calls(text, template="<|tool_call_start|>")
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"at": "it's", "n": -1.5, "all": True, "of": ["a", {"k": None}], "say": "a'b, c"}, {}]
    assert content == " Wait." and [call["function"]["name"] for call in calls] == ["look", "go"]


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    """Of what a model could be made to say, the worst: quadratic time would be minutes."""
    for unit in ("<tool_call>", "</tool_call>", '<tool_call>"', '<tool_call>"</tool_call>', ROME, MALFORMED[1], "\\", "< "):
        text = unit * (400_000 // len(unit))
        content, calls = read(text)
        assert content == text or calls or unit == ROME


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_told_of_calls(saying, stream):
    async with saying(f"Let me <look>.\n{PARIS}\n{ROME}") as (bench, _):
        choice, reasons, chunks = await ask(bench, stream=stream, tools=[WEATHER])
        assert choice.content == "Let me <look>." and reasons == ["tool_calls"]
        first, second = choice.tool_calls
        assert first.type == second.type == "function" and first.id != second.id and first.id.startswith("call_")
        assert first.function.name == second.function.name == "get_weather"
        assert json.loads(first.function.arguments) == {"city": "Paris", "days": [1, 2.5, None]}
        assert json.loads(second.function.arguments) == {"city": "Rome"}
        if stream:
            deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
            assert deltas[0].role == "assistant" and sum(delta.role is not None for delta in deltas) == 1
            assert [call.index for delta in deltas for call in delta.tool_calls or []] == [0, 1]
            assert sum(bool(delta.content) for delta in deltas) > 5, "content comes as it is said"
        choice, reasons, _ = await ask(bench, stream=stream, tools=[WEATHER], parallel_tool_calls=False)
        assert len(choice.tool_calls) == 1 and choice.content == "Let me <look>." and reasons == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_only_calls_has_no_content(saying, stream):
    async with saying(PARIS) as (bench, _):
        choice, reasons, _ = await ask(bench, stream=stream, tools=[WEATHER])
        assert not choice.content and len(choice.tool_calls) == 1 and reasons == ["tool_calls"]
        assert stream or choice.content is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["no call <tool", " ", *MALFORMED[:3]])
async def test_an_answer_without_a_call_is_content(saying, stream, text):
    async with saying(text) as (bench, _):
        choice, reasons, _ = await ask(bench, stream=stream, tools=[WEATHER])
        assert (choice.content, choice.tool_calls, reasons) == (text, None, ["stop"])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_off_says_so(saying, stream):
    async with saying(f'{PARIS}\n<tool_call>{{"name": "get', reason=FinishReason.LENGTH) as (bench, _):
        choice, reasons, _ = await ask(bench, stream=stream, tools=[WEATHER])
        assert len(choice.tool_calls) == 1 and reasons == ["length"]
        assert choice.content == '\n<tool_call>{"name": "get'


async def ask(bench: Bench, *, stream: bool, **options: Any) -> tuple[Any, list[str], list[Any]]:
    """(the message, the finish reasons told, the chunks) as OpenAI's client puts them together."""
    if not stream:
        answer = await bench.chat(**options)
        return answer.choices[0].message, [answer.choices[0].finish_reason], []
    chunks = [chunk async for chunk in await bench.chat(stream=True, **options)]
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    message = state.current_completion_snapshot.choices[0].message
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return message, reasons, chunks


async def test_choices_of_one_request_call_for_themselves(saying):
    async with saying(PARIS, "nothing", f"Well. {ROME}") as (bench, _):
        whole = await bench.chat(tools=[WEATHER], n=3, return_token_ids=True)
        assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop", "tool_calls"]
        assert [choice.message.content for choice in whole.choices] == [None, "nothing", "Well."]
        said = [bench.tokenizer.decode(choice.token_ids[:-1]) for choice in whole.choices]
        assert said == [PARIS, "nothing", f"Well. {ROME}"], "the tokens are what the model said, calls and all"
        contents, calls = [""] * 3, [0] * 3
        async for chunk in await bench.chat(tools=[WEATHER], n=3, stream=True):
            choice = chunk.choices[0]
            contents[choice.index] += choice.delta.content or ""
            calls[choice.index] += len(choice.delta.tool_calls or [])
        assert (contents, calls) == (["", "nothing", "Well."], [1, 0, 1])


async def test_tools_and_calls_go_through_the_template(saying):
    rome = ROME.replace(">{", ">\n{").replace("}<", "}\n<")
    said = f"Let me look.\n{PARIS}\n{rome}"
    async with saying(said) as (bench, engine):
        messages: list[Any] = [{"role": "user", "content": "The weather in Paris and Rome?"}]
        answer = await bench.chat(messages=messages, tools=[WEATHER])
        shown = f"<|system|>Tools:\n{json.dumps(WEATHER)}\nCall as"
        assert engine.prompts[-1].startswith(shown) and engine.prompts[-1].endswith("Rome?<|end|><|assistant|>")
        calls = answer.choices[0].message.tool_calls
        answered = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "18"}]} for call in calls]
        first_prompt = engine.prompts[-1]
        await bench.chat(messages=[*messages, answer.choices[0].message, *answered], tools=[WEATHER])
        tail = "<|end|><|tool|>18<|end|><|tool|>18<|end|><|assistant|>"
        assert engine.prompts[-1] == f"{first_prompt}{said}{tail}", "what the model said is what it is shown again"


async def test_arguments_may_be_objects_or_nothing(saying):
    async with saying("hi") as (bench, engine):
        for arguments, shown in (({"a": "é"}, '{"a": "é"}'), ('{"a": 1}', '{"a": 1}'), ("", "{}"), (" ", "{}"), ("{}", "{}")):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
            assert (await bench.post("/v1/chat/completions", {"messages": messages}))[0] == 200
            assert f'"arguments": {shown}}}'.replace("é", "<|unknown|>") in engine.prompts[-1]


async def test_an_answer_of_a_tool_has_the_name_of_what_was_called(saying):
    template = (
        "{% for m in messages %}{{ m.tool_calls }}{% if m.role == 'tool' %}{{ m.name }}={{ m.content }};{% endif %}{% endfor %}"
    )
    async with saying("x", tokenizer=tokenizer_with(template)) as (bench, engine):
        calls = [{"id": name, "function": {"name": name.upper(), "arguments": {}}} for name in ("a", "b")]
        answers = [
            {"role": "tool", "tool_call_id": "b", "content": "1"},
            {"role": "tool", "tool_call_id": "a", "content": "2"},
            {"role": "tool", "tool_call_id": "a", "content": "3", "name": "own"},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]
        body = {"messages": [{"role": "assistant", "tool_calls": calls}, *answers]}
        assert (await bench.post("/v1/chat/completions", body))[0] == 200
        assert engine.prompts[-1].endswith("B=1;A=2;own=3;=4;")


async def test_tool_choice_none_neither_shows_nor_reads_calls(saying):
    async with saying(PARIS) as (bench, engine):
        message = (await bench.chat(tools=[WEATHER], tool_choice="none")).choices[0].message
        assert (message.content, message.tool_calls) == (PARIS, None)
        assert engine.prompts[-1] == "<|user|>12+3<|end|><|assistant|>"
        await bench.chat(tools=[WEATHER], tool_choice="auto")
        assert "get_weather" in engine.prompts[-1]
        message = (await bench.chat()).choices[0].message
        assert (message.content, message.tool_calls) == (PARIS, None), "without tools a call is text"


async def test_markers_that_are_special_tokens_are_seen(saying):
    tokenizer = tokenizer_with()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    async with saying(f"Well.{PARIS}{ROME}", tokenizer=tokenizer) as (bench, _):
        for stream in (False, True):
            message, reasons, _ = await ask(bench, stream=stream, tools=[WEATHER])
            assert message.content == "Well." and len(message.tool_calls) == 2 and reasons == ["tool_calls"]


async def test_a_template_of_another_family_leaves_calls_in_the_text(saying):
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    async with saying('[TOOL_CALLS] [{"name": "f"}]', tokenizer=tokenizer_with(template)) as (bench, _):
        message = (await bench.chat(tools=[WEATHER])).choices[0].message
        assert (message.content, message.tool_calls) == ('[TOOL_CALLS] [{"name": "f"}]', None)


async def test_a_template_for_tools_beside_another_is_used(saying):
    tokenizer = tokenizer_with()
    tokenizer.chat_template = {"default": build_tokenizer().chat_template, "tool_use": TEMPLATE}
    async with saying(PARIS, tokenizer=tokenizer) as (bench, _):
        assert (await bench.chat(tools=[WEATHER])).choices[0].message.tool_calls
        assert (await bench.chat()).choices[0].message.content == PARIS


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [WEATHER]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "call_1", "content": "18"}]},
            "messages[1]",
        ),
    ],
)
async def test_what_a_template_would_drop_is_refused(saying, options, param):
    template = "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    async with saying(PARIS, tokenizer=tokenizer_with(template)) as (bench, engine):
        with pytest.raises(openai.BadRequestError, match="chat template does not show") as refused:
            await bench.chat(**options)
        assert refused.value.param == param and refused.value.code == "unsupported_parameter"
        assert engine.prompts == []


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {"type": "function", "function": {"name": "f", **fields}}]}


def past(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": list(calls), **fields}]}


def past_arguments(arguments: Any) -> dict[str, Any]:
    return past(CALL, {"function": {"name": "f", "arguments": arguments}})


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tools": WEATHER}, "tools", "must be a list of tools, not an object"),
        ({"tools": "f"}, "tools", "not text"),
        ({"tools": [None]}, "tools[0]", "must be an object, not null"),
        ({"tools": [WEATHER, 3]}, "tools[1]", "not a number"),
        ({"tools": [{}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object, not null"),
        ({"tools": [{**WEATHER, "custom": 1}]}, "tools[0].custom", "is not a field this server knows"),
        (function(name=None), "tools[1].function.name", "must be text, not null"),
        (function(name=""), "tools[1].function.name", "must not be empty"),
        (function(name="get_weather"), "tools[1].function.name", "is the name of another tool"),
        (function(name="\ud800"), "tools[1].function.name", "surrogate"),
        (function(description=3), "tools[1].function.description", "must be text"),
        (function(parameters="{}"), "tools[1].function.parameters", "must be a JSON schema, not text"),
        (function(parameters={"x": "\ud800"}), "tools[1].function", "surrogate"),
        (function(parameters={"x": [float("nan")]}), "tools[1].function.parameters.x[0]", "nan is not a number"),
        (function(strict=True), "tools[1].function.strict", "cannot be held to a schema"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format", "together with tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "cannot be forced",
        ),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", 'must be "auto" or "none"'),
        ({"tools": [WEATHER], "tool_choice": 1}, "tool_choice", 'must be "auto" or "none"'),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
        (past(), "messages[1].content", "must be text, not null"),
        (past(CALL, role="user"), "messages[1].tool_calls", "an assistant's"),
        (past(CALL, tool_calls="f"), "messages[1].tool_calls", "must be a list of calls, not text"),
        (past(CALL, tool_calls=False), "messages[1].tool_calls", "must be a list of calls"),
        (past(CALL, content=3), "messages[1].content", "must be text, not a number"),
        (past(CALL, 1), "messages[1].tool_calls[1]", "must be an object, not a number"),
        (past({**CALL, "type": "custom"}), "messages[1].tool_calls[0].type", 'must be "function"'),
        (past({"type": "function"}), "messages[1].tool_calls[0].function", "must be an object"),
        (past({**CALL, "id": 3}), "messages[1].tool_calls[0].id", "must be text"),
        (past({"function": {"arguments": "{}"}}), "messages[1].tool_calls[0].function.name", "must be text, not null"),
        (past_arguments("{"), "messages[1].tool_calls[1].function.arguments", "is not JSON"),
        (past_arguments("[1]"), "messages[1].tool_calls[1].function.arguments", "must be a JSON object, not a list"),
        (past_arguments(None), "messages[1].tool_calls[1].function.arguments", "must be a JSON object, not null"),
        (past_arguments('{"x": NaN}'), "messages[1].tool_calls[1].function.arguments.x", "nan is not a number"),
        (past_arguments('{"x": "\\ud800"}'), "messages[1].tool_calls[1].function.arguments", "surrogate"),
        (past_arguments('{"x":' * 200 + "1" + "}" * 200), "messages[1].tool_calls[1].function.arguments", "more than 100 deep"),
        (past_arguments("[" * 100_000), "messages[1].tool_calls[1].function.arguments", "is not JSON"),
        (past(function_call={"name": "f"}), "messages[1].function_call", "use tool_calls"),
        ({"messages": [{"role": "tool", "tool_call_id": 3, "content": "x"}]}, "messages[0].tool_call_id", "must be text"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "must be text, not null"),
    ],
)
async def test_what_is_wrong_with_tools_is_said_by_name(saying, options, param, message):
    async with saying(PARIS) as (bench, engine):
        body = {"messages": [{"role": "user", "content": "1"}], **options}
        status, answer = await bench.post("/v1/chat/completions", body)
        assert status == 400 and answer["error"]["param"].startswith(param), answer
        assert message in answer["error"]["message"] and len(answer["error"]["message"]) < 500
        assert engine.prompts == [] and (await bench.chat(tools=[WEATHER])).choices[0].message.tool_calls


async def test_the_example_in_the_docs_runs(saying, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "tools=" in text]
    (shown,) = re.findall(r"with tools.*?```text\n(.*?)```", page, re.DOTALL | re.IGNORECASE)

    class Talking(Saying):
        def _ids(self, rollout: Rollout) -> list[int]:
            is_answered = "<|tool|>" in self._tokenizer.decode(rollout.token_ids.tolist())
            self._texts = ["It is 18 degrees in Paris." if is_answered else CALLED]
            return super()._ids(rollout)

    CALLED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    async with saying(CALLED) as (bench, engine):
        engine.__class__ = Talking
        code = example.replace("http://127.0.0.1:8000", bench.url).replace("Qwen/Qwen3-0.6B", NAME)
        await asyncio.to_thread(exec, code, {})
        assert capsys.readouterr().out == shown
