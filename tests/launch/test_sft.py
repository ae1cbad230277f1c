"""SFT: its gradient, its steps, what it leaves, and alone without RL."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace.config import make_recipe
from headrace.engine.native.engine_memory import blocks_for
from headrace.envs import PromptEncoder
from headrace.launch import sft
from headrace.launch.build import build_trainer
from headrace.launch.examples import encode_examples
from headrace.launch.forecast import check_sft_memory
from headrace.launch.inputs import UserInputs, check_inputs
from headrace.model import load_tokenizer
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHATS = [
    [
        {"role": "user", "content": f"{number}?"},
        {"role": "assistant", "content": "yes" * (number % 4 + 1)},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": f"as {number}"},
    ][: 2 if number % 3 else 4]
    for number in range(11)
]
ROWS = [{"messages": chat} for chat in CHATS]


def tuned(model: str, target: Path, rows: object = ROWS, *, held_out: object = None, say: Callable = print, **settings) -> list:
    """What the lines of progress said."""
    recipe = make_recipe({"steps": 0, "device": "cpu", "sft": {"batch": 4, "learning_rate": 1e-3, **settings}})
    given = UserInputs(sft=rows, sft_held_out=held_out)
    check_inputs(recipe, given)
    asyncio.run(sft.run_sft(recipe, model, given, target, say=say))
    return json.loads((target / sft.METRICS).read_text())


def naive(model: str, chats: list) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over all learned tokens, one padded-free chat at a time through transformers, masked by hand."""
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)
    losses = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        is_learned, inside = [], False
        for token in tokenizer.convert_ids_to_tokens(ids):
            is_learned.append(inside)
            inside = token == "<|assistant|>" or (inside and token != "<|end|>")
        logits = network(torch.tensor([ids])).logits[0]
        logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        losses.append(-logprobs[torch.tensor(is_learned[1:])])
    loss = torch.cat(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("tokens", [16, 64, 16384])
def test_the_gradient_of_a_packed_batch_is_that_of_a_naive_loop(tiny_model: str, tokens: int) -> None:
    recipe = make_recipe({"train.loss": "supervised", "train.advantage": "reward", "train.micro_batch_tokens": tokens})
    trainer, encoder = build_trainer(recipe, tiny_model, device="cpu"), PromptEncoder(load_tokenizer(tiny_model))
    examples = [each for index, row in enumerate(ROWS) for each in encode_examples(row, encoder, name=f"d{index}")]
    seen = trainer.forward_backward(sft.supervised_batch(examples))
    loss, expected = naive(tiny_model, CHATS)
    assert seen["loss"] == pytest.approx(loss, rel=1e-5)
    found = {name: parameter.grad for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3)


@pytest.mark.long
def test_it_learns_its_rows_and_measures_others(tiny_model: str, tmp_path: Path) -> None:
    said: list[str] = []
    told = tuned(tiny_model, tmp_path, held_out=ROWS[:2], say=said.append, steps=40, check_every=20, warmup_steps=2)
    assert [line["step"] for line in told] == [0, 20, 40]
    assert told[0]["held_out_loss"] > 3 > 1.0 > told[-1]["held_out_loss"] and told[1]["loss"] > told[2]["loss"]
    assert "sft        step 40 of 40: loss " in said[-1] and " tokens/s, held-out loss " in said[-1]
    mean, _ = naive(str(tmp_path), CHATS[:2])
    assert told[-1]["held_out_loss"] == pytest.approx(mean, rel=1e-4)
    assert not (tmp_path / "trainer").exists()


def test_epochs_take_every_row_as_often(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def encoded(row, *arguments, **keywords):
        seen.append(row["messages"][0]["content"])
        return encode_examples(row, *arguments, **keywords)

    monkeypatch.setattr(sft, "encode_examples", encoded)
    told = tuned(tiny_model, tmp_path, epochs=2, check_every=100)
    assert told[-1]["step"] == math.ceil(22 / 4) and sorted(seen) == sorted(row["messages"][0]["content"] for row in ROWS * 2)


def test_examples_that_are_too_long_are_left_out_and_counted(tiny_model: str, tmp_path: Path) -> None:
    said: list[str] = []
    long = [{"prompt": "1" * 50, "completion": "2"}] * 3
    tuned(tiny_model, tmp_path, [*ROWS, *long], say=said.append, epochs=1, max_length=40)
    assert "3 examples of more than 40 tokens left out" in said[-1]
    with pytest.raises(ConfigError, match=r"no example fits 40 tokens; raise sft\.max_length"):
        tuned(tiny_model, tmp_path, long, epochs=1, max_length=40)
    with pytest.raises(ConfigError, match=r"sft\.max_length = 4000: the model takes at most 256 tokens"):
        tuned(tiny_model, tmp_path, epochs=1, max_length=4000)


def test_sft_alone_leaves_a_hugging_face_folder(tiny_model: str, tmp_path: Path, cache_folder) -> None:
    settings = {"model": tiny_model, "steps": 0, "quiet": True, "device": "cpu", "run_dir": tmp_path / "run"}
    result = headrace.train(**settings, sft={"steps": 3, "batch": 4, "tasks": ROWS, "held_out": ROWS[:1]})
    assert result.checkpoint == str(tmp_path / "run" / "model") and result.summary["status"] == "finished"
    assert result.summary["sft"][-1].keys() >= {"step", "loss", "held_out_loss"} and "version 0 of 0" in repr(result)
    AutoModelForCausalLM.from_pretrained(result.checkpoint)
    assert AutoTokenizer.from_pretrained(result.checkpoint).chat_template
    with pytest.raises(ConfigError, match=r"has trained 0 versions already.*--steps above 0 trains it further"):
        headrace.train(**settings, sft={"steps": 3, "batch": 4, "tasks": ROWS, "held_out": ROWS[:1]})
    tasks = [{"prompt": "1"}, {"prompt": "2"}]
    found = headrace.evaluate(tmp_path / "run", held_out=tasks, reward=lambda completion, **_: 1.0, sampling={"max_tokens": 3})
    assert found["success"].value == 1.0 and found.version == 0


def test_template_variables_reach_the_saved_model(tiny_model: str, tmp_path: Path, cache_folder) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "\n{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% if not thinks %}#{% endif %}{% endif %}"
    )
    model = {"path": tiny_model, "chat_template": str(template), "chat_template_kwargs": {"thinks": False, "é": "a\n'"}}
    rows = [{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}]
    result = headrace.train(model, steps=0, quiet=True, run_dir=tmp_path / "run", sft={"steps": 1, "batch": 1, "tasks": rows})
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)

    def asked(**variables: object) -> str:
        return tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=False, **variables)

    assert asked() == "\n<|user|>1<|end|><|assistant|>#" and asked(thinks=True) == "\n<|user|>1<|end|><|assistant|>"
    again = load_tokenizer(result.checkpoint, make_recipe({"model": model}).model)
    assert again.chat_template == "".join(tokenizer.chat_template)


@pytest.mark.parametrize(
    ("rows", "settings", "problem"),
    [
        ([{"prompt": "x"}], {"steps": 1}, r"sft: row 0 of tasks has no 'completion' or 'answer' to learn from"),
        ([*ROWS, {"messages": CHATS[0][:1]}], {"steps": 1}, r"sft: row 11 of tasks: 'messages' has no answer"),
        ([{"question": "x"}], {"steps": 1}, r"row 0 has no 'prompt' column nor messages"),
        ("builtin:sort_digits", {"epochs": 1.0}, r"sft\.epochs = 1\.0: generated tasks have no end; set sft\.steps"),
        (None, {"steps": 1}, r"sft: there is nothing to learn from; add \[\[sft\.tasks\]\]"),
    ],
)
def test_what_cannot_be_learned_is_refused_before_a_model_is_loaded(rows, settings: dict, problem: str) -> None:
    recipe = make_recipe({"steps": 0, "sft": settings})
    with pytest.raises(ValueError, match=problem):
        check_inputs(recipe, UserInputs(sft=rows))


def test_the_engine_has_a_cache_for_the_tasks_that_are_checked(tmp_path, monkeypatch, tiny_model):
    class Built(Exception):
        pass

    def build_roles(*_, most_blocks, **__):
        raise Built(most_blocks)

    monkeypatch.setattr(sft, "build_roles", build_roles)
    settings = {"engine.slots": 4096, "sampling.max_tokens": 12, "sft": {"steps": 1, "until_success": 0.5}}
    given = UserInputs(tasks=[{"prompt": "1" * 30, "answer": "1"}], reward=len)
    with pytest.raises(Built) as built:
        asyncio.run(sft.run_sft(make_recipe(settings), tiny_model, given, tmp_path, say=print))
    assert built.value.args == (blocks_for(512, tokens=42, block_size=16),)


def test_a_model_that_only_fits_in_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT runs in one process, whatever `[train.parallel]` says."""
    monkeypatch.setattr("headrace.launch.forecast.choose_device", lambda recipe: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**6))
    plain: dict = {"sft": {"steps": 5}, "model": {"dtype": "bfloat16"}}
    check_sft_memory(make_recipe(plain))
    with pytest.raises(ConfigError, match=r"sft: .* on one GPU, whatever train.parallel says: .* has 0\.0; leave \[sft\] out"):
        check_sft_memory(make_recipe({**plain, "train": {"parallel": {"shard": 2}}}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 10**9))
    check_sft_memory(make_recipe({**plain, "train": {"parallel": {"shard": 2}}}))
