"""The arithmetic of `headrace bench overlap`, and turn after turn of one small case for real."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bench.overlap import Case, Turn, _recipe, _Rig, _rows
from headrace.launch.build import build_roles
from headrace.launch.inputs import UserInputs
from headrace.launch.start_model import model_folder
from headrace.observe import Observer
from headrace.sync import Lineage

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
    assert {name: row.goal for name, row in rows.items() if row.goal} == {
        "async ÷ slower alone": "≥ 0.97",
        "trainer idle": "≤ 0.03",
    }


def test_every_measurement_takes_a_second_turn_on_the_same_roles(monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # other tests go on in this process
    model = {"path": "builtin:tiny", "hidden_size": 32, "num_layers": 1, "num_heads": 1, "context": 64}
    case = Case("small", model, tokens=4, batch=16, versions=1)
    recipe, given, lineage = _recipe(case, threads=1, lag=2), UserInputs(), Lineage.new()

    async def measure(path: str) -> list[Turn]:
        observer = Observer()
        rig = _Rig(recipe, build_roles(recipe, path, given, observer=observer, lineage=lineage), observer, lineage)
        whole, alone = {}, [{"has_trainer": False}, {"has_engine": False}]
        return [await rig.turn(case, **which) for which in [whole, *alone] * 2]

    with model_folder(recipe, given, say=lambda _: None) as path:
        assert [turn.tokens_per_second > 0 for turn in asyncio.run(measure(path))] == [True] * 6
