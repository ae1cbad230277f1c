"""Runs whose engines and trainer have processes of their own: the same promises, and those that only they can keep."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import mismatches, run_on_a_full_disk, same_weights, small_run

from headrace.config import make_recipe
from headrace.launch import process
from headrace.launch.inputs import UserInputs
from headrace.launch.local import LocalProcesses
from headrace.launch.process import Place, RoleFailed, RoleProcess
from headrace.launch.stop import sigterm_as_interrupt
from headrace.model.load import ModelError
from headrace.observe import Observer
from headrace.observe.inspect import read_rollouts
from headrace.observe.sinks import read_metrics
from headrace.observe.timeline import STATES
from headrace.rpc import RemoteError
from headrace.sync import Lineage
from headrace.sync.transport import shared_folder
from headrace.trainer.remote import RemoteTrainer


def local_run(folder: Path, **changes):
    return small_run(folder, orchestrate="local", **changes)


def children() -> list[str]:
    """Processes this one has started and not yet seen the end of."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append((path.parent / "cmdline").read_text().replace("\0", " "))
    return [command for command in found if "headrace.launch.child" in command]


def leftovers() -> list[Path]:
    name = f"headrace-{os.getpid()}-*"
    return [*shared_folder().glob(name), *Path(tempfile.gettempdir()).glob(name)]


def test_a_run_leaves_what_the_design_says_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise RuntimeError('modules of the working directory do not stand in for a library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    result = local_run(tmp_path / "run", observe={"keep_rollouts_every": 1})
    folder, summary = result.folder, result.summary
    assert summary["status"] == "finished" and summary["version"] == 6 and summary["accounting"]["trained"] == 96
    assert not children() and not leftovers()
    assert {path.name for path in (folder / "logs").iterdir()} == {"launcher.log", "engine-0.log", "trainer.log"}
    for shares in summary["time_budget"].values():
        assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    assert summary["time_budget"]["engine"]["decode"] > 0 and summary["time_budget"]["trainer"]["compute"] > 0
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(0 < row["canary"] < 1e-5 or row["canary"] == 0 for row in rows)
    assert max(mismatches(rows)) < 1e-4
    for role, name in (("trainer", "train/memory_peak"), ("engine", "engine/memory_peak")):
        memory = summary["memory"][role]
        assert rows[0][name] <= rows[-1][name] <= memory["peak"], "a peak only rises"
        assert 0.7 * memory["predicted"] <= memory["peak"] <= memory["predicted"], role
    seconds = {role: sum(row[f"seconds/{role}/{state}"] for row in rows for state in STATES[role]) for role in STATES}
    assert seconds["engine"] == pytest.approx(seconds["trainer"], rel=0.1)
    events = json.loads((folder / "trace.json").read_text())
    assert {event["name"] for event in events} >= {"decode", "compute", "version 6"}
    _, rollouts = read_rollouts(folder)
    assert all(rollout.calls[0].engine == "engine-0" and rollout.reward is not None for rollout in rollouts)


@pytest.mark.long  # `make test` compares a run whose weights travel as deltas, below
@pytest.mark.parametrize("more", [{}, {"filter": {"max_tied": 0.25}, "sampler": {"kind": "learnable"}}])
def test_at_lag_0_in_exact_mode_it_is_bitwise_the_run_in_one_process(tmp_path, more):
    settings = {"exact": True, "staleness": {"max_lag": 0}, "steps": 5, "checkpoint": {"every": 2, "keep": 10}, **more}
    inline = small_run(tmp_path / "inline", **settings)
    local = local_run(tmp_path / "local", **settings)
    for version in (2, 4, 5):
        ours, theirs = (run.folder / "checkpoints" / f"step-{version}" for run in (local, inline))
        assert same_weights(ours, theirs), version
    assert local.summary["accounting"] == inline.summary["accounting"]
    assert local.summary["lag"] == {"mean": 0.0, "max": 0}


def test_an_interrupt_while_a_process_starts_leaves_none(tmp_path, monkeypatch):
    """It comes when the process is there and nobody knows of it yet."""
    started = []

    def start(*given: str, **how: object):
        started.append(process_start(*given, **how))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    process_start = process.start_helper
    monkeypatch.setattr(process, "start_helper", start)
    (tmp_path / "logs").mkdir()
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), LocalProcesses(make_recipe({}), tmp_path):
        pass
    assert started and all(each.poll() == -signal.SIGKILL for each in started)


def test_an_interrupted_run_kills_its_processes_before_its_event_loop_ends(tmp_path, tiny_model, monkeypatch):
    """The event loop may yet wait for a thread that writes a checkpoint."""
    (tmp_path / "logs").mkdir()
    done: list[str] = []
    processes = LocalProcesses(make_recipe({}), tmp_path)
    handle = SimpleNamespace(kill=lambda: done.append("kill"), wait=lambda: done.append("wait"))
    processes._started = [SimpleNamespace(handle=handle)]

    async def connect_all(*_: object) -> None: ...

    monkeypatch.setattr(processes, "_connect_all", connect_all)

    async def main() -> None:
        begun = asyncio.Event()

        async def train() -> None:
            async with processes.roles(tiny_model, UserInputs(), observer=Observer(tmp_path), lineage=Lineage.new()):
                begun.set()
                await asyncio.Event().wait()

        training = asyncio.ensure_future(train())
        await begun.wait()
        training.cancel()
        await asyncio.wait({training})
        assert training.cancelled() and done == ["kill", "wait"]

    asyncio.run(asyncio.wait_for(main(), 60))


SLOW_LOSS = """
import time
from headrace.algorithms.losses import grpo

def slow(tokens, **constants):
    time.sleep(0.3)
    return grpo(tokens, **constants)

def broken(tokens):
    raise ArithmeticError("a loss of the user's")
"""


@pytest.mark.parametrize("lag", [1, pytest.param(3, marks=pytest.mark.long)])
def test_lag_is_what_the_gate_promises(tmp_path, lag):
    """A trainer much slower than the engine: every batch was submitted as early as the gate let it, so version v trains on
    tokens of version v - lag, but for the first, of which there were none so old, and where this machine stalled."""
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    steps = 8
    run = local_run(
        tmp_path / "run",
        steps=steps,
        held_out=None,
        staleness={"max_lag": lag},
        train={"loss": f"{tmp_path / 'slow_loss.py'}:slow"},
        engine={"slots": 16},
    )
    expected = [min(version, lag) for version in range(steps)]
    rows = read_metrics(run.folder / "metrics.jsonl")
    lags = [row["lag_max"] for row in rows]
    assert all(map(int.__le__, lags, expected)) and sum(map(int.__eq__, lags, expected)) >= steps - 2, lags
    assert run.summary["lag"]["max"] == lag
    assert run.summary["lag"]["mean"] == pytest.approx(np.mean(expected), abs=0.35)
    assert run.summary["accounting"]["rejected"] == 0


@pytest.mark.long
def test_long_rollouts_live_across_versions(tmp_path):
    run = local_run(
        tmp_path / "run",
        steps=12,
        held_out=None,
        model={"context": 512},
        sampling={"max_tokens": 400, "min_tokens": 400},
        staleness={"max_lag": 12},
        train={"batch": 4, "group_size": 2},
        engine={"slots": 4},
        observe={"keep_rollouts_every": 1},
    )
    spans = []
    for version in range(1, 13):
        _, rollouts = read_rollouts(run.folder, step=version)
        for rollout in rollouts:
            versions = rollout.versions[rollout.is_sampled]
            assert (np.diff(versions) >= 0).all() and len(rollout.calls) == 1
            spans.append(len(set(versions.tolist())))
    assert max(spans) >= 2, "no rollout saw two versions"


@pytest.mark.long
def test_two_engines_share_the_work(tmp_path):
    run = local_run(tmp_path / "run", engine={"slots": 4, "count": 2}, observe={"keep_rollouts_every": 1}, held_out=None)
    engines = {call.engine for step in range(1, 7) for r in read_rollouts(run.folder, step=step)[1] for call in r.calls}
    assert engines == {"engine-0", "engine-1"}
    assert run.summary["accounting"]["trained"] == 96


def test_a_slow_reward_stops_neither_generation_nor_training(tmp_path):
    """Each call of the reward holds its thread for half a second while the engine must go on drawing for groups further on."""
    moments: list[float] = []

    def slow(prompts, completions, **_):
        moments.append(time.monotonic())
        time.sleep(0.5)
        return [float(len(completion)) for completion in completions]

    long = {"engine": {"slots": 2}, "sampling": {"min_tokens": 32, "max_tokens": 32}, "model": {"context": 128}}
    settings = {"steps": 4, "held_out": None, "staleness": {"max_lag": 4}, "train": {"batch": 8}, **long}
    run = local_run(tmp_path / "run", reward=slow, **settings)
    assert run.summary["accounting"]["trained"] == 32 and run.summary["accounting"]["failed"] == 0
    events = json.loads((run.folder / "trace.json").read_text())
    origin = time.time() - time.monotonic()
    busy = [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events if event["name"] in ("decode", "prefill")
    ]
    during = [
        (start, stop) for start, stop in busy for moment in moments if moment + origin + 0.01 < start < moment + origin + 0.49
    ]
    assert during, "the engine stood still while the reward was computed"


def test_what_fails_in_a_process_is_named_with_its_cause_and_log(tmp_path, monkeypatch):
    """The process finds what the launcher finds, also in a folder that PYTHONPATH cannot name."""
    place = tmp_path / "at 12:30"
    place.mkdir()
    (place / "broken_loss.py").write_text(SLOW_LOSS)
    monkeypatch.setattr("sys.path", [*sys.path, str(place)])
    with pytest.raises(RoleFailed) as failed:
        local_run(tmp_path / "run", train={"loss": "broken_loss:broken"}, held_out=None)
    text = str(failed.value)
    assert "trainer failed: ArithmeticError: a loss of the user's" in text
    assert "broken_loss.py" in text and "broken" in text and str(tmp_path / "run" / "logs" / "trainer.log") in text
    assert not children() and not leftovers()


def test_a_model_that_cannot_be_loaded_is_the_same_error_as_in_one_process(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty"):
        local_run(tmp_path / "run", model={"path": str(tmp_path / "empty")})
    assert not children() and not leftovers()


@pytest.mark.long
def test_a_full_disk_loses_nothing(tiny_disk, cache_folder):
    """It is the trainer's process that meets it, and its log lies there too."""
    error = run_on_a_full_disk(local_run, tiny_disk, cache_folder)
    rescued = str(error).partition("it is in ")[2].partition(",")[0]
    assert any(f"resumes from version {rescued.rpartition('-')[2]}" in note for note in error.__notes__)
    assert not children() and not leftovers()


@pytest.mark.parametrize("kind", ["OSError", "PermissionError", "SafetensorError", "ValueError"])
def test_what_the_disk_refuses_there_is_the_same_error_here(tmp_path, kind):
    """Whoever keeps checkpoints rescues what the disk refuses, whichever process met it; anything else is the process's."""

    async def main() -> None:
        def begin(*_, **__):
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(RemoteError(kind=kind, message="[Errno 13] not here"))
            return answer

        placement = SimpleNamespace(log=tmp_path / "trainer.log")
        process = RoleProcess(Place("trainer", "trainer"), handle=SimpleNamespace(), placement=placement)
        process.streams["control"] = SimpleNamespace(begin=begin)
        await RemoteTrainer([process], deadline=30).save(tmp_path)

    with pytest.raises(RoleFailed if kind == "ValueError" else OSError, match="not here"):
        asyncio.run(main())


def test_shared_memory_too_small_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("headrace.sync.transport.shutil.disk_usage", lambda _: usage)
    with pytest.raises(RuntimeError, match=r"0 MB free.*remount,size=.*sync\.folder"):
        local_run(tmp_path / "run")
    assert not children() and not leftovers()


@pytest.mark.long
def test_corrections_over_several_steps_a_version(tmp_path):
    """The version ahead waits for the trainer's forward passes while this one is settled: its groups are in the books."""
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    run = local_run(
        tmp_path / "run",
        steps=5,
        held_out=None,
        staleness={"correct": "tis", "max_lag": 2},
        train={"mini_batches": 2, "loss": f"{tmp_path / 'slow_loss.py'}:slow"},
    )
    assert run.summary["accounting"]["trained"] == 80


@pytest.mark.long
def test_what_is_trained_when_something_else_fails_is_kept(tmp_path):
    """A reward breaks while the trainer is at work: what it was asked for is trained, saved, and not trained again."""
    (tmp_path / "slow_loss.py").write_text(SLOW_LOSS)
    calls = 0

    def breaks(prompts, completions, **_):
        nonlocal calls
        calls += 1
        if calls > 24:
            return [1.0]  # the wrong number of values: no retry can mend that
        return [float(len(completion)) for completion in completions]

    settings = {
        "steps": 20,
        "held_out": None,
        "staleness": {"max_lag": 3},
        "checkpoint": {"every": 100},
        "train": {"loss": f"{tmp_path / 'slow_loss.py'}:slow", "batch": 8},
    }
    with pytest.raises(ValueError, match="1 values for"):
        local_run(tmp_path / "run", reward=breaks, **settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["version"] >= 1 and summary["accounting"]["trained"] == 8 * summary["version"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['version']}" / "config.json").exists()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, summary["version"] + 1))
    assert not children() and not leftovers()


# Weights on their way


AT_LAG_0 = {"exact": True, "staleness": {"max_lag": 0}, "steps": 3, "checkpoint": {"every": 3}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("reference") / "inline", **AT_LAG_0)


@pytest.mark.parametrize(
    ("transport", "payload"),
    [
        ("shared_memory", "delta"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("files", "full"), ("http", "delta"), ("collective", "full"))
        ),
    ],
)
def test_every_transport_trains_the_same_weights(tmp_path, reference, transport, payload):
    """At lag 0 the result depends on nothing but the recipe: what engines held was what was trained."""
    sync = {"transport": transport, "payload": payload, "deadline": 20.0}
    local = local_run(tmp_path / "local", sync=sync, engine={"slots": 8, "count": 2}, **AT_LAG_0)
    ours, theirs = (run.folder / "checkpoints" / "step-3" for run in (local, reference))
    assert same_weights(ours, theirs)
    assert local.summary["accounting"] == reference.summary["accounting"]
    assert local.summary["lag"] == {"mean": 0.0, "max": 0}
    assert not children() and not leftovers()
    names = [event["name"] for event in json.loads((local.folder / "trace.json").read_text())]
    assert "offer 3" in names and names.count("receive 3") == 2, "the trace shows what happens beside the steps"
    last = read_metrics(local.folder / "metrics.jsonl")[-1]
    assert {"held/engine-0", "held/engine-1"} <= last.keys() and last["failed_syncs"] == 0
    assert last["sync_full_bytes"] > 0 and (last["sync_bytes"] < last["sync_full_bytes"]) == (payload == "delta")
