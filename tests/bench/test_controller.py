"""The benchmark of the controller: what it adds up, and that it measures a whole run."""

from __future__ import annotations

import json

import pytest

from headrace.bench import controller
from headrace.bench.controller import Cost, make_rows, measure
from headrace.bench.controller_stream import encoding_rows
from headrace.bench.harness import Row
from headrace.cli import main


def cost(total: float, stub: float) -> Cost:
    return Cost(rollouts=64, in_flight=32, total=total, stub=stub)


def test_the_figure_is_the_median_less_the_stub() -> None:
    rows = {row.name: row.value for row in make_rows([cost(60, 10), cost(95, 5), cost(200, 20)])}
    assert rows["controller per rollout"] == 90
    assert rows["least of the repetitions"] == 50
    assert rows["stub engine, not counted"] == 10


def test_a_run_over_stubs_trains_every_rollout_with_all_of_them_in_flight_at_once() -> None:
    found = measure(in_flight=64, versions=8, batch=16)
    assert found.rollouts == 128 and found.in_flight >= 64
    assert 0 < found.stub < found.total


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
