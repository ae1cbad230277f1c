"""Which tokens of an example are learned, under the chat templates of real models."""

from __future__ import annotations

from importlib import resources

import pytest

from headrace.envs import PromptEncoder
from headrace.launch.examples import encode_examples
from headrace.model import ModelSettings, set_template
from headrace.model.tiny import build_tokenizer
from headrace.settings import ConfigError

MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<|begin_of_text|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|channel|>", "<|message|>", "<|return|>",
    "<|assistant|>", "<|user|>", "<|system|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>",
    "<｜Assistant｜>", "<｜User｜>",
)  # fmt: skip
CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6, of course"},
]
THOUGHT = [*CHAT[:3], {"role": "assistant", "content": "<think>\nthree twice\n</think>\n\n6"}]
THOUGHT[1] = {"role": "assistant", "content": "<think>\ntwo twice\n</think>\n\n4"}


def template_of(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


def encoder_of(template: str, **settings: object) -> PromptEncoder:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    set_template(tokenizer, ModelSettings(**settings))
    return PromptEncoder(tokenizer)


def learned(encoder: PromptEncoder, row: dict) -> list[list[str]]:
    """The texts that are learned, of each example."""
    found = []
    for example in encode_examples(row, encoder, name="row"):
        assert example.loss_mask.tolist() == example.is_sampled.tolist()
        found.append([encoder.tokenizer.decode(example.token_ids[call.start : call.stop]) for call in example.calls])
    return found


APPENDING = {
    "qwen2_5": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}


@pytest.mark.parametrize("name", APPENDING)
def test_every_answer_and_its_end_token_are_learned_and_nothing_else(name: str) -> None:
    encoder, end = encoder_of(template_of(name)), APPENDING[name]
    assert learned(encoder, {"messages": CHAT}) == [[f"4{end}", f"6, of course{end}"]]
    (example,) = encode_examples({"messages": CHAT}, encoder, name="row")
    whole = encoder.tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert example.token_ids.tolist() == whole[: len(example)]
    assert encoder.tokenizer.decode(whole[len(example) :]) in ("", "\n", "\n<|end|>")
    for turn, call in zip((1, 3), example.calls, strict=True):  # what comes before an answer is what RL would sample from
        assert example.token_ids[: call.start].tolist() == encoder.encode(CHAT[:turn]).tolist()


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "phi3"])
def test_masks_are_those_of_trls_training_templates(name: str) -> None:
    """But for newlines around the answer: some of theirs learn the one that the generation prompt ends with."""
    encoder = encoder_of(template_of(name))
    (example,) = encode_examples({"messages": CHAT}, encoder, name="row")
    theirs = encoder_of(template_of(f"{name}_training")).tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"][: len(example)] == example.token_ids.tolist()
    texts = [encoder.tokenizer.decode([id]) for id in example.token_ids]
    masks = zip(example.loss_mask.tolist(), theirs["assistant_masks"], strict=False)
    assert {text for text, (ours, mask) in zip(texts, masks, strict=False) if ours != bool(mask)} <= {"\n"}


def test_a_template_that_rewrites_earlier_turns_gives_an_example_for_each_answer() -> None:
    """Qwen3 drops the thoughts of earlier turns: each answer is learned once, after what a chat would have before it."""
    encoder = encoder_of(template_of("qwen3"))
    examples = encode_examples({"messages": THOUGHT}, encoder, name="row")
    first, second = "<think>\ntwo twice\n</think>\n\n4<|im_end|>", "<think>\nthree twice\n</think>\n\n6<|im_end|>"
    assert learned(encoder, {"messages": THOUGHT}) == [[first], [second]]
    for example, turn in zip(examples, (1, 3), strict=True):
        assert example.token_ids[: example.calls[0].start].tolist() == encoder.encode(THOUGHT[:turn]).tolist()
    assert "two twice" not in encoder.tokenizer.decode(examples[1].token_ids)
    assert len({example.group for example in examples}) == 1 and len({example.id for example in examples}) == 2


def test_template_variables_decide_what_is_an_answer() -> None:
    single = {"messages": CHAT[:2]}
    assert learned(encoder_of(template_of("qwen3")), single) == [["<think>\n\n</think>\n\n4<|im_end|>"]]
    off = {"enable_thinking": False}
    assert learned(encoder_of(template_of("qwen3"), chat_template_kwargs=off), single) == [["4<|im_end|>"]]
    assert learned(encoder_of(template_of("qwen3")), single | {"chat_template_kwargs": off}) == [["4<|im_end|>"]]


def test_only_the_completion_of_a_prompt_is_learned() -> None:
    encoder = encoder_of(template_of("qwen2_5"))
    assert learned(encoder, {"prompt": CHAT[:3], "completion": CHAT[3:]}) == [["6, of course<|im_end|>"]]
    assert learned(encoder, {"prompt": CHAT[:3], "answer": "six"}) == [["six<|im_end|>"]]
    assert learned(encoder_of(template_of("gemma")), {"prompt": CHAT[:1], "answer": " 4\n"}) == [[" 4\n<end_of_turn>"]]
    assert learned(encoder, {"prompt": "2+2=", "completion": "4", "answer": "5"}) == [["4<|end|>"]]


def test_a_template_without_an_end_token_gets_the_tokenizers() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learned(encoder_of(plain), {"messages": CHAT}) == [["4\n<|end|>"], ["6, of course\n<|end|>"]]


def test_a_token_across_the_border_of_an_answer() -> None:
    """`:a` is one token here, but a policy would begin its answer after `:`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: index for index, letter in enumerate([*"ub:a", ":a", "<|end|>"])}
    core = Tokenizer(models.BPE(vocabulary, merges=[(":", "a")]))
    core.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", chat_template=template)
    chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
    (example,) = encode_examples({"messages": chat}, PromptEncoder(tokenizer), name="row")
    assert tokenizer.convert_ids_to_tokens(example.token_ids.tolist()) == ["u", ":", "b", "<|end|>", "a", ":", "a", "<|end|>"]
    assert example.loss_mask.tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": CHAT[:1]}, r"'messages' has no answer of the assistant"),
        ({"prompt": "2+2?"}, r"no 'completion' or 'answer' to learn from"),
        ({"prompt": "2+2?", "answer": 4}, r"it is '4'; give text"),
        ({"prompt": "2+2?", "completion": CHAT[1:2]}, r"messages with an assistant's if the prompt is messages"),
        ({"prompt": CHAT[:1], "completion": CHAT[2:3]}, r"messages with an assistant's"),
    ],
)
def test_rows_with_nothing_to_learn_are_refused(row: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        encode_examples(row, encoder_of(template_of("qwen2_5")), name="row")


def test_templates_that_cannot_be_used_are_refused() -> None:
    strips = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[<think>{% endif %}"
    with pytest.raises(ConfigError, match=r"writes answers differently from its generation prompt; give the row a prompt"):
        encode_examples({"messages": CHAT}, encoder_of(strips), name="row")
    assert learned(encoder_of(strips), {"prompt": CHAT[:1], "answer": "4"}) == [["4<|end|>"]]
    with pytest.raises(ConfigError, match=r"refuses the first 1 messages: no"):
        encode_examples({"messages": CHAT}, encoder_of("{{ raise_exception('no') }}"), name="row")
    none = encoder_of("")
    none.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template; set model\.chat_template"):
        encode_examples({"messages": CHAT}, none, name="row")
