"""What a stream tells adds up to the answer that is parsed at its end, however the tokens come, for real chat templates."""

from __future__ import annotations

import random

import pytest
from templates import tokenizer_of
from test_turns import CHATS, TOOLS

from headrace.engine import first_stop
from headrace.envs import PromptEncoder
from headrace.envs.answer_stream import AnswerStream
from headrace.envs.turns import History
from headrace.records import Rollout

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = (
    "plain  text, with spaces \n\n and an end \n",
    f"Let me see.\n{CALL}\n{CALL}",
    f"a < b <tool_ca {CALL} and after",
    "<tool_call>\nno json\n</tool_call> x",
    "<think>\nhm < hm </thin\n\n</think>\n\nso it is",
    "<think>\n\n</think>\n\nso it is",
    "hm, it goes on\n</think>\n\nso it is </think> twice",
    "<think> never ends\n\n",
    "<think",
    '{"name": "add", "parameters": {"a": 1}}',
    ' [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "text [TOOL_CALLS] no list",
    'see [TOOL_CALLS]add[ARGS]{"a": 1}',
    "see  <|tool_call_start|>[add(a=1)]<|tool_call_end|> and after ",
    "<|tool_call_start|>[add(a=",
    "see <|tool_call>call:add{a:1}<tool_call|>and after",
    "see\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call> and after",
    "naïve 日本語 🙂🙂 text STOP more",
    "",
)


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("name", CHATS)
def test_pieces_add_up(name: str, has_tools: bool) -> None:
    encoder, chance = PromptEncoder(tokenizer_of(name)), random.Random(0)
    messages = [{"role": "user", "content": "go"}]
    prompt = encoder.encode(messages)
    history = History.of_prompt(messages, len(prompt), tools=TOOLS if has_tools else ())
    ends = [[id] for id in sorted(encoder.turns.special)[:2]]
    told_early = 0
    for text in TEXTS:
        for stops in ((), ("STOP", "is")):
            ids = [*encoder.tokens(text), *chance.choice([[], *ends])]
            rollout = Rollout.from_prompt(prompt, id="r").append(ids) if ids else Rollout.from_prompt(prompt, id="r")
            message = encoder.turns.answer(history, rollout)
            stopped = first_stop(message["content"], stops) if stops else None
            if stopped is not None:
                message["content"] = message["content"][: stopped[0]]
            pieces: list[dict[str, str]] = []
            stream, left = AnswerStream(encoder.turns, history, stops=stops, tell=pieces.append), list(ids)
            while left:
                size = chance.choice((1, 1, 2, 5))
                stream.push(left[:size])
                del left[:size]
            told_early += len(pieces)
            stream.finish(message)
            stream.push(ids)
            for key in ("content", "reasoning_content"):
                assert "".join(piece.get(key, "") for piece in pieces) == (message.get(key) or ""), text
    assert told_early > len(TEXTS)
