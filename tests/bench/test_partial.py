"""The arithmetic of `headrace bench partial`, and one small measurement for real."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from headrace.bench.partial import CHOICES, figures_of, make_plan, measure, rows_of
from headrace.bench.step_recorder import RecordedStep, exchanges_of, stalls_of, usual_step


def steps(*rows: tuple) -> list[RecordedStep]:
    """(ended, ids that decoded, admitting, updates), each started when the one before it ended unless a fifth says when; a
    sixth is when the engine was ready."""
    found = []
    for ended, decoding, is_admitting, updates, *more in rows:
        started = more[0] if more else found[-1].ended if found else 0.0
        found.append(RecordedStep(started, ended, frozenset(decoding), False, is_admitting, updates, *more[1:]))
    return found


KEPT = steps(
    (1.0, "abcd", True, 0),
    (2.0, "abcd", True, 0),
    (3.8, "abcd", True, 1, 2.75, 2.25),  # a quarter to exchange, half to take in work; a slower step is not its doing
    (4.8, "abcd", True, 1),
)


def test_what_is_kept_stalls_for_the_time_without_a_step():
    assert usual_step(KEPT) == 1.0 and stalls_of(KEPT, usual=1.0) == pytest.approx([0.75])
    assert exchanges_of(KEPT) == pytest.approx([0.25])


def test_what_is_computed_again_stalls_until_all_of_it_decodes():
    seen = steps(
        (1.0, "abcde", True, 0),  # e ends with it
        (5.0, "", True, 1),  # prefixes alone
        (8.0, "abx", True, 1),  # half of those before decode beside the rest
        (9.0, "abcd", True, 1, 8.5),
        (19.0, "abcd", True, 1),
    )
    assert stalls_of(seen, usual=1.0) == pytest.approx([4.0 + 2.5 + 0.5])


def test_what_drains_stalls_as_its_slots_fall_empty():
    seen = steps(
        (1.0, "abcd", True, 0),
        (2.0, "abc", False, 0),
        (3.0, "a", False, 0),
        (4.5, "efgh", True, 1, 3.5),
        (5.5, "efgh", True, 1),
        (6.5, "efgh", True, 2),
    )
    assert stalls_of(seen, usual=1.0) == pytest.approx([0.25 + 0.75 + 0.5, 0.0])


def test_figures_are_medians_of_turns():
    turns = [
        figures_of(seconds=2.0, wasted=wasted, lags=np.array(lags), steps=KEPT, recomputed=recomputed)
        for wasted, recomputed, lags in [(2, 30, [0, 0]), (0, 60, [1, 1]), (1, 90, [1, 3])]
    ]
    rows = {(row.name, row.unit): row for row in rows_of("keep", turns)}
    assert rows["keep: tokens wasted", "share"].value == pytest.approx(1 / 3)
    assert rows["keep: stall per update", "ms"].value == pytest.approx(750)
    in_steps = rows["keep: stall per update", "decode steps"]
    assert (in_steps.value, in_steps.goal) == (pytest.approx(0.75), "≤ 1")
    assert rows["keep: until the engine could step", "ms"].value == pytest.approx(250)
    assert rows["keep: KV recomputed per update", "tokens"].value == 60
    found = [rows[f"keep: lag, {name}", "versions"].value for name in ("mean", "p50", "p90", "max")]
    assert found == [1.0, 1.0, 1.0, 1.0] and rows["keep: trained", "tokens/s"].value == 1
    assert not any(row.goal for row in rows_of("drain", turns))


@pytest.mark.long
def test_every_choice_is_measured():
    model = {"hidden_size": 32, "num_layers": 1, "num_heads": 1, "context": 128}
    plan = dataclasses.replace(
        make_plan("cpu", quick=True), model=model, slots=16, groups=4, mean=24, cap=96, seconds=0.01, versions=6, turns=1
    )
    seen = measure(plan)
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
