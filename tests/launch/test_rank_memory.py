"""The memory of a trainer's ranks, predicted from a model's config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers

from headrace.cli import main

if TYPE_CHECKING:
    from pathlib import Path

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4}
SHAPES = {
    "Qwen3-8B": ("Qwen3Config", {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}),
    "Qwen3-14B": ("Qwen3Config", {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40}),
    "Qwen3-32B": ("Qwen3Config", {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}),
    "Qwen3-30B-A3B": ("Qwen3MoeConfig", {"hidden_size": 2048, "num_hidden_layers": 48, **EXPERTS}),
}
HEADS = {"Qwen3-8B": 32, "Qwen3-14B": 40, "Qwen3-32B": 64, "Qwen3-30B-A3B": 32}
RECIPES = {
    "reasoning-qwen3-8b-8gpu": 4,
    "reasoning-qwen3-14b-2x8gpu": 8,
    "reasoning-qwen3-32b-64gpu": 32,
    "reasoning-qwen3-30b-a3b-2x8gpu": 8,
}


def config_of(name: str) -> transformers.PretrainedConfig:
    kind, sizes = SHAPES[name]
    made: transformers.PretrainedConfig = getattr(transformers, kind)(
        **{**QWEN3, **sizes, "num_attention_heads": HEADS[name], "tie_word_embeddings": False}
    )
    return made


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's cache that has the configs alone, under the names of the real models."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in SHAPES:
        folder = tmp_path / f"models--Qwen--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        config_of(name).save_pretrained(folder / "snapshots" / ("0" * 40))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_of_a_large_recipe_tells_what_each_rank_needs(
    recipe: str, hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = RECIPES[recipe]
    told = told_by(capsys, recipe)
    assert f"GB on each of {ranks} trainer ranks, predicted for a GPU" in told
    assert 20 < float(told.split()[1]) < 76, told  # of 80 GB


def test_an_adapter_on_weights_in_four_bits_is_counted_as_such(hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(*more: str) -> float:
        told = told_by(capsys, "reasoning-qwen3-8b-8gpu", "--lora.rank=16", *more)
        return float(told.partition("weights ")[2].partition(",")[0])

    assert weights("--lora.quantize=nf4") < 0.6 * weights(), "the embedding and the head stay as they are"


def told_by(capsys: pytest.CaptureFixture[str], recipe: str, *more: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["train", f"recipes/{recipe}.toml", "--dry-run", *more])
    assert ended.value.code == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
