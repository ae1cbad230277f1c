"""Experts that a real vLLM server recorded, forced in the trainer's forward pass."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

import headrace
from headrace.bench.loads import model_shape, write_random_model
from headrace.engine import find_vllm
from headrace.observe import read_metrics
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
SHAPE = model_shape("qwen3_moe", 512, 256, 512, 4, 4, 2, 64, 2048) | EXPERTS
TASKS = [{"prompt": f"w{number} w{number + 1} w{3 * number}"} for number in range(64)]


def starts_with_even(completions: list[str], **_: object) -> list[float]:
    return [float(text.partition(" ")[0].removeprefix("w")[-1:] in tuple("02468")) for text in completions]


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("HEADRACE_VLLM_PYTHON") or sys.executable
    try:
        find_vllm(found)
    except ConfigError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.long
def test_what_a_server_recorded_is_replayed_and_brings_the_logprobs_closer(tmp_path: Path, python: str) -> None:
    model, seen = write_random_model(SHAPE, tmp_path / "model", dtype="bfloat16"), {}
    server = {"python": python, "handover": "folder"}  # for ipc vLLM 0.26 imports ray
    for is_recorded in (True, False):
        settings: dict[str, Any] = {
            "model": {"path": model, "dtype": "bfloat16", "context": 128},
            "engine": {"kind": "vllm", "record_routing": is_recorded, "slots": 64, "vllm": server},
            "sampling": {"max_tokens": 64},
            "staleness": {"max_lag": 0},
            "train": {"batch": 64, "group_size": 8, "learning_rate": 1e-5},
            "deadline": 400.0,
        }
        run = headrace.train(
            tasks=TASKS, reward=starts_with_even, steps=3, run_dir=tmp_path / str(is_recorded), quiet=True, **settings
        )
        seen[is_recorded] = read_metrics(run.folder / "metrics.jsonl")
    found = {
        name: {is_recorded: [row.get(f"train/{name}") for row in rows] for is_recorded, rows in seen.items()}
        for name in ("mismatch", "mismatch_max", "routing_differs")
    }
    print(found)
    assert all(0 < share < 0.5 for share in found["routing_differs"][True]) and found["routing_differs"][False] == [None] * 3
    for replayed, free in zip(found["mismatch"][True], found["mismatch"][False], strict=True):
        assert replayed < 0.7 * free
