"""The sharing benchmark: its figures are of the same gradient, and of passes that are full."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.bench import trainer_speed
from headrace.bench.harness import missed
from headrace.bench.loads import SMALL


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(trainer_speed._ON_CPU, model=SMALL, prompt=96, completion=8)
    assert case.bound == pytest.approx(8 * 104 / (96 + 64))
    monkeypatch.setattr(trainer_speed, "_ON_CPU", case)
    rows = {row.name: row for row in trainer_speed.measure_sharing("cpu", quick=True)}
    gain, share = rows[f"sharing, {case.name}: gain"], rows[f"sharing, {case.name}: gain ÷ bound"]
    assert gain.value > 0 and gain.bound == case.bound and share.value == pytest.approx(gain.value / case.bound)
    assert not missed([row for row in rows.values() if "fill" in row.name or "gradients" in row.name])
    assert 0 < rows["sharing: relative difference of gradients"].value < 1e-5  # two trainers, not one twice
    assert len(rows) == 7
