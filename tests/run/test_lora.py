"""Whole small runs that train an adapter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from helpers import books_close, small_run
from safetensors.torch import load_file

from headrace.config import make_recipe
from headrace.engine.native.engine import NativeEngine
from headrace.model import Head, adapter_of, load_model, score
from headrace.observe.sinks import read_metrics
from headrace.partial import Interrupt
from headrace.records import Rollout
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.records import WeightUpdate

LORA = {"rank": 4, "alpha": 8.0}


def adapter(checkpoint: object) -> dict[str, torch.Tensor]:
    return load_file(f"{checkpoint}/adapter_model.safetensors")


def test_a_run_trains_the_adapter_alone(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", lora=LORA, train={"kl": 0.01}, staleness={"max_lag": 1})
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run.summary["version"] == 6 and any("train/reference_kl" in row for row in rows)
    assert all(row["canary"] < 1e-4 for row in rows if "canary" in row) and any("canary" in row for row in rows)
    trained = adapter(run.checkpoint)
    assert all(tensor.abs().max() > 0 for tensor in trained.values())
    assert not (tmp_path / "run" / "checkpoints" / "step-6" / "model.safetensors").exists()
    again = load_model(str(run.checkpoint))  # the base it names, with it
    assert again.config.hidden_size == 32


@pytest.mark.parametrize("timeout", [0.0, 60.0])
def test_an_inline_run_leases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """And releases every rollout: those trained, those evaluated, those cut off at the end."""
    swap, seen, engines = NativeEngine._swap, [], set[NativeEngine]()

    def swapped(self: NativeEngine, update: WeightUpdate, interrupt: Interrupt) -> None:
        seen.append(interrupt)
        engines.add(self)
        swap(self, update, interrupt)

    monkeypatch.setattr(NativeEngine, "_swap", swapped)
    how = {"staleness": {"max_lag": 1}, "partial": {"interrupt": "lease"}, "episode": {"timeout": timeout}}
    small_run(tmp_path / "run", lora=LORA, steps=2, **how)
    assert seen[1:] == [Interrupt.LEASE] * 2
    (engine,) = engines
    assert engine.core.scheduler._keeps_leases and not engine.core.scheduler.leases


@pytest.mark.parametrize(
    "transport", ["shared_memory", *(pytest.param(name, marks=pytest.mark.long) for name in ("files", "http", "collective"))]
)
def test_adapters_travel_between_processes(tmp_path: Path, transport: str) -> None:
    run = small_run(
        tmp_path / "run",
        lora=LORA,
        orchestrate="local",
        steps=3,
        held_out=None,
        sync={"transport": transport},
        partial={"interrupt": "lease"},
        staleness={"max_lag": 2},
        sampling={"max_tokens": 20},
        train={"learning_rate": 1e-2},
    )
    assert books_close(run.summary) and run.summary["version"] == 3
    rows, trained = read_metrics(run.folder / "metrics.jsonl"), adapter(run.checkpoint)
    assert {row["sync_bytes"] for row in rows} == {sum(tensor.nbytes for tensor in trained.values())}
    assert all(row["canary"] < 1e-4 for row in rows)
    model, rollout = load_model(str(run.checkpoint)), Rollout.from_prompt(range(6, 30), id="r")
    found = score(model, Head(model), [rollout], budget=64)[0]
    with adapter_of(model).off():
        base = score(model, Head(model), [rollout], budget=64)[0]
    assert np.abs(found - base).mean() > 1e-2, "an engine without the trained adapter would pass the canary too"


def test_what_does_not_go_with_an_adapter_is_refused() -> None:
    base = {"tasks": [{"source": "builtin:sort_digits"}], "lora": {"rank": 4}}
    for wrong, message in (
        ({"train": {"kl": 0.1, "reference_every": 2}}, "train.reference_every = 2: with \\[lora\\]"),
        ({"train": {"parameters": [{"match": "*", "freeze": False}]}}, "train.parameters: with \\[lora\\]"),
        ({"exact": True, "staleness": {"max_lag": 1}, "partial": {"interrupt": "lease"}}, "holds only the newest adapter"),
        ({"lora": {"rank": 0}, "partial": {"interrupt": "lease"}}, "partial.interrupt = 'lease'.*set lora.rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_recipe({**base, **wrong})


def test_an_adapters_folder_is_trained_further_only_as_an_adapter(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first", lora=LORA, held_out=None, steps=2)
    model = {"path": str(first.checkpoint)}
    with pytest.raises(ConfigError, match=r"it is an adapter; set lora\.rank"):
        small_run(tmp_path / "whole", model=model, held_out=None)
    second = small_run(tmp_path / "second", lora=LORA, model=model, held_out=None, steps=2)
    before, after = adapter(first.checkpoint), adapter(second.checkpoint)
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)
