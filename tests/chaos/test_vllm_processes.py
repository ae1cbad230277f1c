"""vLLM servers of a run killed with everything they hold. Each test starts the command a user starts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import pytest
import torch
from faults import RECIPE, Running, command_of, is_alive, start, wait_until
from helpers import mismatches, small_run
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from vllm_server import MISSING, VARIABLES, vllm_python

from headrace.config import make_recipe
from headrace.engine.kind import EnginePlace
from headrace.engine.vllm.open import open_engine
from headrace.lora import read_tensors
from headrace.model.load import load_tokenizer
from headrace.observe import Timeline
from headrace.observe.sinks import read_metrics
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync

pytestmark = [pytest.mark.long, pytest.mark.skipif(vllm_python() is None, reason=MISSING)]

VLLM = ("--engine.kind=vllm", "--steps=6")


def servers(run: Running) -> list[int]:
    """Every process of the run's servers, their keepers among them."""
    own = f"{run.folder.parent}"
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in everyone if "vllm.entrypoints.cli.main serve" in command_of(pid) and own in environment_of(pid)]


def environment_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def begin(tmp_path, monkeypatch):
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python(), "HEADRACE_TEST_RUN": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return lambda *overrides: start(tmp_path, *VLLM, *overrides)


def test_a_killed_server_is_started_again_and_the_run_loses_nothing(begin, tmp_path):
    """The model is the checkpoint of another run."""
    assert "[engine]" in RECIPE
    trained = small_run(tmp_path / "native", steps=2, model={"context": 512})
    run = begin(f"--model.path={trained.checkpoint}")
    run.wait_for_version(2)
    first = servers(run)
    assert len(first) == 2, "a keeper and a server"
    os.kill(max(first), signal.SIGKILL)
    output = run.finish()
    assert run.process.returncode == 0, output
    assert "engine-0 failed" in output and "started again (1 of 3)" in output and "engine-0.vllm.log" in output
    summary, rows = run.summary, read_metrics(run.folder / "metrics.jsonl")
    assert summary["status"] == "finished" and [row["version"] for row in rows] == list(range(1, 7))
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    assert wait_until(lambda: not servers(run)) and not any(map(is_alive, first)) and not run.leftovers()


def test_an_adapter_is_trained_by_rollouts_that_keep_the_version_they_began_with(begin):
    run = begin("--lora.rank=8", "--lora.alpha=16", "--partial.interrupt=lease", "--steps=4", "--train.learning_rate=1e-2")
    output = run.finish(seconds=300)
    assert run.process.returncode == 0, output
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert run.summary["status"] == "finished" and [row["version"] for row in rows] == [1, 2, 3, 4]
    assert max(mismatches(rows)) < 1e-4 and max(row["canary"] for row in rows) < 1e-4
    saved = read_tensors(max((run.folder / "checkpoints").glob("step-*")))
    assert all(tensor.abs().max() > 1e-3 for name, tensor in saved.items() if "lora_B" in name), "what was sampled taught it"
    assert sum(tensor.nbytes for tensor in saved.values()) == pytest.approx(rows[-1]["sync_bytes"], rel=0.1)
    assert wait_until(lambda: not servers(run)) and not run.leftovers()


def test_a_server_that_would_not_run_what_it_is_given_is_refused_and_ended(tmp_path, monkeypatch, tiny_model):
    """vLLM's CPU build loads the experts of a mixture well once, and never again."""
    for name, value in {**VARIABLES, "HEADRACE_VLLM_PYTHON": vllm_python()}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "experts"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    vocabulary = load_tokenizer(tiny_model).vocab_size + 8
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=vocabulary, **sizes, **heads)).save_pretrained(folder)
    recipe = make_recipe({"model.path": str(folder), "sampling.max_tokens": 16, "engine.kind": "vllm", "engine.slots": 4})
    paths = {"log": tmp_path / "server.log", "folder": tmp_path / "weights"}
    place = EnginePlace(name="engine-0", index=0, device="cpu", receives_on="cpu", **paths)
    sync = WeightSync(Lineage("life"), MemoryTransport())
    with pytest.raises(ConfigError, match=r"^engine.kind = 'vllm': vLLM 0.32.0\S* at \S+ computes something else"):
        asyncio.run(open_engine(recipe, str(folder), place, sync=sync, timeline=Timeline("engine")))
    assert not place.folder.exists()
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert not [pid for pid in everyone if f"serve {folder}" in command_of(pid)]


def test_a_killed_launcher_leaves_no_server(begin):
    run = begin("--steps=1000")
    run.wait_for_version(1)
    assert servers(run) and run.leftovers()
    run.process.kill()
    run.finish()
    assert wait_until(lambda: not servers(run)) and wait_until(lambda: not run.leftovers())
