"""The benchmark of the controller: what it adds up, and that it measures a whole run."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import pytest

from headrace.bench import controller, controller_in_flight
from headrace.bench.controller import encoding_rows, measure
from headrace.bench.controller_engines import Crowd, crowd_rows
from headrace.bench.harness import Row
from headrace.cli import main


def test_the_figure_is_the_median_less_the_stub(monkeypatch) -> None:
    costs = iter([(60.0, 10.0), (95.0, 5.0), (200.0, 20.0), (96.0, 6.0), (97.0, 7.0), (98.0, 8.0), (99.0, 9.0)])
    monkeypatch.setattr(controller, "measure", lambda **_: next(costs))
    rows = {row.name: row.value for row in next(controller._measure(quick=False))}
    assert rows == {"controller per rollout": 90, "least of the repetitions": 50, "stub engine, not counted": 8}


def test_a_run_over_stubs_trains_every_rollout_with_all_of_them_in_flight_at_once() -> None:
    total, stub = measure(in_flight=64, versions=8, batch=16)  # asserts both itself
    assert 0 < stub < total


def test_fewer_in_flight_than_asked_for_fail_the_benchmark() -> None:
    with pytest.raises(AssertionError, match="only 32 were in flight"):
        measure(in_flight=64, versions=2, batch=16)


def test_the_cost_of_the_wire_is_of_rollouts_that_come_out_as_they_went_in() -> None:
    rows = encoding_rows(repetitions=1, num=16)
    assert [row.goal for row in rows] == ["≤ 8", "≤ 8"]
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize(("value", "wire", "status"), [(99.0, 7.9, 0), (101.0, 7.9, 1), (99.0, 8.1, 1)])
def test_every_goal_is_judged_but_by_quick(monkeypatch, tmp_path, capsys, value: float, wire: float, status: int) -> None:
    monkeypatch.setattr(controller, "measure", lambda **_: (value, 0.0))
    monkeypatch.setattr(controller, "stream_cost", lambda **_: 1.0)
    monkeypatch.setattr(controller, "many_calls", lambda **_: {"milliseconds": 1.0, "bytes_per_token": 15.0, "report": 1.0})
    monkeypatch.setattr(controller, "hour", lambda **_: [[second, 1000.0, 15_000.0] for second in range(4)])
    monkeypatch.setattr(controller, "encoding_rows", lambda **_: [Row("wire", wire, "µs", goal="≤ 8")])
    monkeypatch.setattr(controller, "crowd_rows", lambda _: [Row("of many engines", 1.0, "µs", goal="≤ 100")])
    monkeypatch.setattr(controller, "put_and_take", lambda **_: {"loop": 1.0, "process": 99.0, "bytes": 1.0})

    def run(*arguments: str) -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", "controller", "--json", str(tmp_path / "out.json"), *arguments])
        rows = json.loads((tmp_path / "out.json").read_text())["rows"]
        return ended.value.code, [row["goal"] for row in rows if row["goal"]]

    assert run() == (status, ["≤ 100", "≤ 8", "≤ 50", "≤ 16", "≤ 1.05", *5 * ["≤ 100"]])
    assert ("missed" in capsys.readouterr().out) == bool(status)
    assert run("--quick")[0] == 0
    said = capsys.readouterr().out
    assert said.count("not judged") == 10 and "missed" not in said


def test_calls_in_flight_are_grown_asked_for_and_weighed() -> None:
    found = asyncio.run(controller_in_flight._many(calls=32, tokens=400))
    assert found.keys() == {"milliseconds", "bytes_per_token", "report"} and found["milliseconds"] > 0


def test_memory_in_flight_does_not_grow_over_a_simulated_hour(monkeypatch) -> None:
    monkeypatch.setattr(controller_in_flight, "held_bytes", lambda _: tracemalloc.get_traced_memory()[0])
    tracemalloc.start()
    moments = asyncio.run(controller_in_flight._hour(calls=48, mean=60, rate=3, seconds=180))
    tracemalloc.stop()
    steady = moments[len(moments) // 3 :]  # every call has ended once by then
    assert all(tokens > 48 * 20 for _, tokens, _ in steady) and len(moments) == 60
    first, second = (sum(held for *_, held in half) for half in (steady[:20], steady[20:]))
    assert second < 1.05 * first, "no more in the last third than in the one before"


def test_many_engines_answer_all_of_a_run():
    crowd = Crowd(engines=6, slots=2, rollouts=160, batch=16, median=300, most=2_000)
    rows = {row.name: row.value for row in crowd_rows(crowd)}
    assert 0 < rows["tokens of a rollout, on average"] < 2_000 and rows["bytes from engines per token"] > 12
    assert 0.5 < 1 / rows["most calls of an engine ÷ fewest"] <= 1, "all engines work"
    num_unfinished = rows["most rollouts submitted and not trained"]
    assert crowd.in_flight < num_unfinished <= (2 + 2 + 1) * 16, "not all 160 wait from the start: memory could not grow"
