"""The recipe: its files, its checks across rooms, what follows from it, and the command line before torch is imported."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace import train
from headrace.buffer import buffer_policy, is_in_submission_order
from headrace.cli import settings_help
from headrace.config import Recipe, load_recipe, make_recipe, parse_recipe
from headrace.partial import pauses_unfinished
from headrace.settings import ConfigError, describe, parse_override, to_dict, to_toml
from headrace.staleness.gate import gate_depth

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def refusal(settings: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        make_recipe(settings)
    return str(caught.value)


# Files


def test_there_are_recipes() -> None:
    assert QUICKSTART in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_says_what_it_comes_to(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.tasks, "a recipe names its tasks"
    assert len(recipe.derivation()) >= 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_parses_to_the_same_recipe(path: Path) -> None:
    recipe = load_recipe(path)
    again = parse_recipe(to_toml(to_dict(recipe)), name="resolved.toml")
    assert again == recipe
    assert again.hash == recipe.hash


def test_every_setting_survives_the_resolved_recipe() -> None:
    """With each setting away from its default, none can be lost unnoticed."""
    changed = make_recipe(
        {
            **{"steps": 7, "seed": 3, "threads": 2, "device": "cpu", "exact": True},
            "model": {"path": 'a "quoted"\\path', "context": 4096, "chat_template_kwargs": {"on": False}},
            "sft": {"steps": 3, "learning_rate": 1e-7, "held_out": [{"source": "a/b", "split": "test"}]},
            "tasks": [
                {"source": "builtin:sort_digits", "weight": 0.25, "options": {"min_length": 4}},
                {
                    "source": "rows.jsonl",
                    "columns": {"prompt": "q"},
                    "limit": 3,
                    "map": "a:b",
                    "options": {"list": [1, 2], "inner": {"deep": True}},
                },
            ],
            "reward": {"functions": ["a:b", "c.py:d"], "weights": [1, 2]},
            "sampling": {"temperature": 0.7, "top_p": 0.9},
            "buffer": {"kind": "bounded", "depth": 2},
            "staleness": {"max_lag": 3, "correct": "mis", "cap": 3},
            "train": {
                **{"constants": {"clip_low": 0.1, "clip_high": 1e-9}, "advantage": "leave_one_out"},
                "parameters": [{"match": "*", "freeze": True}, {"match": "*.mlp.*", "weight_decay": 0.1}],
            },
            "evaluate": {"tasks": [{"source": "builtin:sort_digits"}], "every": 5},
            "observe": {"sinks": ["tensorboard"], "trace": False},
        }
    )
    text = to_toml(to_dict(changed))
    assert parse_recipe(text, name="resolved.toml") == changed
    assert {field.name for field in dataclasses.fields(Recipe)} <= tomllib.loads(text).keys()


def test_a_missing_recipe_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no/such.toml: no such recipe"):
        load_recipe("no/such.toml")


def test_errors_name_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("steps = 10\n\n[train]\nbatch = 10\ngroup_size = 4\n")
    with pytest.raises(ConfigError, match=r"mine.toml:4: train.batch = 10: not a multiple of group_size = 4; try 8"):
        load_recipe(file)
    file.write_text("[[tasks]]\nsource = 'a'\n[[tasks]]\nsource = 'b'\nwieght = 2\n")
    with pytest.raises(ConfigError, match=r"mine.toml:5: tasks.1.wieght is not a setting; did you mean tasks.1.weight\?"):
        load_recipe(file)
    file.write_text("[buffer]\nkind = 'bounded'\ndepth = 9\n")
    with pytest.raises(ConfigError, match=r"mine.toml:3: buffer.depth = 9: .*staleness.max_lag_limit = 8; raise it to 9"):
        load_recipe(file)
    file.write_text("[staleness]\ncorrect = 'tsi'\n")
    with pytest.raises(ConfigError, match=r"mine.toml:2: staleness.correct = 'tsi': must be one of .*did you mean 'tis'\?"):
        load_recipe(file)


def test_overrides_go_on_top_of_the_file() -> None:
    recipe = load_recipe(
        QUICKSTART,
        {"train.learning_rate": 1, "tasks.0.options": {"min_length": 5}, "evaluate": {"limit": 9}, "steps": 3},
    )
    assert (recipe.steps, recipe.train.learning_rate, recipe.train.batch) == (3, 1.0, 256)
    assert recipe.tasks[0].options == {"min_length": 5}
    assert (recipe.evaluate.limit, recipe.evaluate.every) == (9, 25)


# Documentation


def test_every_setting_is_documented() -> None:
    rows = list(describe(Recipe))
    assert [key for key, _, _, text in rows if len(text) < 8] == []
    keys = [key for key, *_ in rows]
    assert len(keys) == len(set(keys)) > 60
    assert {"steps", "model.path", "tasks.N.source", "evaluate.tasks.N.weight", "staleness.max_lag"} <= set(keys)


def test_help_shows_every_setting() -> None:
    text = settings_help()
    for key, *_ in describe(Recipe):
        assert f"  {key} = " in text


def test_every_section_is_documented() -> None:
    sections = [type(value) for value in vars(Recipe()).values() if dataclasses.is_dataclass(value)]
    assert len(sections) >= 10
    assert [section.__name__ for section in sections if not section.__doc__ or "(" in section.__doc__[:20]] == []


# Checks


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train.batch": 12}, "train.batch = 12: not a multiple of group_size = 8; try 16"),
        ({"train.batch": 4}, "train.batch = 4: not a multiple of group_size = 8; try 8"),
        ({"train.group_size": 1}, "train.group_size = 1: must be ≥ 2"),
        ({"train.batch": 0}, "train.batch = 0: must be ≥ 1"),
        ({"engine.count": -1}, "engine.count = -1: must be ≥ 0"),
        ({"engine.count": 0}, "engine.count = 0: hosts must join with engines"),
        ({"engine.count": 0, "orchestrate": "ray", "cluster.listen": "h:1"}, "engine.count = 0: hosts must join with engines"),
        ({"engine.sleep": "cache"}, "engine.sleep = 'cache': engines that generate while the trainer trains cannot sleep"),
        ({"engine.sleep": "weights", "buffer.kind": "stream"}, "engine.sleep = 'weights': engines that generate"),
        (
            {"engine.sleep": "cache", "buffer.kind": "synchronous", "partial.oversample": 1.5},
            "engine.sleep = 'cache': with partial.oversample = 1.5 rollouts are in flight",
        ),
        ({"train.max_skipped": -1}, "train.max_skipped = -1: must be ≥ 0"),
        ({"train.offload": ["optimizer", "optimizer"]}, "train.offload = ['optimizer', 'optimizer']: must be a list"),
        ({"train.batch": 16, "train.mini_batches": 3}, "train.mini_batches = 3: must be at most the 2 groups"),
        ({"train.mini_batches": 0}, "train.mini_batches = 0"),
        ({"train.learning_rate": 0}, "train.learning_rate = 0.0: must be a number above 0"),
        ({"train.value_learning_rate": 1e-4}, "train.value_learning_rate = 0.0001: advantage = 'group' learns no values"),
        ({"train.learning_rate": float("nan")}, "train.learning_rate = nan"),
        ({"train.micro_batch_tokens": 8}, "train.micro_batch_tokens = 8"),
        ({"train.eps": 0}, "train.eps = 0.0: must be a number above 0"),
        ({"train.optimizer": "adam"}, "train.optimizer = 'adam': must be one of 'adamw', 'adamw_8bit', 'muon'; did you mean"),
        (
            {"train.schedule": "cosin"},
            "train.schedule = 'cosin': must be one of 'constant', 'linear', 'cosine', 'wsd'",
        ),
        ({"train.schedule": "wsd", "train.decay_steps": -1}, "train.decay_steps = -1: must be ≥ 0"),
        ({"train.decay_steps": 5}, "train.decay_steps = 5: only schedule = 'wsd' has them"),
        ({"train.schedule": "wsd", "train.final_learning_rate": 2}, "train.final_learning_rate = 2.0: must be in [0, 1]"),
        ({"train.final_learning_rate": 0.1}, "train.final_learning_rate = 0.1: schedule = 'constant' does not fall to it"),
        ({"train.parameters": [{"freeze": True}]}, "train.parameters.0.match is missing"),
        ({"train.parameters": [{"match": ""}]}, "train.parameters.0.match = '': must be a pattern of names"),
        (
            {"train.parameters": [{"match": "*", "learning_rate": 0}]},
            "train.parameters.0.learning_rate = 0.0: must be",
        ),
        (
            {"train.parameters": [{"match": "*", "weight_decay": -1}]},
            "train.parameters.0.weight_decay = -1.0: must be",
        ),
        (
            {"train.parameters": [{"match": "*", "freeze": True, "weight_decay": 0.1}]},
            "train.parameters.0.freeze = true: what is frozen has neither learning_rate nor weight_decay",
        ),
        ({"model.dtype": "half"}, "model.dtype = 'half': must be one of 'float32', 'bfloat16', 'float16'"),
        ({"model.dtype": "float16", "exact": True}, "model.dtype = 'float16': exact = true needs float32"),
        ({"steps": 0}, "steps = 0: must be ≥ 1"),
        ({"tasks": [{"source": "a", "weight": 0}]}, "tasks.0.weight = 0.0: must be a number above 0"),
        ({"tasks": [{}]}, "tasks.0.source is missing"),
        ({"reward": {"functions": ["a:b"], "weights": [1, 2]}}, "reward.weights = [1.0, 2.0]: 1 functions need as many"),
        ({"reward.attempts": 0}, "reward.attempts = 0"),
        ({"sampling.temperature": 0}, "sampling.temperature = 0.0: must be a number above 0; evaluate.greedy"),
        ({"sampling.top_k": -1}, "sampling.top_k = -1"),
        ({"sampling.top_p": 0}, "sampling.top_p = 0.0"),
        ({"sampling.min_p": 1}, "sampling.min_p = 1.0"),
        ({"sampling.max_tokens": 0}, "sampling.max_tokens = 0"),
        ({"sampling.min_tokens": 300}, "sampling.min_tokens = 300"),
        ({"engine.slots": 0}, "engine.slots = 0"),
        ({"engine.block_size": 0}, "engine.block_size = 0"),
        ({"staleness.max_lag": -1}, "staleness.max_lag = -1"),
        ({"staleness.cap": 0.5}, "staleness.cap = 0.5"),
        ({"staleness.floor": 1.5}, "staleness.floor = 1.5"),
        ({"staleness.limit": -1}, "staleness.limit = -1.0: must be a number ≥ 0"),
        (
            {"staleness.limit": 0.1},
            "staleness.limit = 0.1: only correct = 'opsm', 'm2po' and 'trust_region' have a limit, not 'none'",
        ),
        ({"train.group_size": 0, "train.advantage": "global"}, "train.group_size = 0: must be ≥ 1"),
        ({"train.discount": 1.1}, "train.discount = 1.1: must be in [0, 1]"),
        ({"train.gae_lambda": -0.1}, "train.gae_lambda = -0.1: must be in [0, 1]"),
        ({"train.kl": -0.1}, "train.kl = -0.1: must be a number ≥ 0"),
        ({"train.kl_in_reward": True}, "train.kl_in_reward = true: there is no KL with kl = 0; set kl"),
        (
            {"train.kl_in_reward": True, "train.kl": 0.1, "train.advantage": "distill"},
            "train.kl_in_reward = true: advantage = 'distill' is not made of rewards; set it to another",
        ),
        ({"train.reference": "folder"}, "train.reference = 'folder': there is no KL with kl = 0; set kl to its weight"),
        ({"train.reference_every": 2}, "train.reference_every = 2: there is no KL with kl = 0; set kl to its weight"),
        ({"train.reference_every": -1}, "train.reference_every = -1: must be ≥ 0"),
        ({"train.reference_mix": 0.5}, "train.reference_mix = 0.5: the reference stays as it is with reference_every = 0"),
        ({"train.reference_mix": 0.0}, "train.reference_mix = 0.0: must be above 0, at most 1"),
        ({"train.kl_target": 0.1}, "train.kl_target = 0.1: there is no KL with kl = 0; set kl to its weight, such as 0.05"),
        ({"train.kl_target": -1.0}, "train.kl_target = -1.0: must be a number ≥ 0"),
        ({"train.kl_target": 0.1, "train.kl": 0.1, "train.kl_horizon": 9}, "train.kl_horizon = 9: must be ≥ 256 (batch)"),
        ({"train.entropy": -0.1}, "train.entropy = -0.1: must be a number ≥ 0"),
        ({"train.entropy": float("nan")}, "train.entropy = nan: must be a number ≥ 0"),
        ({"train.entropy_target": float("inf")}, "train.entropy_target = inf: must be a number ≥ 0"),
        ({"train.entropy_step": 0.0}, "train.entropy_step = 0.0: must be above 0, at most 1"),
        ({"train.entropy_quantile": 0.0}, "train.entropy_quantile = 0.0: must be above 0, at most 1"),
        ({"train.entropy_quantile": 1.5}, "train.entropy_quantile = 1.5: must be above 0, at most 1"),
        ({"train.epochs": 0}, "train.epochs = 0: must be ≥ 1"),
        (
            {"train.loss": "a3po", "staleness.correct": "tis"},
            "staleness.correct = 'tis': train.loss = 'a3po' has the importance",
        ),
        (
            {"staleness.correct": ["tis", "opsm", "mis"]},
            "staleness.correct = ['tis', 'opsm', 'mis']: tis and mis would each apply the importance weight; keep one of them",
        ),
        ({"staleness.correct": ["icepop", "mis"]}, "staleness.correct = ['icepop', 'mis']: icepop and mis would each apply"),
        ({"staleness.correct": ["opsm", "opsm"]}, "staleness.correct = ['opsm', 'opsm']: each correction is applied once"),
        (
            {"staleness.correct": ["none", "tis"]},
            "staleness.correct = ['none', 'tis']: name one correction or several, or 'none'",
        ),
        ({"staleness.correct": []}, "staleness.correct = []: name one correction or several, or 'none' alone"),
        ({"staleness.correct": ["tis", "tsi"]}, "staleness.correct.1 = 'tsi': must be one of"),
        (
            {"staleness.correct": ["opsm", "m2po"], "staleness.limit": 0.1},
            "staleness.limit = 0.1: opsm and m2po each have their own; set it to 0",
        ),
        (
            {"staleness.correct": ["tis", "prefix"], "staleness.limit": 0.1},
            "staleness.limit = 0.1: only correct = 'opsm', 'm2po' and 'trust_region' have a limit, not ['tis', 'prefix']",
        ),
        (
            {"train.loss": "a3po", "staleness.correct": ["opsm", "tis"]},
            "staleness.correct = ['opsm', 'tis']: train.loss = 'a3po' has the importance weight in it, which tis would",
        ),
        ({"train.loss": "gspo", "train.loss_mean": "token"}, "train.loss_mean = 'token': loss = 'gspo' is defined by"),
        ({"train.loss": "kimi", "train.loss_mean": "sequence"}, "train.loss_mean = 'sequence': loss = 'kimi' is defined by"),
        ({"train.constants": {"dual_clip": 1}}, "train.constants.dual_clip = 1.0: must be above 1, such as 3, or 0 for none"),
        ({"train.constants": {"dual_clip": -3}}, "train.constants.dual_clip = -3.0: must be above 1"),
        ({"train.scale_rewards": "std"}, "train.scale_rewards = 'std': must be one of 'auto', 'group', 'batch', 'none'"),
        (
            {"train.advantage": "global", "train.scale_rewards": "group"},
            "train.scale_rewards = 'group': advantage = 'global' goes with 'auto' or 'batch' or 'none'",
        ),
        (
            {"train.advantage": "distill", "train.scale_rewards": "batch"},
            "train.scale_rewards = 'batch': advantage = 'distill'",
        ),
        ({"train.mask_truncated": 1}, "train.mask_truncated = 1: must be true or false"),
        (
            {"train.normalize_each_reward": True, "train.advantage": "gae", "train.loss": "ppo"},
            "train.normalize_each_reward = true: advantage = 'gae' is per token; set it to 'global' (GDPO)",
        ),
        (
            {"train.normalize_each_reward": True, "train.advantage": "global", "train.group_size": 1},
            "train.group_size = 1: must be ≥ 2: normalize_each_reward = true compares siblings",
        ),
        (
            {"algorithm": "dappo"},
            "algorithm = 'dappo': must be one of 'none', 'grpo', 'dr_grpo', 'dapo', 'reinforce++', 'rloo', 'gspo', "
            "'cispo', 'ppo'; did you mean 'dapo'?",
        ),
        ({"algorithm": ["dapo"]}, "algorithm = ['dapo']: must be one of 'none', 'grpo'"),
        (
            {"algorithm": "dapo", "train.batch": 64},
            "algorithm = 'dapo': train.mini_batches = 16: must be at most the 8 groups of a batch",
        ),
        ({"algorithm": "dapo", "train.loss": "gspo"}, "algorithm = 'dapo': train.loss_mean = 'token': loss = 'gspo' is"),
        ({"train.loss": "decoupled_ppo", "staleness.correct": "geometric_mis"}, "staleness.correct = 'geometric_mis'"),
        ({"checkpoint.every": 0}, "checkpoint.every = 0"),
        ({"checkpoint.keep": 0}, "checkpoint.keep = 0"),
        ({"buffer.kind": "bounded"}, "buffer.depth = 0: a bounded buffer holds at least 1 batch"),
        ({"buffer.depth": 1}, "buffer.depth = 1: only buffer.kind = 'bounded' or 'ring' or 'reserved' has a depth, not 'auto'"),
        ({"buffer": {"kind": "stream", "depth": 1}}, "buffer.depth = 1: only buffer.kind = 'bounded'"),
        (
            {"buffer": {"kind": "bounded", "depth": 3}, "staleness.max_lag": 2},
            "buffer.depth = 3: a batch that waits so long lags more than staleness.max_lag = 2; raise it to 3",
        ),
        ({"buffer.kind": "one_ahead", "staleness.max_lag": 0}, "buffer.kind = 'one_ahead': nothing can run ahead"),
        ({"buffer.kind": "stream", "staleness.max_lag": 0}, "buffer.kind = 'stream': nothing can run ahead"),
        ({"exact": True, "device": "cuda"}, "device = 'cuda': exact = true is a promise about the CPU"),
        ({"exact": True, "model.dtype": "bfloat16"}, "model.dtype = 'bfloat16': exact = true needs float32"),
        ({"exact": True, "engine.block_size": 32}, "engine.block_size = 32: exact = true needs 16"),
        ({"exact": True, "engine.lend": True}, "engine.lend = true: what is lent depends on timing, which exact = true"),
        ({"engine.lend": True, "partial.interrupt": "drain"}, "engine.lend = true: rollouts of an engine that is recalled"),
        ({"exact": True}, "staleness.max_lag = 'auto': it follows measured times, which exact = true does not allow"),
        ({"staleness.max_lag": "aut"}, "staleness.max_lag = 'aut': must be a number | \"auto\""),
        ({"staleness.max_lag": float("nan")}, "staleness.max_lag = nan: must be ≥ 0"),
        ({"staleness.max_lag_limit": 0}, "staleness.max_lag_limit = 0: must be ≥ 1"),
        ({"staleness.gate": True}, "staleness.gate = True: must be one of 'depth', 'slots', 'none'"),
        ({"staleness.slots": 0.01}, "staleness.slots = 0.01: no group has room in that share of a batch of 32"),
        ({"staleness": {"reject": "never", "rejected": "retry"}}, "staleness.rejected = 'retry': nothing is rejected"),
        ({"staleness": {"reject": "never", "rejected": "wait"}}, "staleness.rejected = 'wait': nothing is rejected"),
        ({"staleness": {"gate": "slots", "rejected": "wait"}}, "staleness.rejected = 'wait': with gate = 'slots' more groups"),
        (
            {"partial.oversample": 1.5, "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': with partial.oversample = 1.5 more groups",
        ),
        (
            {"buffer.unit": "episode", "train.advantage": "global", "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': with buffer.unit = 'episode' lost episodes are replaced by whole groups",
        ),
        (
            {"buffer.order": "submission", "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': with buffer.order = 'submission' the trainer",
        ),
        (
            {"buffer.order": "window", "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': with buffer.order = 'window' the trainer",
        ),
        (
            {"exact": True, "staleness": {"max_lag": 1, "rejected": "wait"}},
            "staleness.rejected = 'wait': with exact = true the trainer waits for",
        ),
        (
            {"buffer": {"kind": "ring", "depth": 1}, "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': buffer.kind = 'ring' drops what",
        ),
        (
            {"environment": {"tools": ["math:sqrt"], "options": {"tool_timeout": 45}}, "deadline": 180},
            "environment.options.tool_timeout = 45: an episode without a generate call for a quarter of deadline = 180 fails",
        ),
        ({"environment": {"tools": ["math:sqrt"]}, "deadline": 100}, "environment.options.tool_timeout = 30: an episode"),
        (
            {"partial.cancel": "over_age", "staleness.rejected": "wait"},
            "staleness.rejected = 'wait': no group grows too old to be cancelled",
        ),
        ({"exact": True, "buffer.kind": "stream", "staleness.gate": "none"}, "staleness.gate = 'none': exact = true needs"),
        ({"sampling.max_tokens": 64, "model.context": 64}, "sampling.max_tokens = 64: leaves no room for a prompt"),
        ({"partial.oversample": 0.9}, "partial.oversample = 0.9: must be a number ≥ 1"),
        ({"partial.oversample": float("inf")}, "partial.oversample = inf"),
        (
            {"partial.cancel": "over_age", "staleness.reject": "never"},
            "partial.cancel = 'over_age': nothing is over age with staleness.reject = 'never'",
        ),
        (
            {"partial.cancel": "over_age", "buffer.unit": "episode", "train.advantage": "global"},
            "partial.cancel = 'over_age': siblings are cancelled together, but buffer.unit = 'episode' trains them apart",
        ),
        ({"partial.cancel": "over_age", "exact": True}, "partial.cancel = 'over_age': what is cancelled depends on timing"),
        (
            {"partial.cancel": "over_age", "buffer.order": "submission"},
            "partial.cancel = 'over_age': trained in submission order behind the gate, no group grows older than",
        ),
        (
            {"partial.cancel": "over_age", "staleness.max_lag": 0},
            "partial.cancel = 'over_age': in a synchronous run nothing is in flight when a batch is trained",
        ),
        ({"partial.oversample": 1.5, "exact": True}, "partial.oversample = 1.5: which groups are trained depends on timing"),
        (
            {"partial.oversample": 1.5, "staleness.gate": "none"},
            "partial.oversample = 1.5: with staleness.gate = 'none' submission is not counted by batches",
        ),
        (
            {"partial.oversample": 1.5, "buffer.order": "submission"},
            "partial.oversample = 1.5: buffer.order = 'submission' waits for the slow groups",
        ),
        ({"filter.max_tied": 1.5}, "filter.max_tied = 1.5: must be a share from 0 to 1"),
        ({"filter.max_draws": 1}, "filter.max_draws = 1: must be ≥ 2"),
        ({"filter.max_reward": float("nan")}, "filter.max_reward = nan: must be a finite number"),
        ({"filter": {"min_reward": 0.9, "max_reward": 0.1}}, "filter.min_reward = 0.9: must be ≤ max_reward = 0.1"),
        (
            {"filter.max_tied": 0.0, "train": {"group_size": 1, "batch": 8, "advantage": "global"}},
            "filter.max_tied = 0: a group of one is never tied; set train.group_size to 2 or more",
        ),
        ({"sampler.kind": "random"}, "sampler.kind = 'random': must be 'shuffle', 'learnable', module:Class or file.py:Class"),
        ({"sampler.explore": -0.1}, "sampler.explore = -0.1: must be a share from 0 to 1"),
        ({"sampler.retry_failed": 1.0}, "sampler.retry_failed = 1.0: must be a share from 0 to below 1"),
        ({"sampler.skip_solved": -1}, "sampler.skip_solved = -1: must be ≥ 0"),
        ({"sampler.remember": 0}, "sampler.remember = 0: must be ≥ 1"),
        (
            {"sampler.options": {"a": 1}},
            "sampler.options = {'a': 1}: only a class of your own has options, not",
        ),
        ({"sampler": {"kind": "a:B", "skip_solved": 2}}, "sampler.skip_solved = 2: is for 'shuffle', 'learnable'; a class of"),
        (
            {"sampler.kind": "learnable", "train": {"group_size": 1, "batch": 8, "advantage": "global"}},
            "sampler.kind = 'learnable': a task is judged by how siblings differ; set train.group_size to 2 or more",
        ),
        ({"sync.deadline": float("inf")}, "sync.deadline = inf: must be a number above 0"),
        ({"sync.patience": float("inf")}, "sync.patience = inf: must be a number ≥ 0"),
        (
            {"partial.oversample": 1.5, "partial.interrupt": "drain"},
            "partial.oversample = 1.5: partial.interrupt = 'drain' waits for the unfinished",
        ),
        (
            {"partial.oversample": 1.5, "staleness.max_lag": 0},
            "partial.oversample = 1.5: what continues after a batch holds tokens of an older version, and staleness.max_lag",
        ),
        ({"steps": 0}, "steps = 0: must be ≥ 1, or 0 with sft.steps or sft.epochs"),
        ({"sft.steps": -1}, "sft.steps = -1: must be ≥ 0"),
        ({"sft.epochs": -0.5}, "sft.epochs = -0.5: must be a number ≥ 0"),
        ({"sft": {"steps": 3, "epochs": 1.0}}, "sft.epochs = 1.0: must be left out, since steps = 3"),
        ({"sft.batch": 0}, "sft.batch = 0: must be ≥ 1"),
        ({"sft.max_length": -1}, "sft.max_length = -1: must be ≥ 0"),
        ({"sft.warmup_steps": -1}, "sft.warmup_steps = -1: must be ≥ 0"),
        ({"sft.until_success": 1.5}, "sft.until_success = 1.5: must be a share, 0 to 1"),
        ({"sft.schedule": "cosin"}, "sft.schedule = 'cosin': must be one of 'constant', 'linear', 'cosine', 'wsd'"),
        ({"tasks": [{"source": "a.jsonl", "limit": -1}]}, "tasks.0.limit = -1: must be ≥ 0"),
        ({"tasks": [{"source": "a.jsonl", "map": "clean"}]}, "tasks.0.map = 'clean': must be module:function or file.py"),
        ({"tasks": [{"source": "a", "columns": {"prompt": ""}}]}, "tasks.0.columns = {'prompt': ''}: must be our name"),
        ({"tasks": [{"source": "a", "columns": {"a": "x", "b": "x"}}]}, "tasks.0.columns = {'a': 'x', 'b': 'x'}: must be a"),
        ({"model.chat_template_kwargs": {"messages": 1}}, "model.chat_template_kwargs.messages = 1: must be a name"),
        ({"model.chat_template_kwargs": {"a b": 1}}, "model.chat_template_kwargs.a b = 1: must be a name"),
        ({"model.chat_template_kwargs": {"a": {1, 2}}}, "model.chat_template_kwargs.a = {1, 2}: must be text, a number"),
        ({"device": "gpu"}, "device = 'gpu': must be one of 'auto', 'cpu', 'cuda'"),
        ({"observe.sinks": ["wandb", "tensorbord"]}, "observe.sinks.1 = 'tensorbord'"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_recipe_that_cannot_run_is_refused(settings: dict, problem: str) -> None:
    assert refusal(settings).startswith(problem)


@pytest.mark.parametrize(
    "settings",
    [
        {"sft.steps": 10, "sft.check_every": 0},
        {"sampling.temperature": float("inf")},
        {"train.beta2": 2.0},
        {"model.num_heads": 0},
    ],
    ids=lambda settings: str(list(settings)[-1]),
)
def test_a_number_that_must_crash_later_is_refused_now(settings: dict) -> None:
    refusal(settings)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train.epochs": 2}, "train.epochs = 2 needs the whole batch before the first step"),
        ({"train.advantage": "global", "train.scale_rewards": "none"}, "train.advantage = 'global' needs"),
        ({"train.scale_rewards": "batch"}, "train.scale_rewards = 'batch' needs"),
        ({"train.entropy_quantile": 0.5}, "train.entropy_quantile = 0.5 needs"),
        ({"train.entropy_target": 0.5}, "train.entropy_target = 0.5 needs"),
        ({"train.kl": 0.1, "train.kl_target": 0.5}, "train.kl_target = 0.5 needs"),
        ({"exact": True}, "when a part is trained depends on timing, which exact = true does not allow"),
        ({"staleness.max_lag": 0}, "a synchronous buffer is for batches that are generated, then trained"),
        ({"train.router_aux": 0.1}, "train.router_aux = 0.1 is a mean over all tokens of a step"),
        ({"train.loss": "m2po"}, "the correction 'm2po' compares all tokens of a step"),
    ],
)
def test_what_needs_a_whole_batch_is_refused_in_parts_and_chooses_one_by_itself(settings: dict, problem: str) -> None:
    given = {"train.batch": 64, "staleness.max_lag": 1, **settings}
    assert f"train.stream_parts = 2: {problem}" in refusal({**given, "train.stream_parts": 2})
    recipe = make_recipe(given)
    assert (recipe.train.stream_parts, recipe.stream_parts) == (0, 1)


def test_the_usual_parts_of_a_batch() -> None:
    def parts(**settings: object) -> int:
        return make_recipe({"train": {"batch": 64, **settings}}).stream_parts

    assert parts() == 4 and parts(batch=48) == 3 and parts(batch=24) == 1
    assert parts(mini_batches=2) == 1 and parts(mini_batches=2, stream_parts=8) == 8
    assert parts(parallel={"shard": 8}) == 2, "each rank gets some rollouts of each part"
    assert make_recipe({"train.batch": 64, "orchestrate": "inline"}).stream_parts == 1
    assert make_recipe({"train.batch": 64, "engine.lend": True}).stream_parts == 1
    assert make_recipe({"train.batch": 64, "staleness.max_lag": "auto"}).stream_parts == 4
    why = "must be a multiple of mini_batches = 2, at most the 8 groups of a batch; or 1"
    for wrong in (3, 10):
        assert why in refusal({"train": {"batch": 64, "mini_batches": 2, "stream_parts": wrong}})
    make_recipe({"train": {"batch": 64, "mini_batches": 2, "stream_parts": 2, "loss": "m2po"}})  # each a step of its own


@pytest.mark.parametrize(
    "settings",
    [
        {"train.batch": 8},
        {"train.batch": 16, "train.mini_batches": 2},
        {"sampling.max_tokens": 63, "model.context": 64},
        {"sampling.max_tokens": 5000, "model.context": 0},
        {"exact": True, "device": "cpu", "staleness.max_lag": 1},
        {"exact": True, "buffer.kind": "stream", "staleness.max_lag": 1},
        {"staleness": {"max_lag": 0.5}},
        {"staleness": {"max_lag": "auto", "max_lag_limit": 1}},
        {"staleness": {"gate": "slots", "slots": 0.1}},
        {"buffer": {"kind": "bounded", "depth": 1}, "staleness.max_lag": 0},
        {"buffer": {"kind": "bounded", "depth": 9}, "staleness": {"gate": "none", "reject": "never"}},
        {"buffer.kind": "stream", "staleness": {"max_lag": 0, "gate": "none", "reject": "never"}},
        {"reward": {"weights": [1, 2]}},
        {"steps": 0, "sft": {"epochs": 0.5, "until_success": 0.0}},
    ],
    ids=str,
)
def test_a_recipe_at_its_limits_is_taken(settings: dict) -> None:
    make_recipe(settings)


# What follows

KINDS = ("auto", "synchronous", "one_ahead", "bounded", "stream")
FOLLOWS = [
    # kind, depth, max_lag, gated, rejects -> buffer_kind, gate_depth, batches_waiting
    (("auto", 0, "auto", True, True), ("resizable", 8, None)),
    (("auto", 0, "auto", False, False), ("stream", None, None)),
    (("synchronous", 0, "auto", True, True), ("synchronous", 0, 1)),
    (("stream", 0, "auto", True, True), ("stream", 8, None)),
    (("auto", 0, 0.5, True, True), ("one_ahead", 0.5, 1)),
    (("auto", 0, 1.25, True, True), ("bounded", 1.25, 2)),
    (("auto", 0, 0, True, True), ("synchronous", 0, 1)),
    (("auto", 0, 0, False, True), ("synchronous", 0, 1)),
    (("auto", 0, 0, True, False), ("synchronous", 0, 1)),
    (("auto", 0, 0, False, False), ("stream", None, None)),
    (("auto", 0, 1, True, True), ("one_ahead", 1, 1)),
    (("auto", 0, 1, False, True), ("one_ahead", None, 1)),
    (("auto", 0, 1, False, False), ("stream", None, None)),
    (("auto", 0, 4, True, True), ("bounded", 4, 4)),
    (("auto", 0, 4, True, False), ("bounded", 4, 4)),
    (("auto", 0, 4, False, True), ("bounded", None, 4)),
    (("auto", 0, 4, False, False), ("stream", None, None)),
    (("synchronous", 0, 0, True, True), ("synchronous", 0, 1)),
    (("synchronous", 0, 4, True, True), ("synchronous", 0, 1)),
    (("synchronous", 0, 4, False, False), ("synchronous", 0, 1)),
    (("one_ahead", 0, 1, True, True), ("one_ahead", 1, 1)),
    (("one_ahead", 0, 4, True, True), ("one_ahead", 4, 1)),
    (("one_ahead", 0, 4, False, True), ("one_ahead", None, 1)),
    (("bounded", 2, 4, True, True), ("bounded", 4, 2)),
    (("bounded", 4, 4, True, True), ("bounded", 4, 4)),
    (("bounded", 2, 4, False, False), ("bounded", None, 2)),
    (("bounded", 1, 0, True, True), ("bounded", 0, 1)),
    (("stream", 0, 4, True, True), ("stream", 4, None)),
    (("stream", 0, 4, False, True), ("stream", None, None)),
]


def settings_of(kind: str, depth: int, max_lag: float | str, gated: bool, rejects: bool) -> dict:
    how = {"gate": "depth" if gated else "none", "reject": "oldest" if rejects else "never"}
    return {"buffer": {"kind": kind, "depth": depth}, "staleness": {"max_lag": max_lag, **how}}


@pytest.mark.parametrize(("chosen", "expected"), FOLLOWS, ids=lambda value: "-".join(map(str, value)))
def test_what_follows_from_buffer_and_staleness(chosen: tuple, expected: tuple) -> None:
    recipe = make_recipe(settings_of(*chosen))
    policy = buffer_policy(recipe)
    assert (policy.name, gate_depth(recipe), policy.max_batches) == expected


def test_every_combination_is_refused_or_holds_its_promises() -> None:
    taken, refused = 0, 0
    for kind, depth, max_lag, gate, reject in itertools.product(KINDS, range(4), range(4), (True, False), (True, False)):
        try:
            recipe = make_recipe(settings_of(kind, depth, max_lag, gate, reject))
        except ConfigError:
            refused += 1
            continue
        taken += 1
        where = (kind, depth, max_lag, gate, reject)
        policy, depth_of_gate = buffer_policy(recipe), gate_depth(recipe)
        assert policy.name in KINDS[1:], where
        assert kind in ("auto", policy.name), where
        assert (policy.max_batches is None) == (policy.name == "stream"), where
        if gate:  # submission never runs further ahead than the bound
            assert depth_of_gate is not None and depth_of_gate <= max_lag, where
        elif policy.name != "synchronous":
            assert depth_of_gate is None, where
        if gate or reject:  # no batch waits so long that it must be too old
            assert policy.max_batches is None or policy.max_batches <= max(max_lag, 1), where
        if policy.max_batches is not None:
            assert policy.max_batches >= 1, where
        if policy.takes_turns:
            assert (depth_of_gate, policy.max_batches) == (0, 1), where
        if depth:
            assert (kind, policy.max_batches) == ("bounded", depth), where
    assert taken > 50 and refused > 50


def test_exact_mode_trains_in_order_of_submission() -> None:
    assert not is_in_submission_order(make_recipe({}))
    assert is_in_submission_order(make_recipe({"exact": True, "staleness.max_lag": 1}))
    assert is_in_submission_order(make_recipe({"buffer.order": "submission"}))


def test_the_derivation_counts() -> None:
    text = "\n".join(make_recipe({"train.batch": 24, "train.group_size": 4, "staleness.max_lag": 2, "steps": 5}).derivation())
    assert "24 rollouts = 6 tasks × 4 siblings" in text
    assert "120 rollouts" in text
    assert "(2 + 1) × 6 = 18 tasks" in text
    assert "bounded: 2 × 6 = 12 groups" in text
    assert make_recipe({"steps": 0, "sft.epochs": 2, "sft.batch": 8}).derivation() == [
        "sft        2 epochs of 8 rows, at most, and no RL (steps = 0)"
    ]
    with pytest.raises(ConfigError, match="DPO learns from pairs"):
        make_recipe({"algorithm": "dpo"})
    ungated = "\n".join(make_recipe({"staleness": {"gate": "none", "reject": "never"}}).derivation())
    assert "gate       none" in ungated and "stream: 8 GB wait at most" in ungated


def test_the_hash_is_of_what_a_run_is() -> None:
    base = make_recipe({})
    changes: list[dict] = [
        {"seed": 1},
        {"train.learning_rate": 2e-6},
        {"train.constants": {"clip_low": 0.1}},
        {"staleness.max_lag": 0},
        {"tasks": [{"source": "a"}]},
        {"tasks": [{"source": "a", "options": {"b": 1}}]},
        {"evaluate.limit": 3},
        *(
            {"exact": True, "staleness.max_lag": 1, **more}
            for more in ({}, {"steps": 7}, {"threads": 2}, {"evaluate.every": 3})
        ),
    ]
    hashes = {make_recipe(change).hash for change in changes} | {base.hash}
    assert len(hashes) == len(changes) + 1
    assert make_recipe({"observe": {"trace": False, "keep_rollouts_every": 1, "sinks": ["wandb"]}}).hash == base.hash
    assert make_recipe({"train": {"learning_rate": 1e-6}}).hash == base.hash
    assert make_recipe({"train": {"max_skipped": 0}}).hash == base.hash, "a run that it stopped may go on with another"
    assert make_recipe({"engine.sleep": "cache", "staleness.max_lag": 0}).hash == make_recipe({"staleness.max_lag": 0}).hash
    for change in ({"recompute": "layers"}, {"offload": ["optimizer"]}, {"micro_batch_tokens": 64}):
        assert make_recipe({"train": change}).hash == base.hash, "one that ran out of memory may go on with less"
    for change in ({"steps": 7}, {"threads": 2}, {"engine.count": 2}, {"evaluate.every": 3}, {"checkpoint.every": 3}):
        assert make_recipe(change).hash == base.hash, "where and how long it runs is not what it is"


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_recipe({}).steps = 3


# Names from elsewhere


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_generations", "did you mean train.group_size?"),
        ("beta", "did you mean train.kl?"),
        ("max_completion_length", "did you mean sampling.max_tokens?"),
        ("max_steps", "did you mean steps?"),
        ("train_dataset", "it is [[tasks]] here, tasks= in Python"),
        ("epsilon", "it is train.constants.clip_low and train.constants.clip_high here"),
        ("lora_rank", "did you mean lora.rank?"),
        ("learning_rate", "did you mean train.learning_rate or sft.learning_rate?"),
        ("max_lag", "did you mean staleness.max_lag?"),
        ("block_size", "did you mean engine.block_size?"),
    ],
)
def test_a_name_of_trl_or_of_another_section_is_answered_with_ours(name: str, advice: str) -> None:
    told = f"{name} is not a setting; {advice}"
    with pytest.raises(ConfigError) as in_toml:
        parse_recipe(f"seed = 1\n{name} = 8\n", name="mine.toml")
    assert str(in_toml.value) == f"mine.toml:2: {told}"
    with pytest.raises(ConfigError) as in_section:
        parse_recipe(f"[buffer]\n{name} = 8\n", name="mine.toml")
    assert str(in_section.value) == f"mine.toml:2: buffer.{told}"
    with pytest.raises(ConfigError) as on_command_line:
        load_recipe(QUICKSTART, dict([parse_override(f"--{name.replace('_', '-')}=8")]))
    assert str(on_command_line.value) == f"override: {told}"
    with pytest.raises(ConfigError) as in_python:
        train(model="builtin:tiny", **{name: 8})
    assert str(in_python.value).startswith(told)


def test_a_keyword_of_python_is_answered_as_it_is_written_there() -> None:
    with pytest.raises(ConfigError, match=r"num_generations is not .* train.group_size\? In Python: train={'group_size': …}$"):
        make_recipe({"num_generations": 8})


# The command line, in a process of its own


HEAVY = ("torch", "transformers", "pyarrow", "safetensors", "rich")
WITHOUT_TORCH = f"""
import sys
from headrace.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("status", end.code)
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""


def headrace(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_mistake_is_answered_in_one_line_without_importing_torch() -> None:
    done = headrace("train", "recipes/quickstart.toml", "--train.lerning_rate=1")
    assert done.stdout == "status 2\nheavy: []\n"
    message = "headrace: override: train.lerning_rate is not a setting; did you mean train.learning_rate?"
    assert done.stderr.strip() == message


def test_a_dry_run_shows_the_resolved_recipe_without_importing_torch() -> None:
    done = headrace("train", "recipes/quickstart.toml", "--dry-run", "--steps=9")
    assert "status 0\nheavy: []" in done.stdout, done.stderr
    text = done.stdout
    assert "256 rollouts = 32 tasks × 8 siblings" in text and "nothing was started" in text
    resolved = text[text.index("\nsteps = 9") : text.index("\nbatch      256 rollouts")]
    assert parse_recipe(resolved, name="printed") == load_recipe(QUICKSTART, {"steps": 9})


def test_an_override_of_another_command_is_refused(capsys) -> None:
    from headrace.cli import main

    with pytest.raises(SystemExit) as end:
        main(["inspect", "runs/x", "--steps=3"])
    assert end.value.code == 2
    assert "unrecognized arguments: --steps=3" in capsys.readouterr().err


# More than a batch needs


@pytest.mark.parametrize(
    ("settings", "extra", "stops"),
    [
        ({}, 0, False),
        ({"partial.oversample": 1.25}, 8, False),
        ({"partial.oversample": 1.01}, 1, False),
        ({"partial.oversample": 2}, 32, False),
        ({"partial.oversample": 1.5, "buffer.kind": "synchronous"}, 16, True),
        ({"partial": {"oversample": 1.5, "cancel": "over_age"}, "staleness.max_lag": 0}, 16, True),
        ({"partial.oversample": 1.5, "staleness": {"max_lag": 0, "reject": "never"}}, 16, True),
        ({"buffer.kind": "synchronous"}, 0, False),
    ],
)
def test_oversampling_is_a_number_of_groups(settings: dict, extra: int, stops: bool) -> None:
    recipe = make_recipe(settings)
    groups = recipe.train.groups_per_batch
    assert (groups, recipe.partial.extra_groups(groups), pauses_unfinished(recipe)) == (32, extra, stops)
    gate = next(row for row in recipe.derivation() if row.startswith("gate"))
    most = (gate_depth(recipe) + 1) * 32 + extra
    assert f"= {most} tasks submitted and untrained" in gate and ("partial.oversample" in gate) == (extra > 0)


def test_every_mistake_is_reported_at_once() -> None:
    text = "stepz = 3\n[train]\nlr = 1\nbatch = 'x'\n[staleness]\nmax_lag = -1\n"
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text, name="mine.toml")
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["mine.toml:1:", "mine.toml:3:", "mine.toml:4:", "mine.toml:6:"]
    assert "did you mean steps?" in lines[0] and "train.learning_rate" in lines[1]
