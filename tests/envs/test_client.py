"""What an environment holds: prompts of siblings share their tokens and nothing else, and text is the tokenizer's own."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.envs import EngineClient, PromptEncoder, SingleTurn
from headrace.model.tiny import build_tokenizer
from headrace.records import Call, FinishReason, Rollout, Sampling
from headrace.settings import ConfigError

CHAT = [{"role": "user", "content": "31524"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def client(encoder: PromptEncoder, index: int = 0, engine=None) -> EngineClient:
    return EngineClient(
        engine=engine, encoder=encoder, episode=f"g7/{index}", group="g7", index=index, sampling=Sampling(), seed=5
    )


def finished(token_ids: list[int]) -> Rollout:
    prompt, num = Rollout.from_prompt([7, 8], id="r"), len(token_ids)
    reason = FinishReason.STOP
    call = Call(start=2, stop=2 + num, engine="x", sampling=Sampling(), finish_reason=reason, started=0.0, finished=0.0)
    return prompt.extend(
        call,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.zeros(num, dtype=np.float32),
        versions=np.zeros(num, dtype=np.int32),
        policy="policy",
        lineage="",
    )


def test_text_is_what_the_tokenizer_says(tokenizer) -> None:
    encoder = PromptEncoder(tokenizer)

    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    @quick
    def check(token_ids: list[int]) -> None:
        assert encoder.decode(finished(token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=True)

    check()


def test_a_tokenizer_that_does_more_than_its_backend_is_asked_itself() -> None:
    class Shouting(type(build_tokenizer())):
        def _decode(self, *arguments, **keywords) -> str:
            return super()._decode(*arguments, **keywords).upper()

    shouting, tidy = build_tokenizer(), build_tokenizer()
    shouting.__class__ = Shouting
    tidy.clean_up_tokenization_spaces = True
    spaced = tidy("ab . c")["input_ids"]
    for tokenizer in (shouting, tidy):
        decoded = PromptEncoder(tokenizer).decode(finished(spaced))
        assert decoded == tokenizer.decode(spaced, skip_special_tokens=True)
        assert decoded != build_tokenizer().decode(spaced, skip_special_tokens=True)


@pytest.mark.parametrize("prompt", ["31524", CHAT], ids=["text", "chat"])
def test_a_prompt_is_the_tokenizers_and_the_episodes(tokenizer, prompt) -> None:
    made = client(PromptEncoder(tokenizer), index=3).prompt(prompt)
    if isinstance(prompt, str):
        expected = tokenizer(prompt)["input_ids"]
    else:
        expected = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert made == Rollout.from_prompt(expected, id="g7/3", episode="g7/3", group="g7", index=3)


def test_a_final_message_of_the_assistant_is_left_open_to_be_gone_on_with(tokenizer) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "12"}]
    assert tokenizer.decode(PromptEncoder(tokenizer).encode(begun)) == "<|user|>31524<|end|><|assistant|>12"
    assert begun[-1]["content"] == "12"


def test_a_message_without_content_is_refused_and_not_written_out_as_the_word_none(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"message 1 of the prompt \(assistant\) has the content None; give text, or ''"):
        PromptEncoder(tokenizer).encode([*CHAT, {"role": "assistant", "content": None}])


def test_siblings_share_tokens_and_no_dictionary(tokenizer) -> None:
    encoder = PromptEncoder(tokenizer)
    first, second = (client(encoder, index).prompt(CHAT) for index in range(2))
    assert first.token_ids is second.token_ids and first.id != second.id
    assert first.rewards is not second.rewards and first.columns is not second.columns


def test_a_second_rollout_of_an_episode_has_a_name_of_its_own(tokenizer) -> None:
    one = client(PromptEncoder(tokenizer))
    assert [one.prompt(CHAT).id, one.prompt(CHAT).id] == ["g7/0", "g7/0.1"]


def test_every_rollout_of_an_episode_draws_its_own_random_numbers(tokenizer) -> None:
    """And those of its first are as they ever were: a hash of the run's seed and the episode."""
    seeds: dict[str, list[int]] = {}

    class Engine:
        async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
            seeds.setdefault(rollout.id, []).append(sampling.seed)
            return rollout

    one = client(PromptEncoder(tokenizer), engine=Engine())
    first = one.prompt(CHAT)
    for rollout in (first, one.prompt(CHAT), first.forked(len(first), id="g7/0-fork"), first):
        asyncio.run(one.generate(rollout))
    assert seeds[first.id] == [2386211708893064916] * 2, "two calls of one rollout differ by position alone"
    assert seeds.keys() == {"g7/0", "g7/0.1", "g7/0-fork"}
    assert len({seed for found in seeds.values() for seed in found}) == 3


def test_messages_that_grow_in_place_are_another_prompt(tokenizer) -> None:
    encoder, messages = PromptEncoder(tokenizer), json.loads(json.dumps(CHAT))
    before = client(encoder).prompt(messages)
    messages.append({"role": "assistant", "content": "12345"})
    assert len(client(encoder).prompt(messages)) > len(before)


def test_cached_prompts_are_bounded_in_bytes(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("headrace.envs.encoder._MAX_CACHED", 100_000)
    encoder, num_encoded, most = PromptEncoder(tokenizer), 0, 0
    encode = encoder._encode

    def counting(*arguments):
        nonlocal num_encoded
        num_encoded += 1
        return encode(*arguments)

    monkeypatch.setattr(encoder, "_encode", counting)
    for number in range(200):
        for _ in range(4):
            encoder.start(f"{number:04d}" + "7" * 1000)
        most = max(most, sum(len(text) + rollout.num_bytes for text, (rollout, _) in encoder._cache.items()))
    assert num_encoded == 200, "siblings, which come one after the other, share one"
    assert 50_000 < most <= 100_000
    long = encoder.start("7" * 50_000)
    assert long is encoder.start("7" * 50_000) and len(encoder._cache) == 1, "one that is larger than all of it, too"
    encoder.start("12")
    assert list(encoder._cache) == ["12"]


def test_a_rows_own_template_variables_reach_its_prompt() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template += "{% if thinks %}#{% endif %}"
    encoder, task = PromptEncoder(tokenizer), {"prompt": CHAT, "chat_template_kwargs": {"thinks": True}}
    asked = []

    class Engine:
        async def generate(self, rollout, sampling):
            asked.append(tokenizer.decode(rollout.token_ids))
            return rollout

    for row in (task, {"prompt": CHAT}):
        asyncio.run(SingleTurn().run(row, client(encoder, engine=Engine())))
    assert asked == ["<|user|>31524<|end|><|assistant|>#", "<|user|>31524<|end|><|assistant|>"]
