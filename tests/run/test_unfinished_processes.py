"""Unfinished groups of engines in processes of their own: cancelled, recycled, or gone on with after a restart."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import books_close, small_run
from test_runs import run_and_kill
from test_unfinished import check_books_always, note_generated, rollouts_of, saved

from headrace.records import FinishReason

SLOW = {
    "model": {"context": 512, "hidden_size": 96, "num_heads": 3, "num_layers": 3},
    "sampling": {"max_tokens": 480, "min_tokens": 240},
    "engine": {"slots": 16},
    "train": {"batch": 8, "group_size": 2},
    "held_out": None,
    "observe": {"keep_rollouts_every": 1},
    "orchestrate": "local",
}
"""Rollouts that take seconds: engines tell of them while they grow."""


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": {"max_lag": 1}, "partial": {"cancel": "over_age"}},
        {
            "staleness": {"max_lag": 2},
            "buffer": {"kind": "synchronous"},
            "partial": {"interrupt": "abort", "oversample": 2.0, "cancel": "over_age"},
        },
        {"staleness": {"max_lag": 2}, "partial": {"interrupt": "abort", "oversample": 1.5}},
    ],
    ids=["cancel", "in turn, recycle", "recycle"],
)
def test_cancelling_and_recycling_over_processes(tmp_path, monkeypatch, settings):
    checks = check_books_always(monkeypatch)
    result = small_run(tmp_path / "run", steps=8, **settings, **SLOW)
    assert result.summary["status"] == "finished" and books_close(result.summary) and checks
    assert result.summary["accounting"]["trained"] == 64 and result.summary["lag"]["max"] <= settings["staleness"]["max_lag"]
    if settings["partial"].get("oversample"):
        calls = [call.finish_reason for rollout in rollouts_of(result) for call in rollout.calls[:-1]]
        assert calls and set(calls) == {FinishReason.ABORT}


@pytest.mark.long
def test_over_processes_what_is_half_drawn_goes_on_after_a_restart(tmp_path, monkeypatch):
    folder, settings = tmp_path / "run", {**SLOW, "steps": 6, "staleness": {"max_lag": 6}}
    run_and_kill(folder, monkeypatch, at=4, **settings)
    partials = {rollout.id: rollout for group in saved(folder, 3) for rollout in group["rollouts"]}
    assert partials
    begun = note_generated(monkeypatch)
    result = small_run(folder, **settings)
    assert result.summary["status"] == "finished" and books_close(result.summary) and not partials.keys() & {*begun}
    for after in rollouts_of(result):
        before = partials.get(after.id)
        assert before is None or np.array_equal(after.token_ids[: len(before)], before.token_ids)
