"""What a served request may ask beyond sampling: top logprobs, penalties, biases and grammars, through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from test_server import END, NAME, Bench, serving

from headrace.engine.native.core import EngineCore
from headrace.engine.native.sampling import uniform
from headrace.engine.request import Request
from headrace.engine.server import grammar as grammars
from headrace.engine.server.grammar import Grammars, GrammarText
from headrace.engine.server.text import ServedModel
from headrace.engine.shaping import GrammarError, Shaping
from headrace.model.load import load_model, load_tokenizer
from headrace.partial import Interrupt
from headrace.records import Rollout, Sampling

PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.9}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


@pytest.fixture
def bench(tiny_model: str) -> Any:
    return serving(tiny_model)


def compiled(tokenizer: Any, regex: str) -> Any:
    served = ServedModel(tokenizer, model_name="", context=256, vocabulary=102, stop_ids=(END,))
    return asyncio.run(Grammars(served).compile(GrammarText("regex", "regex", regex)))


def next_logits(core: EngineCore, token_ids: list[int]) -> np.ndarray:
    """By one forward pass over all tokens, without a cache."""
    from headrace.model import PackedContext, hidden_states

    ids = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = hidden_states(core.model, ids, torch.arange(len(ids)), PackedContext([len(ids)]))
        return core.head.logits(hidden[-1:])[0].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def expected_logits(
    logits: np.ndarray,
    prompt: list[int],
    sampled: list[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
) -> np.ndarray:
    """Token by token, as the parameters are documented."""
    result = logits.copy()
    for token in range(len(logits)):
        value = result[token] + (logit_bias or {}).get(token, 0.0)
        if token in prompt or token in sampled:
            value = value / repetition_penalty if value > 0 else value * repetition_penalty
        value -= frequency_penalty * sampled.count(token)
        result[token] = value - (presence_penalty if token in sampled else 0.0)
    return result


SHAPES = [
    ({"temperature": 0.7}, {}),
    ({"temperature": 0.0, "top_k": 2}, {}),
    ({"temperature": 1.0, **PENALTIES}, PENALTIES),
    ({"temperature": 1.3, "logit_bias": {"20": 9, "30": -100}}, {"logit_bias": {20: 9.0, 30: -100.0}}),
]


async def test_tokens_and_top_logprobs_are_those_of_a_direct_forward_pass(bench: Bench):
    async def check_one(bench: Bench, options: dict[str, Any], shape: dict[str, Any]) -> None:
        asked = {"max_tokens": 9, "ignore_eos": True, "seed": 3, "return_token_ids": True, **options}
        choice = (await bench.complete("12+3", logprobs=4, **asked)).choices[0]
        prompt, sampled, temperature = choice.prompt_token_ids, choice.token_ids, options["temperature"]
        given = zip(sampled, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
        for at, (token, value, top) in enumerate(given):
            logits = expected_logits(next_logits(bench.core, prompt + sampled[:at]), prompt, sampled[:at], **shape)
            expected = log_softmax(logits / (temperature or 1))
            likeliest = np.argsort(-expected, kind="stable")[:4]
            named = {bench.tokenizer.decode([int(each)]): expected[each] for each in {*likeliest.tolist(), token}}
            assert top == pytest.approx(named, abs=1e-4) and value == pytest.approx(expected[token], abs=1e-4)
            if temperature:  # the number that picks a token depends on seed and position alone
                cumulative = np.exp(expected).cumsum()
                number = uniform(np.asarray([3]), np.asarray([len(prompt) + at]))[0]
                assert cumulative[token] - np.exp(expected[token]) - 1e-5 <= number <= cumulative[token] + 1e-5
            else:
                assert token == expected.argmax()
        chat = (await bench.chat(logprobs=True, top_logprobs=3, **asked)).choices[0].logprobs.content
        for entry in chat:
            values = [other.logprob for other in entry.top_logprobs]
            assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] >= entry.logprob

    for options, shape in SHAPES:
        await check_one(bench, options, shape)


async def test_what_cannot_be_sampled_is_no_alternative(bench: Bench):
    entries = (await bench.chat(logprobs=True, top_logprobs=20, top_k=3, max_tokens=6, seed=1)).choices[0].logprobs.content
    for entry in entries:
        assert sum(np.exp(other.logprob) for other in entry.top_logprobs) == pytest.approx(1, abs=1e-5)
        assert entry.token in {other.token for other in entry.top_logprobs} and len(entry.top_logprobs) == 3
    plain = (await bench.chat(logprobs=True, top_k=3, max_tokens=6, seed=1)).choices[0].logprobs.content
    assert [(entry.token, entry.top_logprobs) for entry in plain] == [(entry.token, []) for entry in entries]
    echoed = (await bench.complete("12", echo=True, logprobs=1, max_tokens=1, seed=1)).choices[0].logprobs
    assert echoed.top_logprobs[:2] == [None, None] and len(echoed.top_logprobs[2]) in (1, 2)


async def test_one_shaped_request_changes_nothing_for_the_others(bench: Bench):
    plain = {"max_tokens": 30, "ignore_eos": True, "seed": 5, "return_token_ids": True}
    alone = (await bench.complete("12+3", **plain)).choices[0].token_ids
    shaped = {**plain, "ignore_eos": False, "structured_outputs": {"regex": "[0-9]{25}"}, **PENALTIES}
    before = (await bench.complete("12+3", **shaped)).choices[0]
    assert re.fullmatch("[0-9]{25}", before.text) and before.finish_reason == "stop"
    together = await asyncio.gather(*(bench.complete("12+3", **each) for each in (plain, shaped, plain, shaped)))
    ids = [answer.choices[0].token_ids for answer in together]
    assert ids == [alone, before.token_ids, alone, before.token_ids]


FORMATS = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": SCHEMA}}},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "object": {"response_format": {"type": "json_object"}, "logit_bias": {"69": 3, "100": -100, "101": -100, "98": 5}},
    "any": {"structured_outputs": {"json_object": True}, "logit_bias": {"69": 3, "100": -100, "101": -100, "98": 5}},
}


async def test_json_is_always_json(bench: Bench):
    async def check_format(bench: Bench, name: str) -> None:
        asked = {**FORMATS[name], "max_tokens": 200}
        answer = await bench.chat(n=4, seed=1, **asked)
        for choice in answer.choices:
            value = json.loads(choice.message.content)
            assert choice.finish_reason == "stop" and isinstance(value, dict)
            if name not in ("object", "any"):
                assert value.keys() == {"kind", "count"} and value["kind"] in "ab" and 0 <= value["count"] <= 99
        assert len({choice.message.content for choice in answer.choices}) > 1
        parts = [part async for part in await bench.chat(stream=True, seed=1, **asked)]
        assert "".join(part.choices[0].delta.content for part in parts) == answer.choices[0].message.content
        truncated = (await bench.chat(seed=1, **{**asked, "max_tokens": 1})).choices[0]
        assert truncated.finish_reason == "length" and truncated.message.content == "{"

    assert bench.tokenizer.convert_ids_to_tokens([69, 98, 100, 101]) == ['"', "}", " ", "\n"]
    await asyncio.gather(*(check_format(bench, name) for name in FORMATS))


async def test_grammars_are_followed(bench: Bench):
    cases = [
        ({"regex": r"(yes|no), [a-c]{2,4}!"}, r"(yes|no), [a-c]{2,4}!"),
        ({"choice": ['a "b"', "c\\d", "e\nf"]}, r'a "b"|c\\d|e\nf'),
        ({"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,2}/'}, r"\d{1,2}(\+\d{1,2}){1,3}"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
    ]

    async def check_one(bench: Bench, given: dict[str, Any], pattern: str) -> None:
        for temperature in (0.0, 1.0):
            asked = {"n": 3, "max_tokens": 40, "temperature": temperature, "structured_outputs": given, "seed": 2}
            for choice in (await bench.complete("12+3", **asked)).choices:
                assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop", choice.text
        stops = ["n", "y", "+", "d", "b", "f"]
        stopped = await bench.complete("1", max_tokens=40, stop=stops, structured_outputs=given)
        assert stopped.choices[0].stop_reason in stops

    await asyncio.gather(*(check_one(bench, *case) for case in cases))


async def test_new_weights_in_the_middle_of_a_grammar(bench: Bench):
    """The same weights again: retracted or resumed, matcher and penalties read what was sampled before."""
    asked = {"max_tokens": 60, "seed": 4, "structured_outputs": {"regex": "(ab[0-9]{3}c){8}"}, **PENALTIES}
    expected = (await bench.complete("12+3", logprobs=2, **asked)).choices[0]
    assert re.fullmatch("(ab[0-9]{3}c){8}", expected.text)
    for version, interrupt in enumerate((Interrupt.KEEP, Interrupt.RETRACT, Interrupt.ABORT), start=1):
        text, values = "", []
        async for part in await bench.complete("12+3", logprobs=2, stream=True, **asked):
            text += part.choices[0].text
            values += part.choices[0].logprobs.token_logprobs
            if len(text) == 10:
                await bench.publish(version, interrupt)
        assert text == expected.text
        np.testing.assert_allclose(values, expected.logprobs.token_logprobs, atol=1e-4)


WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format", "'yaml' is no type of it"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be given"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "json_schema must be given"),
    ({"response_format": {"type": "text", "more": 1}}, "response_format.more", "not a parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
        "response_format",
        "Invalid type: nope",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "must be a JSON schema",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be text"),
    ({"structured_outputs": {"regex": "a" * 4097}}, "structured_outputs.regex", "at most 4096"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
    ({"structured_outputs": {"json": {"x": [{"pattern": "a" * 4097}]}}}, "structured_outputs.json", "patterns of 4097"),
    ({"structured_outputs": {"json": {"patternProperties": [3]}}}, "structured_outputs.json", "cannot be compiled"),
    ({"structured_outputs": {"json": {"unevaluatedProperties": False}}}, "structured_outputs.json", "Unimplemented keys"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "must be text"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not a parameter"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "exclude each other",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "structured_outputs.regex", "and min_tokens exclude"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs.regex", "and ignore_eos exclude"),
    ({"structured_outputs": {"regex": "\u00e9"}}, None, "the grammar cannot be followed"),
    ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": "a"}, "frequency_penalty", "must be a number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
    ({"logit_bias": {"102": 1}}, "logit_bias", "'102' is not a token id"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": "a"}}, "logit_bias", "must be numbers by token id"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"logprobs": 2, "echo": True}, "logprobs", "must be 0 or 1 with echo"),
]


async def test_the_example_in_the_docs_runs(bench: Bench, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "structured_outputs" in text]
    code = example.replace("http://127.0.0.1:8000", bench.url).replace("builtin:tiny", NAME)
    await asyncio.to_thread(exec, code, {})
    assert re.fullmatch(r"\{'kind': '(even|odd)', 'number': \d+\}\n\d\d\n", capsys.readouterr().out)


async def test_what_is_wrong_is_refused_by_name(bench: Bench, monkeypatch):
    for options, param, message in WRONG:
        status, body = await bench.post("/v1/completions", {"prompt": "1", "max_tokens": 3, **options})
        assert status == 400 and body["error"]["param"] == param and message in body["error"]["message"], (options, body)
    with pytest.raises(openai.BadRequestError, match="only for logprobs = true"):
        await bench.chat(top_logprobs=2)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"pip install 'headrace\[grammar\]'"):
        await bench.chat(response_format={"type": "json_object"})
    assert (await bench.chat(presence_penalty=1.0, max_tokens=2)).choices


async def test_a_grammar_is_compiled_once_and_the_last_are_kept(bench: Bench, monkeypatch):
    compiled = []
    compile_one = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, given: compiled.append(given.text) or compile_one(self, given))
    monkeypatch.setattr(grammars, "_MAX_KEPT", 2)

    async def ask(regex: str) -> None:
        answer = await bench.complete("1", max_tokens=3, structured_outputs={"regex": regex})
        assert answer.choices[0].text == regex

    await asyncio.gather(*(ask("a") for _ in range(4)))
    for regex in "bacab":
        await ask(regex)
    assert compiled == ["a", "b", "c", "b"]


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.long)])
def test_too_few_blocks_for_all_and_a_shared_prompt(tiny_model, exact):
    """Shaped and plain siblings, some of which lose their blocks on the way, sample what each samples alone."""
    tokenizer = load_tokenizer(tiny_model)
    matcher = compiled(tokenizer, "([0-9]{2}[a-z]){5}")

    def generate(members: list[int], **options: Any) -> tuple[dict[str, list[int]], EngineCore]:
        done: dict[str, list[int]] = {}
        core = EngineCore(
            load_model(tiny_model), name="e", slots=8, context=64, block_size=4, exact=exact, kernels=False, **options
        )
        for member in members:
            shaping = Shaping(grammar=matcher, presence_penalty=1.0) if member % 2 else None
            request = Request(
                Rollout.from_prompt([7, 8, 9, 10, 11], id=str(member)),
                Sampling(max_tokens=20, seed=member, stop_ids=(END,)),
                on_done=lambda each: done.__setitem__(each.id, each.token_ids.tolist()),
                shaping=shaping,
            )
            core.submit(request)
        while core.has_work:
            core.step()
        return done, core

    together, core = generate([0, 1, 2, 3, 4, 5], num_blocks=14)
    assert core.scheduler.num_retractions > 0 and not core._slots.shapers
    for member in range(6):
        alone, _ = generate([member])
        assert together[str(member)] == alone[str(member)]
        if member % 2:
            assert re.fullmatch("([0-9]{2}[a-z]){5}", tokenizer.decode(together[str(member)][5:-1]))


def test_a_grammar_that_fails_on_the_way_ends_its_own_request_only(tiny_model):
    failed, done = [], []
    core = EngineCore(load_model(tiny_model), name="e", slots=4, context=64)
    matcher = compiled(load_tokenizer(tiny_model), "12\u00e9")
    for shaping in (None, Shaping(grammar=matcher)):
        prompt = Rollout.from_prompt([7, 8], id="r")
        core.submit(Request(prompt, Sampling(max_tokens=9), on_done=done.append, on_failed=failed.append, shaping=shaping))
    while core.has_work:
        core.step()
    assert [type(error) for error in failed] == [GrammarError] and len(done) == 1 and core.num_running == 0
