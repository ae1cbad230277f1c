"""The trace: what it shows, and that neither it nor the kept rollouts ever take more disk than they may."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.observe import Observer, ProcessTimeline, read_rollouts
from headrace.observe.screen import PlainLines
from headrace.observe.timeline import BESIDE, Slice
from headrace.observe.trace import Trace
from headrace.records import Rollout
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

WEEK = 7 * 24 * 3600
ROW = {"reward": 0.5, "tokens_per_second": 1.0, "lag_mean": 0.0, "lag_max": 0}


def events(path: Path) -> list[dict[str, Any]]:
    """Read as Perfetto does: the closing bracket may be missing, and a comma may be left."""
    text = path.read_text().rstrip().rstrip(",")
    return json.loads(text if text.endswith("]") else text + "]")


def tracks(found: list[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M"}


def disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_trace_opens_while_it_is_written(tmp_path, clock) -> None:
    observer = Observer(tmp_path, trace=True)
    observer.start()
    timeline, began = observer.timeline("engine"), time.time()
    for state in ("decode", "swap", "decode"):
        timeline.enter(state)
        clock.sleep(0.002)
    with timeline.beside("receive 1"):
        clock.sleep(0.001)
    observer.version(1, ROW)
    found = events(tmp_path / "trace.json")
    shown = {event["name"]: (event["tid"], event["dur"]) for event in found if event["ph"] == "X"}
    assert shown == {"decode": (5, 2000), "swap": (5, 2000), "receive 1": (6, 1000)}
    assert tracks(found) == {5: "engine", 6: "engine: weights"}
    assert found[-1]["name"] == "version 1" and abs(found[-1]["ts"] / 1e6 - began) < 60
    observer.close()
    assert [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())][-2:] == ["decode", "end"]


def test_slices_are_named_by_the_work_in_them_and_waits_are_gaps(tmp_path) -> None:
    trace = Trace(tmp_path / "trace.json", max_bytes=1 << 20)
    trace.show("engine-3", Slice(0.0, 3.0, {"wait-gate": 2.0, "decode": 0.8, "prefill": 0.2}))
    trace.show("engine-3", Slice(3.0, 6.0, {"wait-gate": 2.99, "decode": 0.01}))
    trace.show("engine-12", Slice(0.0, 3.0, {"decode": 2.99, "descheduled": 0.01}))
    trace.close()
    found = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert [(event["tid"], event["name"], event["dur"]) for event in found] == [(11, "decode", 3e6), (29, "decode", 3e6)]
    assert found[0]["args"] == {"wait-gate": 2.0, "decode": 0.8, "prefill": 0.2} and "args" not in found[1]


def trace_of_an_ended_run(folder: Path, end: str) -> Path:
    path = folder / "trace.json"
    first = Trace(path, max_bytes=1 << 20)
    first.show("engine-1", Slice(0.0, 1.0, {"decode": 1.0}))
    first.write(1, {})
    if end == "closed":
        first.close()
    elif end == "torn":
        with path.open("a") as file:
            file.write('{"pid":1,"name":"thread_name","ph":"M","tid":9,"args":{"name":"engi"}')
    elif end == "empty":
        path.write_text("")
    return path


@pytest.mark.parametrize("end", ["closed", "killed", "torn", "empty"])
def test_a_resumed_run_appends(tmp_path, end) -> None:
    path = trace_of_an_ended_run(tmp_path, end)
    again = Trace(path, max_bytes=1 << 20)
    again.show("engine-0", Slice(1.0, 2.0, {"decode": 1.0}))
    again.show("engine-1", Slice(1.0, 2.0, {"swap": 1.0}))
    again.close()
    found = json.loads(path.read_text())
    slices = [(tracks(found)[event["tid"]], event["name"]) for event in found if event["ph"] == "X"]
    before = [] if end == "empty" else [("engine-1", "decode")]
    assert slices == [*before, ("engine-0", "decode"), ("engine-1", "swap")], "each engine keeps its track"


@pytest.mark.parametrize("end", ["closed", "killed", "torn"])
def test_a_resumed_run_may_begin_with_another_part(tmp_path, end) -> None:
    """What is appended first does not fit."""
    path = trace_of_an_ended_run(tmp_path, end)
    again = Trace(path, max_bytes=2 * path.stat().st_size)
    again.show("engine-1", Slice(1.0, 2.0, {"swap": 1.0}))
    again.close()
    parts = [json.loads((tmp_path / name).read_text()) for name in ("trace-1.json", "trace.json")]
    slices = [[event["name"] for event in part if event["ph"] == "X"] for part in parts]
    assert slices == [["decode"], ["swap"]] and [tracks(part) for part in parts] == 2 * [{7: "engine-1"}]


def test_each_process_and_each_of_its_lanes_has_a_track_of_its_own(tmp_path) -> None:
    trace = Trace(tmp_path / "trace.json", max_bytes=1 << 20)
    works = ["compute", BESIDE + "publish 1", BESIDE + "save 1"]
    for role, num_lanes in {"scorer": 1, "engine": 2, "trainer": 3}.items():
        for track in ["scorer"] if role == "scorer" else [f"{role}-{index}" for index in range(8)]:
            for work in works[:num_lanes]:
                trace.show(track, Slice(0.0, 1.0, {work: 1.0}))
    trace.show("engine-lent", Slice(0.0, 1.0, {"decode": 1.0}))
    trace.close()
    named = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["name"] == "thread_name"]
    assert len(named) == len({event["args"]["name"] for event in named}) == len({event["tid"] for event in named}) == 42


def test_checkpoints_have_a_track_apart_from_weights(tmp_path) -> None:
    """They overlap, and Perfetto drops a slice that begins inside another of its track and ends after it."""
    trace = Trace(tmp_path / "trace.json", max_bytes=1 << 20)
    trace.show("trainer", Slice(0.0, 2.0, {"train": 2.0}))
    trace.show("scorer", Slice(0.0, 2.0, {"score": 2.0}))
    for what, start, stop in (("send 1", 0.0, 2.0), ("checkpoint 1", 1.0, 5.0), ("save 1", 1.5, 4.0), ("release", 4.5, 6.0)):
        trace.show("trainer", Slice(start, stop, {BESIDE + what: stop - start}))
    trace.show("engine-0", Slice(0.0, 2.0, {BESIDE + "receive 1": 2.0}))
    trace.close()
    found = json.loads((tmp_path / "trace.json").read_text())
    names = [event["args"]["name"] for event in found if event["ph"] == "M"]
    assert len(names) == len(tracks(found)), "no two share a number"
    shown = {event["name"]: tracks(found)[event["tid"]] for event in found if event["ph"] == "X"}
    assert shown == {
        **{"train": "trainer", "score": "scorer", "receive 1": "engine-0: weights"},
        **{"send 1": "trainer: weights", "release": "trainer: weights"},
        **{"checkpoint 1": "trainer: checkpoints", "save 1": "trainer: checkpoints"},
    }


# A week


@pytest.mark.parametrize("spans", [(0.030,), (0.0004,), (0.020, 0.010), (0.5, 0.5), (20.0, 0.01)])
def test_however_often_states_change_slices_are_few_and_lose_no_time(clock, spans) -> None:
    """Decode steps with a moment between them, prefill and decode in turn, a wait between short calls."""
    timeline, began, steps = ProcessTimeline("engine"), clock.now, 30_000
    slices: list[Slice] = []
    states = ("decode", "prefill") if len(spans) > 1 else ("decode",)
    for number in range(steps // len(spans)):
        for state, seconds in zip(states, spans, strict=True):
            timeline.enter(state)
            clock.sleep(seconds)
            timeline.enter("descheduled")
            clock.sleep(0.00002)
        if number % 1000 == 0:
            slices += timeline.report()["slices"]
    timeline.end()
    slices += timeline.report()["slices"]
    passed = clock.now - began
    assert len(slices) <= 10_000 + passed / 3 + 2
    assert sum(sum(piece.seconds.values()) for piece in slices) == pytest.approx(passed)
    assert max(piece.stop - piece.start for piece in slices) < 3.0 + max(spans) + 0.01


@pytest.mark.parametrize("cap", [5_000_000, 1_000_000])
def test_a_week_at_64_engines_stays_under_the_cap(tmp_path, cap) -> None:
    """Each slice stands for 400 of 3 s (docs/observing.md): 5 MB stand for 2 GB, which hold the whole week."""
    trace, every, most = Trace(tmp_path / "trace.json", max_bytes=cap), 1200.0, 0
    for slot in range(int(WEEK / every)):
        start = slot * every
        for number in range(64):
            seconds = {"decode": 1044.92, "prefill": 138.24, "swap": 16.84}
            trace.show(f"engine-{number}", Slice(start, start + every, seconds))
        if slot % 5 == 0:
            trace.write(slot, {})
            most = max(most, disk(tmp_path))
    trace.close()
    assert max(most, disk(tmp_path)) <= cap
    parts = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [part.name for part in parts] == ["trace-1.json", "trace.json"]
    found = [json.loads(part.read_text()) for part in parts]
    starts = [event["ts"] for part in found for event in part if event["ph"] == "X"]
    assert all(len(tracks(part)) == 64 for part in found), "each part names its tracks"
    assert starts == sorted(starts) and len(starts) / 64 == (starts[-1] - starts[0]) / 1e6 / every + 1, "there is no gap"
    covered = (starts[-1] - starts[0]) / 1e6 + every
    assert covered == pytest.approx(WEEK) if cap == 5_000_000 else 0.1 * WEEK < covered < 0.3 * WEEK


# Kept rollouts


def rollouts(count: int, *, length: int) -> list[Rollout]:
    return [Rollout.from_prompt(np.zeros(length, dtype=np.int32), id=f"r{number}") for number in range(count)]


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / "rollouts").iterdir())


def test_of_kept_rollouts_the_oldest_go_first(tmp_path) -> None:
    observer, most = Observer(tmp_path, max_gb=0.001), 0
    written = os.path.getsize(observer.keep_rollouts(1, rollouts(4, length=5000)))
    for version in range(2, 30):
        observer.keep_rollouts(version, rollouts(4, length=5000))
        most = max(most, disk(tmp_path / "rollouts"))
    fit = 1_000_000 // written
    assert fit >= 2 and most == fit * written <= 1_000_000 and kept(tmp_path) == list(range(30 - fit, 30))
    observer.keep_rollouts(29, rollouts(4, length=5000))
    assert kept(tmp_path) == list(range(30 - fit, 30)), "one that is written again takes no room twice"
    with pytest.raises(ConfigError, match=rf"removed by observe\.max_gb; there are {30 - fit} to 29"):
        read_rollouts(tmp_path, 1)


def test_a_version_larger_than_the_cap_is_kept_in_part(tmp_path, capsys) -> None:
    observer = Observer(tmp_path, max_gb=0.001, screen=PlainLines(steps=9))
    for version in (1, 2):
        observer.keep_rollouts(version, rollouts(40, length=5000))
        assert disk(tmp_path / "rollouts") <= 1_000_000
    assert kept(tmp_path) == [2] and 5 < len(read_rollouts(tmp_path)[1]) < 40
    assert "of 40 rollouts of step 2 are kept: observe.max_gb = 0.001" in capsys.readouterr().out


def test_rollouts_are_kept_from_many_threads_at_once(tmp_path) -> None:
    observer = Observer(tmp_path, max_gb=0.001)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda version: observer.keep_rollouts(version, rollouts(4, length=5000)), range(20)))
    assert disk(tmp_path / "rollouts") <= 1_000_000
