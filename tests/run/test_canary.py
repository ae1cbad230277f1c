"""An engine that does not hold what it says it holds: the receipt was right, and yet it computes something else."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import small_run, weights

from headrace.engine.native.engine import NativeEngine
from headrace.model.weights import named_tensors
from headrace.observe.sinks import read_metrics
from headrace.run.publishing import CanaryError


def spoil(monkeypatch, *, at: int, by: float) -> None:
    """One tensor of the engine's is off after the exchange of one version, as by a faulty kernel or a stale cache."""
    swap = NativeEngine._swap

    def swapped(self, update, interrupt) -> None:
        swap(self, update, interrupt)
        if update.version == at:
            with torch.no_grad():
                next(tensor for _, tensor in named_tensors(self.core.model) if tensor.ndim == 2).mul_(by)

    monkeypatch.setattr(NativeEngine, "_swap", swapped)


def test_engine_and_trainer_that_differ_stop_the_run(tmp_path, monkeypatch):
    spoil(monkeypatch, at=3, by=1.5)
    with pytest.raises(CanaryError, match=r"version 3: engine and trainer differ by .* more than 0\.01 \(sync\.canary_limit\)"):
        small_run(tmp_path / "run", held_out=None)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["version"] == 3
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3], "it was trained, whatever came of it then"
    assert weights(tmp_path / "run" / "checkpoints" / "step-3"), "what was trained is whole and kept"


def test_weights_that_are_not_numbers_are_a_difference(tmp_path, monkeypatch):
    spoil(monkeypatch, at=0, by=float("nan"))
    with pytest.raises(CanaryError, match="version 0"):
        small_run(tmp_path / "run", held_out=None)


def test_the_limit_is_the_users_and_the_difference_is_in_the_metrics(tmp_path, monkeypatch):
    spoil(monkeypatch, at=3, by=1.5)
    small_run(tmp_path / "loose", held_out=None, sync={"canary_limit": 10.0})
    seen = {row["version"]: row["canary"] for row in read_metrics(tmp_path / "loose" / "metrics.jsonl")}
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    assert 0.01 < seen.pop(3) < 10 and max(seen.values()) < 1e-4, "it is the one version that differs"
    spoil(monkeypatch, at=2, by=1.00001)
    with pytest.raises(CanaryError, match=r"version 2: .* more than 1e-07"):
        small_run(tmp_path / "strict", held_out=None, sync={"canary_limit": 1e-7}, exact=True, staleness={"max_lag": 1})
