"""A LoRA run's checkpoints are all that evaluating, serving, merging and resuming need, whatever becomes of the cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from helpers import TASKS, length_reward, small_run
from safetensors.torch import load_file
from test_runs import run_and_kill
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace.cli import main
from headrace.lora.peft_folder import WEIGHTS_FILE
from headrace.model import load_model
from headrace.observe import read_metrics

if TYPE_CHECKING:
    from headrace.launch.launcher import RunResult

LORA: dict[str, Any] = {"lora": {"rank": 4}, "train": {"learning_rate": 1e-2}, "steps": 3}


def empty_cache() -> None:
    shutil.rmtree(Path(os.environ["HEADRACE_CACHE"]) / "warmup", ignore_errors=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return small_run(tmp_path_factory.mktemp("lora") / "run", **LORA, model={"chat_template_kwargs": {"mood": "calm"}})


@torch.no_grad()
def logits(folder: str | Path) -> torch.Tensor:
    """As transformers computes them, of a whole model or, through the hooks, of one with an adapter."""
    is_adapter = (Path(folder) / WEIGHTS_FILE).exists()
    model = load_model(str(folder)) if is_adapter else AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.set_attn_implementation("eager")
    assert next(model.parameters()).dtype == torch.float32
    found: torch.Tensor = model(torch.arange(3, 19).unsqueeze(0), use_cache=False).logits[0]
    return found


def test_merged_it_computes_what_the_live_adapter_does(trained: RunResult, tmp_path: Path) -> None:
    empty_cache()
    merged = headrace.merge(trained.folder, tmp_path / "new" / "merged")
    live, base = logits(str(trained.checkpoint)), logits(trained.folder / "base")
    assert (logits(merged) - live).abs().max() < 1e-5
    assert (base - live).abs().max() > 1e-3, "the adapter was not applied at all"
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["merged"]
    folders = (merged, trained.checkpoint, trained.folder / "base")
    ours, theirs, bases = (AutoTokenizer.from_pretrained(each) for each in folders)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template != bases.chat_template


def test_it_is_evaluated_after_the_cache_was_emptied_and_the_run_moved(trained: RunResult, tmp_path: Path) -> None:
    how: dict[str, Any] = {"held_out": TASKS, "reward": length_reward, "evaluate": {"limit": 12}}
    before = headrace.evaluate(trained.folder, **how)
    moved = tmp_path / "moved"
    shutil.copytree(trained.folder, moved)
    empty_cache()
    (trained.folder / "base").rename(trained.folder / "away")
    try:
        after = headrace.evaluate(moved, **how)
    finally:
        (trained.folder / "away").rename(trained.folder / "base")
    assert after.version == 3 and after.evaluation.tasks == before.evaluation.tasks
    whole = headrace.evaluate(headrace.merge(moved, tmp_path / "merged"), recipe=moved / "resolved.toml", **how)
    assert whole.evaluation.tasks == before.evaluation.tasks
    base = headrace.evaluate(moved / "base", recipe=moved / "resolved.toml", **how)
    assert base.evaluation.tasks != before.evaluation.tasks


def test_exact_a_resumed_lora_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**LORA, "exact": True, "steps": 5, "checkpoint": {"every": 2}, "sft": {"steps": 2, "batch": 8}}
    settings |= {"staleness": {"max_lag": 1}}
    small_run(tmp_path / "whole", **settings)
    run_and_kill(tmp_path / "killed", monkeypatch, at=3, **settings)
    empty_cache()
    monkeypatch.setattr("headrace.launch.start_model._make", lambda *_: pytest.fail("the base was made again"))
    small_run(tmp_path / "killed", **settings)
    for step in (2, 4, 5):
        ours, theirs = (tmp_path / name / "checkpoints" / f"step-{step}" for name in ("whole", "killed"))
        for file in (WEIGHTS_FILE, "trainer/optimizer.safetensors"):
            left, right = load_file(ours / file), load_file(theirs / file)
            assert left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)
    config = json.loads((theirs / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "killed" / "base")
    assert not {"model.safetensors", "config.json"} & {each.name for each in theirs.iterdir()}, "SFT made an adapter"


def test_exact_a_run_in_four_bits_samples_and_trains_with_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = {**LORA, "lora": {"rank": 4, "quantize": "nf4"}, "exact": True, "staleness": {"max_lag": 0}}
    result = small_run(tmp_path / "run", **settings)
    seen = read_metrics(result.folder / "metrics.jsonl")
    assert [each["train/mismatch_max"] for each in seen] == [0.0] * 3
    base, merged = tmp_path / "run" / "base", headrace.merge(result.folder, tmp_path / "merged")
    assert (logits(merged) - logits(str(result.checkpoint))).abs().max() < 1e-5
    further = small_run(tmp_path / "further", **settings, model={"path": str(result.checkpoint)})
    assert not (tmp_path / "further" / "base").exists()
    config = json.loads(Path(str(further.checkpoint), "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base), "the adapter belongs to the rounded model"
    small_run(tmp_path / "again", **settings, model={"path": str(base)})
    assert not (tmp_path / "again" / "base").exists(), "a rounded model needs no copy"


def test_a_run_of_a_model_of_the_users_keeps_no_copy(trained: RunResult, tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", **LORA | {"steps": 1}, model={"path": str(trained.folder / "base")})
    assert not (tmp_path / "run" / "base").exists()
    config = json.loads(Path(str(result.checkpoint), "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(trained.folder / "base")


def test_what_cannot_be_merged_is_said_in_one_line(
    trained: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def merge(model: str | Path, out: Path) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["merge", str(model), str(out)])
        assert caught.value.code == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "it is a whole model already" in merge(trained.folder / "base", out)
    assert "there is no such folder" in merge("no/such/run", out)
    lost = tmp_path / "lost"
    shutil.copytree(str(trained.checkpoint), lost)
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    assert str(tmp_path / "gone") in merge(lost, out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    assert "name a folder that is new or empty" in merge(trained.folder, out)
    assert [each.name for each in out.iterdir()] == ["mine"]
