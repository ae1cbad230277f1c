"""Whole small runs of a model with experts, whose routing the engine records and the trainer replays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from families import make
from helpers import books_close, mismatches, small_run

from headrace.engine.native.core import EngineCore
from headrace.model.tiny import build_tokenizer
from headrace.observe.sinks import read_metrics
from headrace.records import unknown_expert

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.records import Array

SETTINGS: dict[str, Any] = {
    "engine": {"record_routing": True},
    "sampling": {"top_p": 0.9},
    "staleness": {"max_lag": 0},  # every rollout is trained by the weights that sampled it
    "steps": 3,
    "held_out": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("moe")
    sizes: dict[str, Any] = {"vocab_size": len(build_tokenizer()), "num_hidden_layers": 2, "max_position_embeddings": 32}
    make("qwen3_moe", **sizes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return {"path": str(folder)}


@pytest.mark.parametrize("orchestrate", ["inline", pytest.param("local", marks=pytest.mark.long)])
def test_a_run_replays_the_experts_and_the_distribution_that_were_sampled_from(
    tmp_path: Path, model: dict[str, str], orchestrate: str
) -> None:
    run = small_run(tmp_path / "run", model=model, orchestrate=orchestrate, **SETTINGS)
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert books_close(run.summary) and run.summary["version"] == len(rows) == len(mismatches(rows)) == 3
    assert [row["train/routing_differs"] for row in rows] == [0, 0, 0]
    assert all(row["train/ratio"] == pytest.approx(1, abs=1e-4) for row in rows) and max(mismatches(rows)) < 1e-4


def test_a_run_follows_the_record_wherever_it_leads(
    tmp_path: Path, model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run above: were the record ignored, this one would agree with the engine as well."""
    routing = EngineCore._routing

    def shifted(core: EngineCore, *given: Any) -> Array | None:
        recorded = routing(core, *given)
        assert recorded is not None
        is_known = recorded != unknown_expert(recorded.dtype)
        recorded[is_known] = (recorded[is_known] + 1) % 4
        return recorded

    monkeypatch.setattr(EngineCore, "_routing", shifted)
    run = small_run(tmp_path / "run", model=model, **SETTINGS)
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert books_close(run.summary) and len(rows) == 3
    assert all(row["train/routing_differs"] > 0.3 for row in rows) and min(mismatches(rows)) > 0.1
