"""Every benchmark whole, by its command: every part at a small size, two turns of each. Figures are not looked at, only that
they are there; a benchmark that nobody runs rots. That of vLLM is run in `test_bench_vllm.py`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from vllm_server import MISSING, VARIABLES, vllm_python

from headrace.bench import engine, lag, partial, step, trainer, vllm
from headrace.bench.command import BENCHES
from headrace.bench.overlap import CASES
from headrace.bench.partial import CHOICES

if TYPE_CHECKING:
    from pathlib import Path

Rows = dict[str, dict]
"""By name."""


def run_bench(folder: Path, name: str, *arguments: str, **variables: str) -> Rows:
    command = [sys.executable, "-m", "headrace.cli", "bench", name, "--quick", "--json", str(folder / "out.json"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert rows and all(math.isfinite(row["value"]) for row in rows)
    return {row["name"]: row for row in rows}


def test_every_benchmark_is_run_here_through_two_turns_at_least() -> None:
    assert {f"test_{name}" for name in BENCHES} - {"test_vllm"} <= globals().keys()
    for device in ("cpu", "cuda"):
        loads = trainer.make_plan(device, quick=True)
        plans = [engine.make_plan(device, quick=True), partial.make_plan(device, quick=True)]
        plans += [vllm.make_plan(device, quick=True, has_model=False), loads.speed, loads.long, loads.head, loads.mix]
        assert all(plan.turns >= 2 for plan in plans) and step.make_plan(device, quick=True).steps >= 2


@pytest.mark.long
def test_learn(tmp_path) -> None:
    assert {"seed 0: success after", "seed 1: success after"} <= run_bench(tmp_path, "learn").keys()
    rows = run_bench(tmp_path, "learn", "--losses", "gspo,algorithm=dapo", "--seeds", "1", "--steps", "4")
    assert {f"{name}, seed 0: success after" for name in ("gspo", "algorithm=dapo")} <= rows.keys()


@pytest.mark.long
def test_ranks(tmp_path) -> None:
    rows = run_bench(tmp_path, "ranks")
    assert rows["8 ranks, long tail: spread of predicted time"]["value"] < 0.05
    assert 0 < rows["sharded ÷ two trainers at once"]["value"] < 1.5
    assert all(0.8 < rows[f"float32, {ranks}: predicted ÷ real"]["value"] < 1.25 for ranks in ("1 rank", "2 ranks"))


@pytest.mark.long
def test_lag(tmp_path) -> None:
    rows = run_bench(tmp_path, "lag")
    assert all(len(rows[f"{way}, lag {each}: area"]["curve"]) == 3 for way in lag.WAYS for each in (0, 2))
    kl = "default, lag {}: KL to the policy that sampled"
    assert rows[kl.format(0)]["value"] < 1e-9 < rows[kl.format(2)]["value"]


@pytest.mark.long
def test_sparse(tmp_path) -> None:
    rows = run_bench(tmp_path, "sparse")
    tokens = rows["seed 0: sampled tokens"]
    assert tokens["peers"]["plain"] >= tokens["value"] > 0 and "plain" in rows["seed 0: success after"]["peers"]


@pytest.mark.long
def test_controller(tmp_path) -> None:
    assert run_bench(tmp_path, "controller")["controller per rollout"]["value"] > 0  # asserts that 10,000 were in flight


@pytest.mark.long
def test_overlap(tmp_path) -> None:
    rows = run_bench(tmp_path, "overlap")
    for case in CASES:
        kinds = ("async", "generation alone", "training alone", "sync, all cores in turn")
        assert all(rows[f"{case.name}: {kind}"]["value"] > 0 for kind in kinds)


@pytest.mark.long
def test_presets(tmp_path) -> None:
    rows = run_bench(tmp_path, "presets")
    for load in ("trainer-bound", "engine-bound", "long tail"):
        assert rows[f"{load}: share of the bound"]["value"] > rows[f"{load}: share of the bound"]["peers"]["trl"] > 0
        assert rows[f"{load}: mean lag"]["value"] > rows[f"{load}: mean lag"]["peers"]["trl"] == 0
    assert rows["quickstart: tokens/s"]["value"] > 0 and rows["quickstart: tokens/s"]["peers"].keys() == {"trl"}


@pytest.mark.long
def test_sync(tmp_path) -> None:
    rows = run_bench(tmp_path, "sync")
    for transport in ("shared_memory", "files", "http", "collective"):
        assert rows[f"{transport}, small: publish, receipts included"]["value"] > 0


@pytest.mark.long
def test_partial(tmp_path) -> None:
    rows = run_bench(tmp_path, "partial", "--device", "cpu")
    assert all(rows[f"{name}: trained"]["value"] > 0 for name in CHOICES)


@pytest.mark.long
def test_episodes(tmp_path) -> None:
    rows = run_bench(tmp_path, "episodes", "--slots", "4")
    assert rows["slots busy"]["value"] > rows["slots busy"]["peers"]["sync"] > 0
    assert rows["prompt tokens computed ÷ minimum"]["value"] == 1
    assert rows["async against TRL's tool loop"]["peers"]["TRL"] > 0


@pytest.mark.long
def test_engine(tmp_path) -> None:
    rows, plan = run_bench(tmp_path, "engine"), engine.make_plan("cpu", quick=True)
    assert rows[plan.tail.name]["peers"]["model.generate"] > 0 and f"{plan.tail.name} ÷ model.generate" in rows
    assert 0 < rows["mean |Δ logprob| against the trainer"]["value"] < 1e-5


@pytest.mark.long
def test_mismatch(tmp_path) -> None:
    rows = run_bench(tmp_path, "mismatch")
    kl = rows["moe: KL of engine and trainer"]
    assert 0 < kl["value"] < kl["peers"]["free"] and rows["dense: KL of engine and trainer"]["value"] > 0
    for kind in ("moe", "dense"):
        ratio = rows[f"{kind}, top-p 0.9: mean ratio"]
        assert abs(ratio["value"] - 1) < 0.005 and 0.85 < ratio["peers"]["no mask"] < 0.95
        differs = next(row for name, row in rows.items() if name.startswith(f"{kind} learning: mean |Δ logprob|"))["peers"]
        assert differs["top-p"] < 0.9 * differs["top-p, no mask"]


@pytest.mark.long
def test_moe(tmp_path) -> None:
    rows = run_bench(tmp_path, "moe")
    assert rows["4 × (16 + 16)"]["peers"]["dense"] > 0
    assert rows["512 tokens of 64: whole step"]["peers"].keys() == {"dense", "replayed"}


@pytest.mark.long
def test_lora(tmp_path) -> None:
    rows = run_bench(tmp_path, "lora")
    assert rows["bytes"]["value"] < rows["bytes"]["peers"]["base"]
    title = "shared_memory, adapter of Qwen3-0.6B"
    assert rows[f"{title}: bytes"]["value"] == pytest.approx(40.4e6, rel=0.01)
    assert rows[f"{title}: publish, receipts included"]["value"] > 0
    assert 0.1 < rows["8 versions ÷ base"]["value"] < rows["one adapter ÷ base"]["value"] < 3, "with one turn they vary"
    kl = {way: rows[f"version 1, {way}: KL against the trainer"]["value"] for way in ("live", "merged in bfloat16")}
    assert kl["live"] < 1e-9 < kl["merged in bfloat16"]
    assert rows["trainer in 4 bits: KL against the trainer"]["value"] < 1e-9


@pytest.mark.long
def test_trainer(tmp_path) -> None:
    names = " ".join(run_bench(tmp_path, "trainer"))
    assert all(part in names for part in ("forward and backward", "head, ", "long tail", "sharing, "))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["one length", "long tail", "vLLM"])
def test_step(tmp_path, kind) -> None:
    """Every variant, in three commands; TRL before the first of them."""
    python = vllm_python()
    if kind == "vLLM" and python is None:
        pytest.skip(MISSING)
    names = {
        "one length": ["trl", *(name for name, variant in step.variants().items() if variant.is_judged)],
        "long tail": [name for name, variant in step.variants().items() if variant.has_tail],
        "vLLM": ["in-turn-vLLM", "lag-1-vLLM"],
    }[kind]
    variables = {} if python is None else {**VARIABLES, "HEADRACE_VLLM_PYTHON": python}
    rows = run_bench(tmp_path, "step", "--only", ",".join(names), **variables)
    assert sum(name.endswith(": step") for name in rows) == len(names)
    assert any("completions ÷ TRL" in name for name in rows) == ("trl" in names)


@pytest.mark.long
def test_trl(tmp_path) -> None:
    rows = run_bench(tmp_path, "trl")
    for what in ("all steps", "success in the last 4 batches"):
        assert rows[f"seed 0: {what}"]["value"] > 0 and rows[f"seed 0: {what}"]["peers"]["TRL"] > 0
    for name in ("Headrace", "TRL"):
        assert len(rows[f"seed 0: reward of the last batch, {name}"]["curve"]) == 8


@pytest.mark.long
@pytest.mark.parametrize("lengths", step.LONG)
def test_step_of_long_completions(tmp_path, lengths) -> None:
    rows = run_bench(tmp_path, "step", "--lengths", lengths)
    for name in (f"in turn, {lengths}", f"lag 1, {lengths}"):
        for figure in ("step", "engine at work", "trainer at work, prompts included", "memory of the trainer, predicted"):
            assert rows[f"{name}: {figure}"]["value"] > 0
