"""What a person sees while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console

from headrace.observe.screen import LiveTable, PlainLines

BUDGET = {role: {"wait": 1.0} for role in ("engine", "trainer", "scorer")}
ROW = {"version": 1, "reward": 0.5, "tokens_per_second": 100.0, "lag_mean": 0.0, "lag_max": 0, "rollouts/failed": 0}


def test_lines_show_rollouts_that_were_dropped_where_there_are_any(capsys) -> None:
    screen = PlainLines(steps=9)
    screen.row(ROW, BUDGET)
    screen.row({**ROW, "rollouts/failed": 2, "rollouts/filtered": 8, "rollouts/rejected": 4}, BUDGET)
    before, after = capsys.readouterr().out.splitlines()
    assert "dropped" not in before and "dropped so far 2 failed, 8 filtered" in after


def test_a_line_shows_what_the_trainer_reports(capsys) -> None:
    screen = PlainLines(steps=9)
    screen.row({**ROW, "train/loss": -0.01234, "train/entropy": 0.5, "train/kl": 7.0}, BUDGET)
    screen.row({**ROW, "train/loss": 2.0, "train/entropy": 0.5, "train/reference_kl": 1e-5}, BUDGET)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/9  reward 0.500  loss -0.0123  entropy 0.5  tokens/s 100") and " kl " not in first
    assert "loss 2  entropy 0.5  kl 1e-05" in second


def test_the_table_has_a_column_for_them_then() -> None:
    shown = []
    for row in (ROW, {**ROW, "rollouts/filtered": 8}):
        file = io.StringIO()
        screen = LiveTable(Console(file=file, force_terminal=True, width=120), steps=9)
        screen.row(row, BUDGET)
        screen.close()
        shown.append(file.getvalue())
    assert "dropped" not in shown[0] and "dropped so far" in shown[1] and "8 filtered" in shown[1]
