"""One memory in turns: engines sleep while the trainer trains, and nothing else is different."""

from __future__ import annotations

import pytest
from helpers import same_weights, small_run

from headrace.engine.native.core import EngineCore
from headrace.observe.sinks import read_metrics
from headrace.trainer.trainer import DeviceTrainer

TURNS = {
    "exact": True,
    "staleness": {"max_lag": 0},
    "steps": 4,
    "checkpoint": {"every": 2, "keep": 10},
    "evaluate": {"every": 2},
}


@pytest.fixture(scope="module")
def awake(tmp_path_factory):
    """The same run with engines that never sleep."""
    return small_run(tmp_path_factory.mktemp("awake") / "run", **TURNS)


def watch(monkeypatch) -> list[str]:
    """What happens to the engine's memory, and what the trainer finds when it begins a pass."""
    seen: list[str] = []
    cores: list[EngineCore] = []
    sleep, wake, backward = EngineCore.sleep, EngineCore.wake, DeviceTrainer.forward_backward

    def slept(core, *, weights):
        sleep(core, weights=weights)
        cores[:] = [core]
        seen.append("sleeps, weights too" if weights else "sleeps")

    def woken(core):
        was_asleep = core.is_asleep
        wake(core)
        if was_asleep:
            seen.append("wakes")

    def trained(trainer, batch):
        held = cores[0].cache.memory.tensor.untyped_storage().size() if cores else -1
        seen.append(f"trains beside {held}")
        return backward(trainer, batch)

    monkeypatch.setattr(EngineCore, "sleep", slept)
    monkeypatch.setattr(EngineCore, "wake", woken)
    monkeypatch.setattr(DeviceTrainer, "forward_backward", trained)
    return seen


@pytest.mark.parametrize("sleep", ["cache", "weights"])
def test_the_engine_sleeps_while_the_trainer_trains_and_the_run_is_bitwise_the_same(tmp_path, monkeypatch, awake, sleep):
    seen = watch(monkeypatch)
    run = small_run(tmp_path / "run", engine={"sleep": sleep}, **TURNS)
    falls_asleep = "sleeps, weights too" if sleep == "weights" else "sleeps"
    assert seen == [falls_asleep, "trains beside 0", "wakes"] * 4
    for version in (2, 4):
        assert same_weights(run.folder / f"checkpoints/step-{version}", awake.folder / f"checkpoints/step-{version}")
    ours, theirs = (read_metrics(each.folder / "metrics.jsonl") for each in (run, awake))
    assert [row.get("success") for row in ours] == [row.get("success") for row in theirs]
    assert run.summary["accounting"] == awake.summary["accounting"]
    budget = run.summary["time_budget"]["engine"]
    assert budget["wait-weights"] > awake.summary["time_budget"]["engine"]["wait-weights"] and budget["swap"] > 0
    assert sum(budget.values()) == pytest.approx(1.0)


@pytest.mark.long
def test_engines_in_processes_of_their_own_sleep_too(tmp_path, awake):
    run = small_run(tmp_path / "run", orchestrate="local", engine={"sleep": "weights"}, **TURNS)
    assert same_weights(run.checkpoint, awake.checkpoint) and run.summary["accounting"] == awake.summary["accounting"]
    budget = run.summary["time_budget"]["engine"]
    assert budget["wait-weights"] > 0 and budget["swap"] > 0 and sum(budget.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("interrupt", ["retract", "abort"])
def test_what_is_in_flight_when_they_fall_asleep_goes_on(tmp_path, monkeypatch, interrupt):
    seen = watch(monkeypatch)
    partial = {"oversample": 2.0, "interrupt": interrupt}
    settings = {"staleness": {"max_lag": 1}, "buffer": {"kind": "synchronous"}, "partial": partial, "steps": 5}
    result = small_run(tmp_path / "run", engine={"sleep": "cache", "slots": 4}, held_out=None, **settings)
    counts = result.summary["accounting"]
    assert result.summary["status"] == "finished" and counts["trained"] == 5 * 16 and result.summary["lag"]["max"] == 1
    assert seen == ["sleeps", "trains beside 0", "wakes"] * 5
