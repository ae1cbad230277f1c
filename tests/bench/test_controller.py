"""The benchmark of the controller: what it adds up, and that it measures a whole run."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.bench import controller
from headrace.bench.controller import PARTS, Clock, Cost, make_rows, measure
from headrace.bench.controller_stream import encoding_rows
from headrace.bench.harness import Row
from headrace.cli import main


def cost(total: float, stub: float, **parts: float) -> Cost:
    return Cost(rollouts=64, in_flight=32, total=total, stub=stub, parts={**dict.fromkeys(PARTS, 0.0), **parts})


def test_the_figure_is_the_median_less_the_stub_and_the_parts_come_to_it() -> None:
    totals = [cost(60, 10), cost(95, 5), cost(200, 20)]
    parts = [cost(0, 0, submit=10, score=30), cost(0, 0, submit=20, score=50), cost(0, 0, submit=99, score=31)]
    rows = {row.name: row.value for row in make_rows(totals, parts)}
    assert rows["controller per rollout"] == 90
    assert rows["least of the repetitions"] == 50
    assert rows["stub engine, not counted"] == 10
    claimed = {name.split()[2].rstrip(":"): value for name, value in rows.items() if name.startswith("of it ")}
    assert (claimed["submit"], claimed["score"], claimed["collect"]) == (20, 31, 0)
    assert claimed.keys() == {*PARTS, "the"} and sum(claimed.values()) == 90


def test_a_part_inside_another_is_counted_once(monkeypatch) -> None:
    now = iter([*[0.0] * 2001, 1.0, 2.0, 5.0, 9.0])  # outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr("time.thread_time", lambda: next(now))
    clock = Clock()
    inner = clock.timed("prompt", lambda: None)
    clock.timed("episode", inner)()
    assert (clock.seconds["prompt"], clock.seconds["episode"]) == (3.0, 5.0)


def test_the_steps_of_a_coroutine_are_timed_and_its_waits_are_not() -> None:
    clock = Clock()

    async def move(value: int) -> int:
        await asyncio.sleep(0.01)
        sum(range(20_000))
        return value + 1

    assert asyncio.run(_as_coroutine(clock.timed_async("score", move)(3))) == 4
    assert 0 < clock.seconds["score"] < 0.01


async def _as_coroutine(awaitable):
    return await awaitable


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_run_over_stubs_trains_every_rollout_with_all_of_them_in_flight_at_once(is_timed: bool) -> None:
    found = measure(in_flight=64, versions=8, batch=16, is_timed=is_timed)
    assert found.rollouts == 128 and found.in_flight >= 64
    assert 0 < found.stub < found.total
    assert found.parts.keys() == (PARTS.keys() if is_timed else set())
    assert all(found.parts[name] > 0 for name in found.parts)
    assert sum(found.parts.values()) < found.total


def test_fewer_in_flight_than_asked_for_fail_the_benchmark() -> None:
    with pytest.raises(AssertionError, match="only 32 were in flight"):
        measure(in_flight=64, versions=2, batch=16)


def test_the_cost_of_the_wire_is_of_rollouts_that_come_out_as_they_went_in() -> None:
    rows = encoding_rows(repetitions=1, num=16)
    assert [row.goal for row in rows] == ["≤ 8", "≤ 8", ""]
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize(("value", "wire", "status"), [(99.0, 7.9, 0), (101.0, 7.9, 1), (99.0, 8.1, 1)])
def test_every_goal_is_judged_but_by_quick(monkeypatch, tmp_path, capsys, value: float, wire: float, status: int) -> None:
    monkeypatch.setattr(controller, "measure", lambda **_: cost(value, 0.0))
    monkeypatch.setattr(controller, "stream_cost", lambda **_: 1.0)
    monkeypatch.setattr(controller, "encoding_rows", lambda **_: [Row("wire", wire, "µs", goal="≤ 8")])

    def run(*arguments: str) -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "controller", "--json", str(tmp_path / "out.json"), *arguments])
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        return ended.value.code, [row["goal"] for row in rows if row["goal"]]

    assert run() == (status, ["≤ 100", "≤ 8"])
    assert ("missed" in capsys.readouterr().out) == bool(status)
    assert run("--quick") == (0, ["≤ 100, not judged", "≤ 8, not judged"])
    said = capsys.readouterr().out
    assert said.count("not judged") == 2 and "missed" not in said


def test_only_learn_has_seeds(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "controller", "--seeds=3"])
    assert ended.value.code == 2 and "only `headrace bench learn` has seeds" in capsys.readouterr().err
