"""Updates that fail on their way: the engines stay where they are, the version is sent again, and the run goes on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import same_weights, small_run

from headrace.config import make_recipe
from headrace.errors import SyncError
from headrace.observe import Observer
from headrace.observe.sinks import read_metrics
from headrace.run.publishing import make_canary, publish
from headrace.sync import WeightSync
from headrace.trainer import Published


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.run.publishing._PAUSES", (0.0, 0.0))


def spoil(monkeypatch: pytest.MonkeyPatch, *, versions: dict[int, int]) -> list[tuple[int, str]]:
    """Have the bytes of these versions arrive changed, each as often as it says. What was received, in order."""
    receive, left, seen = WeightSync.receive, dict(versions), []

    def spoiled(sync: WeightSync, update: object, incoming: object) -> None:
        receive(sync, update, incoming)
        seen.append((update.version, update.payload))
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


@pytest.mark.parametrize("num_refusals", [0, 2, 3])
def test_a_version_is_held_only_when_the_engines_have_loaded_and_scored_it(num_refusals):
    """The gate counts from `held_version`: opened before the engines hold the weights, it would let in what is too old."""
    held: list[int] = []

    class Engine:
        num_loads = 0

        async def load(self, update: Any, *, interrupt: Any) -> None:
            held.append(policy.held_version)
            await asyncio.sleep(0)
            held.append(policy.held_version)
            self.num_loads += 1
            if self.num_loads <= num_refusals:
                raise SyncError("differs from what was sent")

        async def score(self, rollouts: Any) -> list[Any]:
            held.append(policy.held_version)
            return [np.zeros(32, dtype=np.float32)]

    class Trainer:
        is_inline = False

        async def publish(self, version: int, *, canary: Any, whole: bool = False) -> Published:
            return Published(SimpleNamespace(version=version, parts=()), np.zeros(32, dtype=np.float32))

        async def nothing(self, *_: object) -> None:
            held.append(policy.held_version)

        abort = release = nothing

    async def nothing() -> None:
        held.append(policy.held_version)

    async def main() -> None:
        await publish(run, policy)
        await policy.publication

    policy = SimpleNamespace(
        trainer=Trainer(), version=7, held_version=6, canary=make_canary([1, 2, 3]), sync_metrics={"failed_syncs": 0},
        recipe=make_recipe({}),
    )  # fmt: skip
    run = SimpleNamespace(
        roles=SimpleNamespace(engine=Engine()), room=asyncio.Event(),
        spawn=lambda function, *given: asyncio.ensure_future(function(*given)), wake_engines=nothing, observer=Observer(),
    )  # fmt: skip
    if num_refusals < 3:
        asyncio.run(main())
    else:
        with pytest.raises(SyncError):
            asyncio.run(main())
    is_held = num_refusals < 3
    assert set(held) == {6} and policy.held_version == (7 if is_held else 6) and run.room.is_set() is is_held
