"""The memory of a trainer's ranks and of engines, predicted from a model's config alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from headrace.cli import main
from headrace.config import load_recipe
from headrace.engine import engine_kind

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
    "reasoning-qwen3-8b-8gpu": 8,
    "reasoning-qwen3-14b-2x8gpu": 16,
    "reasoning-qwen3-32b-64gpu": 64,
    "reasoning-qwen3-30b-a3b-2x8gpu": 16,
}
"""GPUs of 80 GB that each has."""


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


def test_every_large_recipe_is_listed() -> None:
    assert {path.stem for path in Path("recipes").glob("*gpu.toml") if load_recipe(path).train.parallel.is_on} == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_large_recipe_tells_what_each_gpu_needs(
    name: str, hub: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(f"recipes/{name}.toml")
    ranks, engines = recipe.train.parallel.ranks, recipe.engine.num_engines
    assert ranks + engines * max(1, engine_kind(recipe.engine).gpus_for_itself(recipe)) == RECIPES[name]
    of_rank, of_engine = told_by(capsys, name)
    assert f"GB on each of {ranks} trainer ranks, predicted for a GPU" in of_rank
    assert 20 < float(of_rank.split()[1]) < 76, of_rank
    assert f"GB on each GPU of {engines} engines, predicted: weights " in of_engine and "KV cache" in of_engine
    assert 10 < float(of_engine.split()[1]) < 40, "no less is left for the KV cache"


def test_a_dry_run_says_that_native_engines_are_too_large_for_their_gpus(
    hub: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * 10**9, 80 * 10**9))
    past = ("--model.path=Qwen/Qwen3-32B", "--orchestrate=ray", "--cluster.listen=10.0.0.5:0", "--train.parallel.shard=32")
    of_rank, of_engine = told_by(capsys, "reasoning-qwen3-8b-8gpu", *past)
    assert "more than" not in of_rank
    assert "weights 65.5, an update beside them 65.5" in of_engine
    assert of_engine.endswith("; KV cache not counted: more than the 80.0 GB of a GPU here")


def test_a_dry_run_needs_no_gpus_for_a_handover_that_does(hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--engine.kind=vllm", "--engine.vllm.arguments={}", "--engine.vllm.handover=nccl")
    assert "GB on each GPU of 4 engines" in told_by(capsys, "reasoning-qwen3-14b-2x8gpu", *one)[1]


def test_an_adapter_on_weights_in_four_bits_is_counted_as_such(hub: None, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(*more: str) -> float:
        told, of_engine = told_by(capsys, "reasoning-qwen3-8b-8gpu", "--lora.rank=16", *more)
        assert "update beside them 0.1" in of_engine, "of the adapter alone"
        return float(told.partition("weights ")[2].partition(",")[0])

    assert weights("--lora.quantize=nf4") < 0.6 * weights(), "the embedding and the head stay as they are"


def told_by(capsys: pytest.CaptureFixture[str], recipe: str, *more: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["train", f"recipes/{recipe}.toml", "--dry-run", *more])
    assert ended.value.code == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
