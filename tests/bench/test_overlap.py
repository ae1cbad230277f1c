"""The arithmetic of `headrace bench overlap`, and one small measurement for real."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.overlap import GOALS, Case, Turn, _measure, _rows

BUSY = {
    "engine": {"prefill": 0.1, "decode": 0.4, "swap": 0.0, "wait-gate": 0.3, "wait-weights": 0.0, "descheduled": 0.2},
    "trainer": {"compute": 0.9, "publish": 0.05, "save": 0.0, "evaluate": 0.0, "wait-batch": 0.02, "descheduled": 0.03},
    "scorer": {"score": 0.1, "wait": 0.9, "descheduled": 0.0},
}


def turn(rate: float, *, launcher: float = 1e-5) -> Turn:
    return Turn(rate, launcher, BUSY)


def test_ratios_are_of_medians_and_the_bound_is_the_least_of_roles_and_cores():
    seen = {
        "async": [turn(900), turn(1), turn(950)],
        "generation": [turn(2000)] * 3,
        "training": [turn(1000)] * 3,
        "sync": [turn(600)] * 3,
    }
    rows = {row.name.removeprefix("x: "): row for row in _rows(Case("x", {}, 10, 8, 1), seen, cores=2)}
    assert rows["async ÷ slower alone"].value == pytest.approx(0.9) and rows["async ÷ sync"].value == pytest.approx(1.5)
    # A token takes 0.5/2000 s of the engine's core, 0.95/1000 of the trainer's and 1e-5 of the launcher's: two cores could
    # do 2 / 0.00121 = 1653 a second, more than the trainer alone does.
    assert rows["async"].bound == pytest.approx(1000)
    assert rows["trainer idle"].value == pytest.approx(0.02)
    slow = {**seen, "async": [turn(900, launcher=1e-3)] * 3}
    rows = {row.name.removeprefix("x: "): row for row in _rows(Case("x", {}, 10, 8, 1), slow, cores=2)}
    assert rows["async"].bound == pytest.approx(2 / (0.5 / 2000 + 0.95 / 1000 + 1e-3))
    assert not GOALS["async ÷ slower alone"](0.969) and GOALS["trainer idle"](0.03)


def test_a_small_case_is_measured():
    model = {"path": "builtin:tiny", "hidden_size": 32, "num_layers": 1, "num_heads": 1, "context": 64}
    rows = asyncio.run(_measure(Case("small", model, tokens=8, batch=16, versions=3), turns=1))
    figures = {row.name.removeprefix("small: "): row.value for row in rows}
    for name in ("async", "generation alone", "training alone", "sync, all cores in turn"):
        assert figures[name] > 0, name
    assert 0 < figures["async ÷ slower alone"] < 2 and 0 <= figures["trainer idle"] <= 1
