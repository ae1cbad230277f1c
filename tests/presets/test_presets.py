"""Presets: every library parses with the quickstart, what the user writes comes first, the command and the page tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import PRESETS, Recipe, list_presets, load_recipe, make_recipe, parse_recipe, show_preset
from headrace.config.preset_text import AXES, axes
from headrace.settings import ConfigError, describe, flatten, to_dict, to_toml

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
NAMES = [
    "trl",
    "trl-async",
    "verl",
    "art",
    "slime",
    "miles",
    "areal",
    "verifiers-rl",
    "open-instruct",
    "roll",
    "tunix",
    "skyrl",
    "nemo-rl",
    "prime-rl",
    "atropos",
    "oat",
    "torchforge",
    "pipelinerl",
    "openrlhf",
]


def test_the_nineteen_are_there() -> None:
    assert list(PRESETS) == NAMES
    kinds = {key: kind for key, kind, *_ in describe(Recipe)}
    assert kinds["preset"] == " | ".join(f'"{name}"' for name in ("none", *NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_parses_with_the_quickstart(name: str) -> None:
    recipe = load_recipe(QUICKSTART, {"preset": name})
    has = flatten(to_dict(recipe))
    for key, (value, why) in PRESETS[name].settings.items():
        assert has[key] == value or has[key] == [value], key
        assert why
    assert PRESETS[name].differs.endswith(".")
    assert recipe.hash == make_recipe({**to_dict(recipe), "preset": "none"}).hash, "the settings, not the name, say what it is"
    assert parse_recipe(to_toml(to_dict(recipe)), name="resolved.toml") == recipe
    inline = load_recipe(QUICKSTART, {"preset": name, "orchestrate": "inline"})
    assert inline.sync.transport == "auto", "in one process weights travel in memory"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("placement", [{"orchestrate": "ray"}, {"orchestrate": "local", "cluster.trainer_joins": True}])
def test_every_preset_parses_on_ray_and_with_hosts_that_join(name: str, placement: dict[str, object]) -> None:
    """Weights reach other hosts over HTTP; all else is the preset's."""
    recipe = load_recipe(QUICKSTART, {"preset": name, "cluster.listen": "127.0.0.1:0", **placement})
    has = flatten(to_dict(recipe))
    assert has.pop("sync.transport") == "auto"
    for key, (value, _) in PRESETS[name].settings.items():
        assert key == "sync.transport" or has[key] in (value, [value]), key


def test_the_user_comes_first_then_the_algorithm_then_the_preset() -> None:
    art = make_recipe({"preset": "art"})
    assert art.train.loss == "cispo" and art.train.constants == {"clip_low": 1.0, "clip_high": 4.0} and art.lora.rank == 8
    both = make_recipe({"preset": "art", "algorithm": "dapo"})
    assert both.train.loss == "grpo" and both.train.constants == {"clip_low": 0.2, "clip_high": 0.28}
    assert both.train.mask_truncated and both.partial.interrupt == "lease"
    mine = parse_recipe(
        'preset = "art"\nalgorithm = "dapo"\n[train]\nmask_truncated = false\n[lora]\nrank = 2\n', name="mine.toml"
    )
    assert (mine.train.mask_truncated, mine.lora.rank, mine.lora.alpha) == (False, 2, 16.0)
    own_clip = make_recipe({"preset": "art", "train": {"constants": {"clip_high": 3.0}}})
    assert own_clip.train.constants == {"clip_low": 1.0, "clip_high": 3.0}
    assert make_recipe({"preset": "art", "train.loss": "grpo"}).train.constants == {}, "constants go with their loss"


def test_an_error_about_a_setting_of_the_preset_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^preset = 'art': partial\.interrupt = 'lease'.*set lora\.rank"):
        make_recipe({"preset": "art", "lora": {"rank": 0}})
    with pytest.raises(
        ConfigError, match=r"^mine\.toml:3: staleness\.correct = .*\(train\.loss comes from preset = 'areal'\)$"
    ):
        parse_recipe('preset = "areal"\n[staleness]\ncorrect = "tis"\n', name="mine.toml")
    with pytest.raises(ConfigError, match=r"preset = 'pipelineRL': must be one of .*did you mean 'pipelinerl'\?"):
        make_recipe({"preset": "pipelineRL"})


def test_the_command_lists_them_and_shows_one() -> None:
    listed = list_presets().splitlines()
    assert [line.split()[0] for line in listed[1 : len(NAMES) + 1]] == NAMES
    assert listed[0].split()[:2] == ["preset", "orchestration"] and all(axis in listed[0] for axis in AXES)
    for name in NAMES:
        shown = show_preset(name)
        for key, (_, why) in PRESETS[name].settings.items():
            assert f"  {key} = " in shown and why in shown
        assert PRESETS[name].orchestration in shown and "does not set `orchestrate`" in shown
    with pytest.raises(ConfigError, match=r"preset 'primerl': did you mean 'prime-rl'\?"):
        show_preset("primerl")


def test_the_command_needs_no_torch() -> None:
    program = "import sys; from headrace.cli import main\ntry: main(['presets', 'show', 'areal'])\nexcept SystemExit: pass\n"
    done = subprocess.run([sys.executable, "-c", f"{program}assert 'torch' not in sys.modules"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "decoupled_ppo" in done.stdout and "there: asyncio, HTTP;" in done.stdout


def test_the_page_has_every_preset() -> None:
    page = (ROOT / "docs" / "presets.md").read_text().splitlines()
    start = page.index(f"| preset | orchestration | {' | '.join(AXES)} |")
    assert page[start + 2 : start + 2 + len(NAMES)] == [f"| `{name}` | {' | '.join(axes(PRESETS[name]))} |" for name in NAMES]
