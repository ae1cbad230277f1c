"""Settings of TRL, verl and prime-rl: TRL's are all answered, answers are settings that exist, and the page shows them all."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import headrace.config
from headrace.algorithms import resolve_loss
from headrace.config import make_recipe
from headrace.config.peer_names import peers
from headrace.config.recipe import Recipe
from headrace.settings import ConfigError, describe

PEERS = peers()
GRPO, ASYNC_GRPO, TRAINING_ARGUMENTS, *_ = PEERS.values()
PAGE = Path(__file__).parents[1] / "docs" / "coming_from_trl.md"
PACKAGED = Path(headrace.config.__file__).with_name("coming_from_trl.md")
OURS = {key for key, *_ in describe(Recipe)}
FREE = ("train.constants.", "engine.vllm.arguments.")


def declared(package: str, file: str, name: str) -> set[str]:
    """The fields a dataclass declares itself, from its source: importing it takes seconds."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def test_every_field_that_trl_declares_is_answered_and_no_other() -> None:
    declared_here = declared("trl", "trainer/grpo_config.py", "GRPOConfig")
    assert declared_here == GRPO.keys() and len(GRPO) == 79
    declared_here = declared("trl", "experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig")
    assert declared_here == ASYNC_GRPO.keys() and len(ASYNC_GRPO) == 32
    arguments = declared("transformers", "training_args.py", "TrainingArguments")
    ours_beside = {name for name in TRAINING_ARGUMENTS if name not in arguments}
    assert ours_beside == {
        *("lora", "lora_alpha", "lora_r", "lora_rank", "lora_target_modules", "peft_config", "use_peft"),
        *(
            "bnb_4bit_quant_type",
            "load_in_4bit",
            "load_in_8bit",
            "args",
            "callbacks",
            "eval_dataset",
            "max_new_tokens",
            "max_prompt_length",
        ),
        *("assistant_only_loss", "chat_template_path", "completion_only_loss", "dataset_config", "dataset_name", "packing"),
        *("model_name_or_path", "ref_model", "reward_funcs", "train_dataset", "warmup_ratio"),
    }


@pytest.mark.parametrize("peer", PEERS)
def test_answers_name_settings_that_exist(peer) -> None:
    sections = {key.rpartition(".")[0].removesuffix(".N") for key in OURS}
    for name, answer in PEERS[peer].items():
        if " " not in answer:
            assert answer in OURS | sections or answer.startswith(FREE), name
        for key in re.findall(r"\b(?:[a-z]+\.)+[a-z_]+\b", answer):  # keys inside a sentence
            is_file = key.endswith((".py", ".jsonl", ".train", ".md"))
            assert key in OURS | sections or key.startswith(FREE) or is_file, (name, key)
        for constant, loss in re.findall(r"train\.constants\.(\w+), of loss = '(\w+)'", answer):
            assert constant in inspect.signature(resolve_loss(loss)).parameters, name


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({"train": {"num_iterations": 2}}, r"train.num_iterations is not a setting; did you mean train.epochs\?"),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, r"did you mean train.group_size\?"),
        ({"algorithm": {"filter_groups": {"enable": True}}}, r"did you mean filter.max_tied\?"),
        ({"orchestrator": {"batch_size": 8}}, r"did you mean train.batch\?"),
        ({"model": {"name": "x"}}, r"model.name is not a setting; did you mean model.path\?"),
        ({"ppo_epochs": 2}, r"did you mean train.epochs\?"),
        ({"orchestrator": {"renderer": 1}}, r"a section of verl or prime-rl; docs/coming_from_trl.md"),
        ({"use_peft": True}, r"use_peft is not a setting; did you mean lora.rank\?"),
    ],
)
def test_what_a_peer_calls_a_setting_is_answered_with_ours(data, answer) -> None:
    with pytest.raises(ConfigError, match=answer):
        make_recipe(data)


def test_the_page_is_in_order_and_shows_keys_as_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(PEERS) == 5 and page == PACKAGED.read_text(encoding="utf-8"), "the package reads what the docs show"
    for names in PEERS.values():
        assert list(names) == sorted(names)
        for name, answer in names.items():
            is_key = " " not in answer and not answer.startswith(FREE)
            assert f"| {name} | {f'`{answer}`' if is_key else answer} |" in page, name


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({"train": {"lr": 1e-5}}, r"did you mean train.learning_rate\?"),
        ({"dynamic_sampling": True}, r"did you mean filter.max_tied\?"),
        ({"train": {"clip_high": 0.3}}, r"did you mean train.constants.clip_high\?"),
        ({"tasks": {"source": "rows.jsonl"}}, r"tasks is a list of tables: write \[\[tasks\]\], in Python tasks=\[\{…\}\]"),
        ({"algorithm": "GRPO"}, r"did you mean 'grpo'\?"),
        ({"train": {"mini_batches": 64}}, r"set batch to 512 or more, or it to 32 or fewer"),
    ],
)
def test_what_people_type_is_answered_with_what_to_write(data, answer) -> None:
    with pytest.raises(ConfigError, match=answer):
        make_recipe(data)


def test_one_name_of_a_few_stands_for_a_list_of_one() -> None:
    assert make_recipe({"observe": {"sinks": "tensorboard"}}).observe.sinks == ("tensorboard",)
