"""Updates that fail on their way: the engines stay where they are, the version is sent again, and the run goes on."""

from __future__ import annotations

import pytest
from helpers import same_weights, small_run

from headrace.observe.observer import read_metrics
from headrace.sync import SyncError, WeightSync


def spoil(monkeypatch: pytest.MonkeyPatch, *, versions: dict[int, int]) -> list[tuple[int, str]]:
    """Have the bytes of these versions arrive changed, each as often as it says. What was received, in order."""
    receive, left, seen = WeightSync.receive, dict(versions), []

    def spoiled(sync: WeightSync, update: object, incoming: object) -> None:
        receive(sync, update, incoming)
        seen.append((update.version, update.payload.value))
        if left.get(update.version, 0):
            left[update.version] -= 1
            incoming.views["model.embed_tokens.weight"][2, 2] += 1

    monkeypatch.setattr(WeightSync, "receive", spoiled)
    return seen


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_a_version_that_is_refused_is_sent_again_whole_and_the_run_is_the_same(tmp_path, monkeypatch, payload):
    settings = {"exact": True, "staleness": {"max_lag": 0}, "steps": 4, "checkpoint": {"every": 4}}
    settings["sync"] = {"payload": payload}
    smooth = small_run(tmp_path / "smooth", **settings)
    seen = spoil(monkeypatch, versions={2: 1, 3: 2})
    rough = small_run(tmp_path / "rough", **settings)
    assert same_weights(rough.folder / "checkpoints" / "step-4", smooth.folder / "checkpoints" / "step-4")
    assert [version for version, _ in seen] == [0, 1, 2, 2, 3, 3, 3, 4]
    again = [kind for place, (version, kind) in enumerate(seen) if place and seen[place - 1][0] == version]
    assert again == ["full"] * 3, "a second attempt takes nothing for granted"
    assert [kind for _, kind in seen].count("delta") == (4 if payload == "delta" else 0)
    assert read_metrics(rough.folder / "metrics.jsonl")[-1]["failed_syncs"] == 3
    assert read_metrics(smooth.folder / "metrics.jsonl")[-1]["failed_syncs"] == 0


def test_a_version_that_never_arrives_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    spoil(monkeypatch, versions={2: 99})
    with pytest.raises(SyncError, match=r"version 2: tensor 'model\.embed_tokens\.weight' differs from what was sent"):
        small_run(tmp_path / "run", steps=4)
