"""Every preset for a few versions: engine and trainer in processes of their own, which Ray starts if it does the library's."""

from __future__ import annotations

import json

import pytest
from helpers import books_close, small_run
from test_presets import NAMES
from watched import versions_of

from headrace.config import PRESETS
from headrace.engine import EnginePool
from headrace.observe.inspect import read_rollouts
from headrace.sync import resolve_transport

TAIL = {
    "model": {"context": 128},
    "sampling": {"max_tokens": 64},
    "engine": {"slots": 16},
    "train": {"batch": 8, "group_size": 2},
    "observe": {"keep_rollouts_every": 1},
    "held_out": None,
    "orchestrate": "local",
}


ON_RAY = [name for name in NAMES if "Ray" in PRESETS[name].orchestration]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_RAY or name == "slime"])
def test_a_preset_runs_in_processes_and_over_its_transport(name: str, tmp_path, monkeypatch) -> None:
    load, updates = EnginePool.load, []
    monkeypatch.setattr(EnginePool, "load", lambda self, update, **how: (updates.append(update), load(self, update, **how))[1])
    result = small_run(tmp_path / "run", preset=name, steps=4, **TAIL)
    assert result.summary["status"] == "finished" and result.summary["accounting"]["trained"] == 4 * 8
    given = {key: value for key, (value, _) in PRESETS[name].settings.items()}
    transport = resolve_transport(given["sync.transport"], is_one_process=False, shares_gpu=False)
    assert {part.transport for update in updates for part in update.parts} == {transport}
    deltas = [update for update in updates if update.base_version is not None]
    assert bool(deltas) == (given.get("sync.payload") == "delta"), "after the first, only what changed"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["failed_syncs"] == 0 for row in rows if "failed_syncs" in row)


@pytest.mark.long
@pytest.mark.parametrize("name", ON_RAY)
def test_a_preset_of_ray_runs_on_a_cluster_that_it_starts(name: str, tmp_path, monkeypatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    places = {"orchestrate": "ray", "cluster": {"listen": "127.0.0.1:0"}, "device": "cpu"}
    result = small_run(tmp_path / "run", preset=name, steps=2, **TAIL | places)
    assert result.summary["status"] == "finished" and books_close(result.summary)
    assert result.summary["accounting"]["trained"] == 2 * 8
    assert not ray.is_initialized(), "and ended"


@pytest.mark.long
def test_pipelinerl_never_waits_for_weights_in_processes(tmp_path) -> None:
    """The swap is between two decode steps, beside a trainer that goes on."""
    result = small_run(tmp_path / "run", preset="pipelinerl", steps=20, **TAIL)
    assert result.summary["time_budget"]["engine"]["wait-weights"] < 0.01
    rollouts = [rollout for step in range(1, 21) for rollout in read_rollouts(tmp_path / "run", step)[1]]
    spanning = [rollout for rollout in rollouts if len(versions_of(rollout)) > 1]
    assert spanning and all(len(rollout.calls) == 1 for rollout in spanning)
