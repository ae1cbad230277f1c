"""The arithmetic of `headrace bench partial`, and one small measurement for real."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from headrace.bench import partial
from headrace.bench.partial import CHOICES, Turn, make_plan, measure, rows_of
from headrace.bench.step_recorder import StepEnd, exchanges_of, stalls_of, usual_step
from headrace.cli import main


def steps(*rows: tuple) -> list[StepEnd]:
    """(ended, decoded, admitting, updates, back), each begun when the one before it ended unless a sixth says when; a seventh
    is when the engine was ready."""
    ends = []
    for at, decoded, is_admitting, updates, back, *more in rows:
        began = more[0] if more else ends[-1].at if ends else 0.0
        ends.append(StepEnd(began, at, decoded, 0, is_admitting, updates, back, *more[1:]))
    return ends


def test_what_is_kept_stalls_for_the_time_without_a_step():
    seen = steps(
        (1.0, 8, True, 0, 1.0),
        (2.0, 8, True, 0, 1.0),
        (3.8, 8, True, 1, 1.0, 2.75, 2.25),  # a quarter to exchange, half to take in work; a slower step is not its doing
        (4.8, 8, True, 1, 1.0),
    )
    assert usual_step(seen) == 1.0 and stalls_of(seen, usual=1.0) == pytest.approx([0.75])
    assert exchanges_of(seen) == pytest.approx([0.25])


def test_what_is_computed_again_stalls_until_all_of_it_decodes():
    seen = steps(
        (1.0, 8, True, 0, 1.0),
        (5.0, 0, True, 1, 0.0),  # prefixes alone
        (8.0, 4, True, 1, 0.5),  # half of them decode beside the rest
        (9.0, 8, True, 1, 1.0, 8.5),
        (19.0, 8, True, 1, 1.0),
    )
    assert stalls_of(seen, usual=1.0) == pytest.approx([4.0 + 2.5 + 0.5])


def test_what_drains_stalls_as_its_slots_fall_empty():
    seen = steps(
        (1.0, 4, True, 0, 1.0),
        (2.0, 3, False, 0, 1.0),
        (3.0, 1, False, 0, 1.0),
        (4.5, 4, True, 1, 1.0, 3.5),
        (5.5, 4, True, 1, 1.0),
        (6.5, 4, True, 2, 1.0),
    )
    assert stalls_of(seen, usual=1.0) == pytest.approx([0.25 + 0.75 + 0.5, 0.0])


def test_figures_are_medians_of_turns_and_lags_those_of_all_tokens():
    turns = [
        Turn(2.0, 100, wasted, [stall, 9.0, stall], [0.25], step=0.5, recomputed=recomputed, lags=np.array(lags))
        for wasted, stall, recomputed, lags in [(100, 1.0, 30, [0, 0]), (0, 2.0, 60, [1, 1]), (25, 3.0, 90, [1, 9])]
    ]
    rows = {(row.name, row.unit): row for row in rows_of("keep", turns)}
    assert rows["keep: tokens wasted", "share"].value == 0.2
    assert rows["keep: stall per update", "ms"].value == 2000
    assert (rows["keep: stall per update", "decode steps"].value, rows["keep: stall per update", "decode steps"].goal) == (
        4,
        "≤ 1",
    )
    assert rows["keep: until the engine could step", "ms"].value == 250
    assert rows["keep: KV recomputed per update", "tokens"].value == 20
    found = [rows[f"keep: lag, {name}", "versions"].value for name in ("mean", "p50", "p90", "max")]
    assert found == [2.0, 1.0, 5.0, 9.0] and rows["keep: trained", "tokens/s"].value == 50
    assert not any(row.goal for row in rows_of("drain", turns))


@pytest.mark.long
def test_every_choice_is_measured():
    model = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "context": 128}
    plan = dataclasses.replace(
        make_plan("cpu", quick=True), model=model, slots=16, groups=4, mean=24, cap=96, seconds=0.01, versions=6, turns=1
    )
    seen = asyncio.run(measure(plan))
    assert seen.keys() == CHOICES.keys()
    figures = {
        name: {row.name.removeprefix(f"{name}: "): row.value for row in rows_of(name, turns)} for name, turns in seen.items()
    }
    for name, values in figures.items():
        assert values["lag, max"] <= plan.max_lag and values["trained"] > 0 and 0 <= values["tokens wasted"] < 1, name
        is_again = "retract" in CHOICES[name].values() or "abort" in CHOICES[name].values()
        assert (values["KV recomputed per update"] > 0) == is_again, name
    assert figures["in turn"]["lag, max"] == figures["in turn"]["tokens wasted"] == 0
    assert figures["drain"]["stall per update"] > 5 * figures["keep"]["stall per update"]


def test_the_command(tmp_path, monkeypatch, capsys):
    turn = Turn(1.0, 10, 0, [0.5], [0.125], step=0.25, recomputed=0, lags=np.array([0, 1]))

    async def measured(plan):
        assert plan.device == "cpu"
        return {"keep": [turn], "drain": [turn]}

    monkeypatch.setattr(partial, "measure", measured)
    for arguments, status in (((), 1), (("--quick",), 0)):
        with pytest.raises(SystemExit) as caught:
            main(["bench", "partial", "--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])
        assert caught.value.code == status
    assert "missed: keep: stall per update: 2 decode steps, goal ≤ 1" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 20
    with pytest.raises(SystemExit):
        main(["bench", "overlap", "--device", "cpu"])
    assert "--device = cpu: only `headrace bench partial` has device" in capsys.readouterr().err
