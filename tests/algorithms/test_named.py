"""Algorithms by name: each has the choices of its paper, cited here, and what the user writes is over them."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from strategies import quick

from headrace.algorithms import NAMED, check_loss
from headrace.algorithms.losses import LOSSES
from headrace.cli import main
from headrace.config import Recipe, make_recipe, parse_recipe
from headrace.launch.build import check_columns
from headrace.launch.inputs import UserInputs
from headrace.settings import describe, to_dict, to_toml

PAPERS = {
    # Shao et al. 2024, DeepSeekMath (2402.03300): eq. 3 (1/G Σ 1/|o| Σ min(r A, clip(r, 1 ± ε) A) − β KL), eq. 4 (k3),
    # 4.1.2 (A = (r − mean)/std), 4.2 (β = 0.04, a single update following each exploration stage)
    "grpo": {
        "loss": "grpo",
        "constants": {"clip_low": 0.2, "clip_high": 0.2},
        "mean_over": "sequence",
        "advantage": "group",
        "scale": "group",
        "kl": 0.04,
        "kl_estimator": "k3",
        "kl_in_reward": False,
        "mini_batches": 1,
    },
    # Liu et al. 2025, Understanding R1-Zero-Like Training (2503.20783): 3.2 takes 1/|o| and std out of GRPO, and
    # appendix A divides the sum over tokens by a constant budget; 2.2 (β = 0)
    "dr_grpo": {
        "loss": "grpo",
        "constants": {"clip_low": 0.2, "clip_high": 0.2},
        "mean_over": "constant",
        "advantage": "group",
        "scale": "none",
        "kl": 0.0,
    },
    # Yu et al. 2025, DAPO (2503.14476): eq. 8 and 10 (ε_low 0.2, ε_high 0.28), eq. 9 (A), eq. 12 (token-level mean), 2.3 (no
    # KL), eq. 11 (dynamic sampling), 3.4 (overlong filtering masks the loss of truncated samples), eq. 13 (soft overlong
    # punishment, added to the reward), 4.1 (16 gradient updates a rollout step; a cache of 4,096 of at most 20,480 tokens)
    "dapo": {
        "loss": "grpo",
        "constants": {"clip_low": 0.2, "clip_high": 0.28},
        "mean_over": "token",
        "advantage": "group",
        "scale": "group",
        "kl": 0.0,
        "mini_batches": 16,
        "mask_truncated": True,
        "filter.max_tied": 0.0,
        "reward.overlong_buffer": 4096 / 20480,
    },
    # Hu 2025, REINFORCE++ (2501.03262): PPO's clip with ε = 0.2, A_t = r − β Σ_{i ≥ t} KL(i), normalised over the global batch
    "reinforce++": {
        "loss": "grpo",
        "constants": {"clip_low": 0.2, "clip_high": 0.2},
        "mean_over": "token",
        "advantage": "global",
        "scale": "batch",
        "kl": 0.01,
        "kl_in_reward": True,
    },
    # Ahmadian et al. 2024, Back to Basics (2402.14740): section 3, the whole completion as one action, whose log π is a sum,
    # and the mean reward of the other k − 1 samples as its baseline; on-policy, without clipping; R = r − β log(π/π_ref)
    "rloo": {
        "loss": "reinforce",
        "constants": {},
        "mean_over": "sum",
        "advantage": "leave_one_out",
        "scale": "none",
        "kl": 0.03,
        "kl_in_reward": True,
        "mini_batches": 1,
    },
    # Zheng et al. 2025, GSPO (2507.18071): eq. 5 (mean over rollouts), eq. 6 (A), eq. 7 (s), 5.1 (clips of 3e-4 and 4e-4, four
    # mini-batches); it leaves the KL out
    "gspo": {
        "loss": "gspo",
        "constants": {"clip_low": 3e-4, "clip_high": 4e-4},
        "mean_over": "sequence",
        "advantage": "group",
        "scale": "group",
        "kl": 0.0,
        "mini_batches": 4,
    },
    # MiniMax 2025, MiniMax-M1 (2506.13585): eq. 4 (token-level mean, sg(clip(r)) A log π), eq. 5 (no lower clip), no KL, 3.1
    # (16 rounds of off-policy updates per generation batch, DAPO's dynamic sampling); the upper clip is ScaleRL's (2510.13786)
    "cispo": {
        "loss": "cispo",
        "constants": {"clip_low": 1.0, "clip_high": 4.0},
        "mean_over": "token",
        "advantage": "group",
        "scale": "group",
        "kl": 0.0,
        "mini_batches": 16,
        "filter.max_tied": 0.0,
    },
    # Schulman et al. 2017, PPO (1707.06347): eq. 7 (ε = 0.2), eq. 9 (value loss), eq. 11 (GAE, λ = 0.95); Ouyang et al. 2022,
    # InstructGPT (2203.02155): eq. 2 and appendix C.4 (β = 0.02 in the reward, no discount, eight mini-batches, one epoch)
    "ppo": {
        "loss": "ppo",
        "constants": {"clip_low": 0.2, "clip_high": 0.2},
        "mean_over": "token",
        "advantage": "gae",
        "scale": "batch",
        "discount": 1.0,
        "gae_lambda": 0.95,
        "kl": 0.02,
        "kl_in_reward": True,
        "mini_batches": 8,
    },
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_algorithm_is_its_papers(name: str) -> None:
    recipe = make_recipe({"algorithm": name})
    assert {key: operator.attrgetter(key if "." in key else f"train.{key}")(recipe) for key in PAPERS[name]} == PAPERS[name]
    settings = {key: value for key, value in NAMED[name].items() if not key.startswith("train.constants.")}
    resolved = {"loss_mean": "mean_over", "scale_rewards": "scale"}
    for key in settings:  # nothing that the citation does not speak of
        leaf = key.removeprefix("train.")
        assert resolved.get(leaf, leaf) in PAPERS[name], key
    check_loss(recipe.train.loss, recipe.train.constants)
    check_columns(recipe, UserInputs())


def row_of(name: str) -> str:
    """Of the table in docs/losses.md."""
    left = {key.removeprefix("train."): value for key, value in NAMED[name].items()}
    clips = [f"{left.pop(key):g}" for key in ("constants.clip_low", "constants.clip_high") if key in left]
    loss = " ".join([f"`{left.pop('loss')}`", *([", ".join(clips)] if clips else [])])
    mean, advantage = f"`{left.pop('loss_mean')}`", f"`{left.pop('advantage')}`"
    if "gae_lambda" in left:
        advantage += f" (γ {left.pop('discount'):g}, λ {left.pop('gae_lambda'):g})"
    kl = f"{left.pop('kl'):g}" + (f", {left.pop('kl_estimator')}" if "kl_estimator" in left else "")
    kl += " in the reward" if left.pop("kl_in_reward", False) else ""
    parts, also = left.pop("mini_batches", 0), []
    also += [f"{parts} mini-batch{'es' if parts > 1 else ''}"] if parts else []
    also += ["`mask_truncated`"] if left.pop("mask_truncated", False) else []
    cells = [f"`{name}`", loss, mean, f"{advantage} ÷ `{left.pop('scale_rewards')}`", kl]
    also += [f"`{key} = {value:g}`" for key, value in left.items()]
    return f"| {' | '.join(cells)} | {', '.join(also)} |".replace("|  |", "| |")


def test_the_page_has_what_each_sets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text().splitlines()
    start = page.index("| `algorithm` | loss | mean | advantage ÷ scale | KL | also |")
    assert page[start + 2 : start + 2 + len(NAMED)] == [row_of(name) for name in NAMED]


def test_the_recipe_names_every_algorithm() -> None:
    kinds = {key: kind for key, kind, *_ in describe(Recipe)}
    assert kinds["algorithm"] == " | ".join(f'"{name}"' for name in ("none", *NAMED))
    assert all(settings["train.loss"] in LOSSES for settings in NAMED.values())


def test_what_the_user_writes_is_over_the_algorithm() -> None:
    text = 'algorithm = "dapo"\n[train]\nkl = 0.01\nbatch = 64\n[train.constants]\nclip_high = 0.3\n'
    recipe = parse_recipe(text, name="mine.toml", overrides={"train.mini_batches": 2})
    assert recipe.train.constants == {"clip_low": 0.2, "clip_high": 0.3}
    assert (recipe.train.kl, recipe.train.mini_batches, recipe.train.mask_truncated) == (0.01, 2, True)
    assert parse_recipe("[train]\nkl = 0.01\n", name="mine.toml", overrides={"algorithm": "grpo"}).train.kl == 0.01
    nested = make_recipe({"algorithm": "dapo", "train": {"batch": 64, "mini_batches": 2, "mask_truncated": False}})
    assert not nested.train.mask_truncated and nested.train.constants["clip_high"] == 0.28


def test_constants_go_with_their_loss() -> None:
    """DAPO's clips would mean something else to another loss."""
    recipe = make_recipe({"algorithm": "dapo", "train.loss": "cispo"})
    assert recipe.train.constants == {} and recipe.train.mask_truncated
    assert make_recipe({"algorithm": "dapo", "train.loss": "grpo"}).train.constants == {"clip_low": 0.2, "clip_high": 0.28}


@given(st.sampled_from(sorted(NAMED)), st.sampled_from([{}, {"train.loss": "aipo", "train.advantage": "reward"}]))
@quick
def test_a_resolved_recipe_is_itself_and_the_values_are_what_it_is(name: str, changes: dict) -> None:
    if changes:
        changes = {**changes, "train.scale_rewards": "auto", "train.loss_mean": "auto", "train.kl_in_reward": False}
    recipe = make_recipe({"algorithm": name, **changes})
    assert parse_recipe(to_toml(to_dict(recipe)), name="resolved.toml") == recipe == make_recipe(to_dict(recipe))
    written_out = make_recipe({**to_dict(recipe), "algorithm": "none"})
    assert written_out.hash == recipe.hash and written_out != recipe


def test_a_dry_run_shows_what_an_algorithm_comes_to(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "recipes/quickstart.toml", "--dry-run", "--algorithm=gspo"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for line in ('algorithm = "gspo"', 'loss = "gspo"', "clip_high = 0.0004", "mini_batches = 4", "batch = 256"):
        assert line in shown
