"""Turns over real chat templates. The oracle is the template itself: if the policy writes what the template would print, a
rollout's text must be the template's text of all messages; and what the policy sampled is in the loss once, token for token."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from os.path import commonprefix

import numpy as np
import pytest
from templates import FOLDER, tokenizer_of

from headrace.engine import PromptTooLong
from headrace.envs import EngineClient, PromptEncoder
from headrace.model.tiny import build_tokenizer
from headrace.records import Call, FinishReason, Rollout, Sampling, Source
from headrace.settings import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    }
    for name in ("look", "add_up")
]
CALLS = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "llama3_1", "llama3_2"]
CALLS += ["lfm2_2_5", "lfm2_v2", "glm4moe", "gemma4", "nemotron_3_nano", "mistral_args"]
"""Templates whose form of calls is parsed."""
CHATS = [*CALLS, "llama3", "gemma", "gemma3", "phi3", "phi3_5", "deepseekv3", "deepseek_r1_distill", "cohere"]
REWRITES = {
    "glm4moe",
    "gemma4",
    "nemotron_3_nano",
    "qwen3",
    "qwen3_5_think",
    "qwen3_5_nothink",
    "qwen3_6",
    "deepseek_r1_distill",
    "deepseekv3",
}
"""Templates that drop earlier thinking when the user writes again."""
WORDS = ["7 + 5", "it is 12.", "ok", "Größe: 3\n\nmore", "<b>x</b>", "a  b", '{"x": [1, 2]}', "naïve 漢字 🙂", "the end"]


class Scripted:
    """An engine whose policy says what it is told, in pieces that no tokenizer would choose."""

    def release(self, ids: list[str]) -> None: ...

    def __init__(self, tokenizer, *, seed: int = 0, context: int = 1 << 30) -> None:
        self.tokenizer, self.random, self.context = tokenizer, random.Random(seed), context
        self.says, self.sampled, self.seen, self.took = [], [], [], 0.0

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        if len(rollout) >= self.context:
            raise PromptTooLong("full")
        self.seen.append(rollout)
        text, reason = self.says.pop(0)
        ids = []
        while text:
            piece = text[: self.random.randint(1, 9)]
            for special in self.tokenizer.all_special_tokens:
                if special in text[: len(piece) + len(special)]:
                    piece = special if text.startswith(special) else text[: text.index(special)]
                    break
            ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
            text = text[len(piece) :]
        self.sampled += ids
        await asyncio.sleep(self.took)
        how = {"engine": "x", "sampling": sampling, "finish_reason": reason, "started": 0.0, "finished": self.took}
        return rollout.extend(
            Call(start=len(rollout), stop=len(rollout) + len(ids), **how),
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.full(len(ids), -1.0, dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            policy="policy",
            lineage="",
        )


def client_of(tokenizer, **more) -> tuple[EngineClient, Scripted]:
    engine = Scripted(tokenizer, **more)
    names = {"episode": "g0/0", "group": "g0", "index": 0}
    return EngineClient(engine=engine, encoder=PromptEncoder(tokenizer), **names, sampling=Sampling(), seed=1), engine


def check_trained(rollouts: tuple[Rollout, ...], engine: Scripted) -> None:
    """The tokens in the loss are those that were sampled, each once and in order."""
    assert [int(i) for each in rollouts for i in each.token_ids[each.loss_mask]] == engine.sampled
    for rollout in rollouts:
        assert not (rollout.loss_mask & ~rollout.is_sampled).any()
        assert (rollout.logprobs[rollout.loss_mask] == -1).all()


def answer(rng: random.Random, name: str, *, calls: bool, thinks: bool) -> dict:
    message = {"role": "assistant", "content": rng.choice([*WORDS, ""]) if calls else rng.choice(WORDS)}
    if calls:
        count = 1 if name.startswith("llama") else rng.randint(1, 2)
        if name.startswith("llama"):
            message["content"] = ""
        made = [{"name": rng.choice(["look", "add_up"]), "arguments": {"a": rng.choice(WORDS)}} for _ in range(count)]
        message["tool_calls"] = [{"id": f"call{n:05d}", "type": "function", "function": each} for n, each in enumerate(made)]
    if thinks:
        message["reasoning_content"] = rng.choice(WORDS)
    return message


def as_written(encoder: PromptEncoder, messages: list, message: dict, **how) -> str:
    """What the template prints for an answer, behind what it prints before; else the answer in the form of its prompt."""
    before, whole = encoder.render(messages, **how), encoder.render([*messages, message], answers=False, **how)
    if whole.startswith(before):
        return whole[len(before) :]
    end = whole[whole.rindex(message["content"]) + len(message["content"]) :]
    return ("hm\n</think>\n\n" if before.endswith("<think>\n") else "") + message["content"] + end


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_is_what_its_template_prints(name: str, seed: int) -> None:
    rng, tokenizer = random.Random(seed), tokenizer_of(name)
    client, engine = client_of(tokenizer, seed=seed)
    encoder, tools = client.encoder, TOOLS if name in CALLS and rng.random() < 0.7 else ()
    has_system = name not in ("gemma", "deepseek_r1_distill") and rng.random() < 0.5
    may_think = "<think>" in tokenizer.chat_template and "reasoning_content" in tokenizer.chat_template
    may_think = may_think and name != "qwen3_5_nothink"
    thinks = may_think and (name != "qwen3" or rng.random() < 0.7)
    messages = [{"role": "system", "content": "Be brief."}] * has_system + [{"role": "user", "content": rng.choice(WORDS)}]

    async def talk() -> None:
        nonlocal messages
        chat = client.chat(list(messages), tools=tools)
        forks = 0
        for _ in range(5):
            said = answer(rng, name, calls=bool(tools) and rng.random() < 0.6, thinks=thinks)
            text = as_written(encoder, messages, said, tools=tools)
            if name == "glm4moe":  # whose turns end with the next one's start
                text += "<|observation|>" if "tool_calls" in said else "<|user|>"
            inside = ("<|tool_call", "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]")
            endings = (s for s in tokenizer.all_special_tokens if s in text and not s.startswith(inside))
            ending = min(endings, key=text.index)
            text = text[: text.index(ending) + len(ending)]
            is_cut = rng.random() < 0.3  # the policy does not get to the token that ends its turn
            engine.says = [
                (text.removesuffix(ending) if is_cut else text, FinishReason.LENGTH if is_cut else FinishReason.STOP)
            ]
            read = await chat.generate()
            assert [call["function"] for call in read.get("tool_calls", [])] == [
                c["function"] for c in said.get("tool_calls", [])
            ]
            assert read.get("reasoning_content", "").strip() == said.get("reasoning_content", "").strip()
            assert read["content"].strip().removeprefix("<think>\nhm\n</think>\n\n") == said["content"].strip()
            before = tokenizer.decode(chat.rollout.token_ids.tolist())
            new = [{"role": "user", "content": rng.choice(WORDS)}]
            if read.get("tool_calls"):
                new = [{"role": "tool", "tool_call_id": c["id"], "content": rng.choice(WORDS)} for c in read["tool_calls"]]
            messages = [*messages, read, *new]
            expected, id = encoder.render(messages, tools=tools), chat.rollout.id
            chat.append(*new)
            forks += chat.rollout.id != id
            assert (chat.rollout.id != id) == (not expected.startswith(before)), "it forks if the template rewrites, only then"
            assert tokenizer.decode(chat.rollout.token_ids.tolist()) == expected
            assert chat.messages == messages
        assert len(chat.rollouts) == 1 + forks
        check_trained(chat.rollouts, engine)
        for rollout in chat.rollouts[1:]:
            parent, at = rollout.parent
            assert (rollout.token_ids[:at] == next(r for r in chat.rollouts if r.id == parent).token_ids[:at]).all()
        if name not in REWRITES:
            assert not forks

    asyncio.run(talk())


def say(client: EngineClient, engine: Scripted, chat, text: str, reason: FinishReason = FinishReason.STOP) -> dict:
    engine.says = [(text, reason)]
    return asyncio.run(chat.generate())


def test_what_the_policy_wrote_stays_as_it_wrote_it() -> None:
    """Spaces and JSON that the template would print otherwise are no rewriting of history."""
    tokenizer = tokenizer_of("qwen2_5")
    client, engine = client_of(tokenizer)
    chat = client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    text = 'Well,   \n\n<tool_call>{"arguments":{"a":"1"},"name":"look"}</tool_call>\n\n<|im_end|>'
    read = say(client, engine, chat, text)
    chat.append({"role": "tool", "tool_call_id": read["tool_calls"][0]["id"], "content": "seen"})
    told = tokenizer.decode(chat.rollout.token_ids.tolist())
    reply = "\n<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert told.endswith(text + reply) and len(chat.rollouts) == 1
    check_trained(chat.rollouts, engine)


def test_tokens_know_where_they_came_from() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    client, engine = client_of(tokenizer)
    chat = client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    num_prompt = len(chat.rollout)
    say(client, engine, chat, '<tool_call>\n{"name": "look", "arguments": {"a": "1"}}\n</tool_call>', FinishReason.LENGTH)
    chat.append({"role": "tool", "content": "a view"}, {"role": "tool", "content": "a view"})
    say(client, engine, chat, "fine<|im_end|>")
    chat.append({"role": "user", "content": "more"})
    rollout = chat.rollout
    texts = {
        source: [
            tokenizer.decode(rollout.token_ids[np.array(span)].tolist())
            for span in np.split(
                np.flatnonzero(rollout.source == source),
                np.flatnonzero(np.diff(np.flatnonzero(rollout.source == source)) > 1) + 1,
            )
        ]
        for source in (Source.TOOL, Source.TEMPLATE, Source.PROMPT)
    }
    assert [text.strip() for text in texts[Source.TOOL]] == ["a view", "a view"]
    assert texts[Source.TEMPLATE][0].startswith("<|im_end|>\n<|im_start|>user"), (
        "the end of a turn that the policy did not sample"
    )
    assert [text.strip() for text in texts[Source.PROMPT][1:]] == ["more"]
    assert (rollout.source[:num_prompt] == Source.PROMPT).all()


def test_text_and_ids_are_appended_as_they_are() -> None:
    tokenizer = build_tokenizer()
    client, engine = client_of(tokenizer)
    engine.says = [("12", FinishReason.STOP), ("3", FinishReason.STOP)]
    rollout = asyncio.run(client.generate(client.prompt("5")))
    rollout = client.append(rollout, "low\n")
    rollout = client.append(rollout, [7, 8], source=Source.TEMPLATE)
    rollout = asyncio.run(client.generate(rollout))
    ids = tokenizer("low\n")["input_ids"]
    assert rollout.token_ids[3 : 3 + len(ids)].tolist() == ids
    assert rollout.source.tolist() == [0, 1, 1, *[2] * len(ids), 3, 3, 1]
    assert client.text(rollout) == "12low\n" + tokenizer.decode([7, 8]) + "3"
    with pytest.raises(ValueError, match="only a generate call"):
        client.append(rollout, "x", source=Source.SAMPLED)
    with pytest.raises(ValueError, match="messages are unknown"):
        client.append(rollout.replace(id="another"), [{"role": "user", "content": "x"}])


def test_a_text_prompt_needs_no_template() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    client, engine = client_of(tokenizer)
    chat = client.chat("2*3=")
    read = say(client, engine, chat, '<tool_call>{"name": "times", "arguments": {"a": 2}}</tool_call>')
    assert read["tool_calls"][0]["function"] == {"name": "times", "arguments": {"a": 2}}
    chat.append({"role": "tool", "content": "6"}, {"role": "user", "content": "So?"})
    assert client.text(chat.rollout).endswith("<tool_response>\n6\n</tool_response>\nSo?")
    assert (chat.rollout.source[-3:] == Source.PROMPT).all()


def test_a_call_that_the_policy_makes_up_without_tools_is_text() -> None:
    """Templates such as Mistral's refuse a conversation in which no reply follows a call."""
    tokenizer = copy.deepcopy(tokenizer_of("mistral_args"))
    refusal = '{% if m.tool_calls and not tools %}{{ raise_exception("no reply") }}{% endif %}'
    tokenizer.chat_template = tokenizer.chat_template.replace("</s>", f"{refusal}</s>")
    client, engine = client_of(tokenizer)
    chat = client.chat([{"role": "user", "content": "hi"}])
    call = '[TOOL_CALLS]look[ARGS]{"a": "1"}'
    assert say(client, engine, chat, f"{call}</s>") == {"role": "assistant", "content": call}
    chat.append({"role": "user", "content": "more"})
    assert tokenizer.decode(chat.rollout.token_ids.tolist()).endswith(f"[INST]hi[/INST]{call}</s>[INST]more[/INST]")
    check_trained(chat.rollouts, engine)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma"])
def test_an_answer_that_the_prompt_began_is_one_message(name: str) -> None:
    tokenizer = tokenizer_of(name)
    client, engine = client_of(tokenizer)
    prompt = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}]
    chat = client.chat(prompt)
    say(client, engine, chat, " 12.", FinishReason.LENGTH)
    follows = {"role": "user", "content": "ok"}
    chat.append(follows)
    whole = [prompt[0], {"role": "assistant", "content": "It is 12."}, follows]
    assert tokenizer.decode(chat.rollout.token_ids.tolist()) == client.encoder.render(whole)
    assert chat.messages == whole and len(chat.rollouts) == 1


THOUGHT = "<think>\nhm\n</think>\n\none"


@pytest.mark.parametrize(
    ("name", "says"), [("qwen2_5", ["one"]), ("qwen3", [THOUGHT]), ("qwen3", ["one", THOUGHT]), ("glm4moe", [THOUGHT])]
)
def test_a_conversation_that_fills_its_context_ends_with_what_was_sampled(name: str, says: list[str]) -> None:
    """Also where the template then drops thinking: the fork, which has no room for an answer, is left out."""
    tokenizer = tokenizer_of(name)
    client, engine = client_of(tokenizer, context=200)
    chat = client.chat([{"role": "user", "content": "hi"}])
    for number, text in enumerate(says, start=1):
        read, before = say(client, engine, chat, f"{text}<|im_end|>"), chat.rollout
        chat.append({"role": "user", "content": "x" * (400 if number == len(says) else 1)})
    told = chat.messages
    assert (chat.rollout.id != before.id) == (THOUGHT in says)
    assert asyncio.run(chat.generate()) == read and chat.messages == told
    assert chat.is_truncated and chat.rollout.finish_reason is FinishReason.LENGTH and chat.rollouts == (chat.rollout,)
    assert chat.rollout.token_ids.tolist() == before.token_ids.tolist() and chat.rollout.id == before.id
    check_trained(chat.rollouts, engine)
    with pytest.raises(PromptTooLong):
        asyncio.run(client.generate(client.prompt("y" * 400)))


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    client, _ = client_of(tokenizer_of("llama3"))
    with pytest.raises(ConfigError, match="does not show tools"):
        client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)


@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer", "lfm2"])
def test_calls_that_would_not_be_read_are_refused(name: str) -> None:
    """An episode would end at its first call, and be scored. LFM2's first template prints no call at all."""
    client, _ = client_of(tokenizer_of(name))
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"calls are not read .*Qwen, GLM, Llama 3, Mistral, LFM2, Gemma 4; set model.chat_template"
        ):
            client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)


def test_calls_are_read_if_the_prompt_opens_the_thinking_that_the_template_leaves_out() -> None:
    """As QwQ's does: `<think>` of the prompt and `<tool_call>` of what is printed begin alike."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    before, marker, after = tokenizer.chat_template.rpartition("<|im_start|>assistant\\n")
    before = before.replace("message.content", "message.content.split('</think>')[-1].lstrip('\\n')")
    tokenizer.chat_template = f"{before}{marker}<think>\\n{after}"
    client, engine = client_of(tokenizer)
    chat = client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    call = '<tool_call>\n{"name": "look", "arguments": {"a": "x"}}\n</tool_call><|im_end|>'
    engine.says = [(f"hm\n</think>\n\n{call}", FinishReason.STOP)]
    assert [each["function"]["name"] for each in asyncio.run(chat.generate())["tool_calls"]] == ["look"]


UNREAD = {"gptoss", "muse_glimmer", "lfm2"}
SHOWN = [
    path.stem
    for path in sorted(FOLDER.glob("*.jinja"))
    if not path.stem.endswith("_training")
    and path.stem not in UNREAD
    and "tools" in path.read_text().replace("builtin_tools", "")
]
ARGUMENTS = [
    {"a": "7 + 5"},
    {"a": 'it\'s "so"\n\n<b>x</b> (y=1), [z]: {w}', "n": "-3"},
    {"a": "naïve 漢字 🙂", "key": "None"},
    {},
    {"n": -3, "x": 1.5, "yes": True, "o": {"k": [1, {"m": "v"}], "t": "it's"}},
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", [*SHOWN, "mistral_list", "mistral_args"])
def test_a_call_is_read_as_the_template_prints_it(name: str, arguments: dict) -> None:
    client, engine = client_of(tokenizer_of(name))
    asked = [{"role": "user", "content": "hi"}]
    try:
        chat = client.chat(asked, tools=TOOLS)
    except ConfigError as error:
        pytest.skip(str(error)) if "does not show tools" in str(error) else pytest.fail(str(error))
    made = [{"name": "look", "arguments": arguments}, {"name": "add_up", "arguments": {"a": "1"}}][
        : 1 if "llama" in name else 2
    ]
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{n:05d}", "type": "function", "function": f} for n, f in enumerate(made)],
    }
    before = client.encoder.render(asked, tools=TOOLS)
    whole = client.encoder.render([*asked, said], tools=TOOLS, answers=False)
    text = whole[len(commonprefix([before, whole])) :].rstrip()  # noqa: RUF071  (texts, not paths)
    engine.says = [(text, FinishReason.STOP)]
    read = asyncio.run(chat.generate())
    found = [call["function"] for call in read["tool_calls"]]
    if (
        "<parameter=" in client.encoder.tokenizer.chat_template or "<arg_key>" in client.encoder.tokenizer.chat_template
    ):  # values are texts
        arguments = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        found = [{**f, "arguments": {k: v.replace("True", "true") for k, v in f["arguments"].items()}} for f in found]
    assert found == [{"name": "look", "arguments": arguments}, *made[1:]] and not read["content"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_reply_that_names_its_function_follows_the_call(is_cut: bool) -> None:
    """Gemma 4's turn goes on: the token that ends its call is the first of the reply."""
    client, engine = client_of(tokenizer_of("gemma4"))
    chat = client.chat([{"role": "user", "content": "hi"}], tools=TOOLS)
    text = '<|tool_call>call:look{a:<|"|>1<|"|>}<tool_call|><|tool_call>call:add_up{}<tool_call|>'
    read = say(client, engine, chat, text + "<|tool_response>" * (not is_cut))
    chat.append(*({"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in read["tool_calls"]))
    assert engine.tokenizer.decode(chat.rollout.token_ids.tolist()) == client.encoder.render(chat.messages, tools=TOOLS)
    assert len(chat.rollouts) == 1 and "response:add_up{" in client.text(chat.rollout)
    check_trained(chat.rollouts, engine)
