"""Runs with `[filter]` and `[sampler]`: what is trained, counted, said and resumed."""

from __future__ import annotations

import json

import pytest
from helpers import TASKS, books_close, same_weights, small_run
from test_runs import run_and_kill

from headrace.observe.sinks import read_metrics
from headrace.run.pace import Pace
from headrace.settings import ConfigError


def sparse(prompt: str, completion: str, **_: object) -> float:
    """Every third task is hopeless."""
    return 0.0 if int(prompt) % 3 == 0 else float(len(completion))


def constant(**_: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": {"max_lag": 0}},
        {"staleness": {"max_lag": 2}, "buffer": {"order": "submission"}},
        pytest.param(
            {"buffer": {"kind": "stream"}, "staleness": {"gate": "none", "reject": "never", "correct": "tis"}},
            marks=pytest.mark.long,
        ),
        pytest.param({"partial": {"oversample": 1.5}}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_tied_groups_are_dropped_and_replaced(tmp_path, settings):
    result = small_run(tmp_path / "run", steps=3, reward=sparse, filter={"max_tied": 0.0}, held_out=None, **settings)
    counts, rows = result.summary["accounting"], read_metrics(result.folder / "metrics.jsonl")
    assert books_close(result.summary) and counts["trained"] == 3 * 16
    assert all(row["tied"] == row["groups_unwanted"] == 0 for row in rows)
    filtered = sum(row["groups_filtered"] for row in rows)
    assert 0 < filtered * 4 <= counts["filtered"] <= filtered * 4 + 64, "some were dropped for a batch that never came"
    assert [row["groups_drawn"] for row in rows] == [4 + row["groups_filtered"] for row in rows]
    assert any(row["reward_drawn"] < row["reward"] for row in rows), "hopeless groups are in it"
    (reason,) = (reason for reason in result.summary["dropped_because"] if reason.startswith("filtered"))
    assert reason == "filtered: tied: all siblings have the same reward"
    sampled = result.summary["tokens"]
    assert sampled["wasted"] > 0 and sampled["sampled"] >= sampled["trained"] + sampled["wasted"]


@pytest.mark.parametrize("buffer", [{}, {"order": "submission"}], ids=["completion", "submission"])
def test_auto_lag_counts_the_groups_that_the_trainer_can_take(tmp_path, monkeypatch, buffer):
    """Not those that a filter drops, nor those that wait for an earlier one."""
    arrived: list[int] = []
    monkeypatch.setattr("headrace.run.policy_groups.is_automatic", lambda recipe: True)
    monkeypatch.setattr(Pace, "completed", lambda self, *, submitted_at, num_arrived: arrived.append(num_arrived))
    settings = {"filter": {"max_tied": 0.0}, "buffer": buffer, "staleness": {"max_lag": 2}}
    result = small_run(tmp_path / "run", steps=3, reward=sparse, held_out=None, **settings)
    counts = result.summary["accounting"]
    assert len(arrived) * 4 >= counts["trained"] + counts["filtered"] > sum(arrived) * 4
    assert 0 <= sum(arrived) * 4 - counts["trained"] <= counts["buffered"] + counts["unused"]


def test_a_punishment_for_length_neither_unties_a_group_nor_makes_it_hard_nor_unsolved(tmp_path):
    """All answers are right, and most are too long: the filter sees ties of 1, and the sampler solved tasks."""
    given = {"reward": {"functions": lambda completion: 1.0, "overlong_buffer": 4, "overlong_penalty": 3.0}, "held_out": None}
    result = small_run(tmp_path / "run", steps=1, filter={"max_tied": 0.0, "max_draws": 2}, **given, sampling={"max_tokens": 4})
    (row,) = read_metrics(result.folder / "metrics.jsonl")
    assert row["reward"] < 1.0 == row["reward/unshaped"] == row["reward_drawn"] and row["success/source/tasks"] == 1.0
    assert (row["groups_filtered"], row["groups_unwanted"]) == (4, 4)
    told = []

    class Notes:
        def __init__(self, stream, *, seed):
            self.next, self.state, self.restore = stream.next, stream.state, stream.restore

        def report(self, task, rewards):
            told.extend(rewards)

    small_run(tmp_path / "told", steps=2, sampler=Notes, **given, sampling={"max_tokens": 4})
    assert set(told) == {1.0}


@pytest.mark.long
def test_until_a_share_of_the_batch_is_untied(tmp_path):
    result = small_run(tmp_path / "run", steps=3, reward=sparse, filter={"max_tied": 0.25}, held_out=None)
    tied = [row["tied"] for row in read_metrics(result.folder / "metrics.jsonl")]
    assert max(tied) == 0.25 and books_close(result.summary)


def test_at_the_bound_the_batch_is_filled_and_it_is_said_once(tmp_path, capsys):
    settings = {"max_tied": 0.0, "max_draws": 3}
    result = small_run(tmp_path / "run", steps=3, reward=constant, filter=settings, held_out=None, quiet=False)
    for row in read_metrics(result.folder / "metrics.jsonl"):
        assert (row["groups_drawn"], row["groups_filtered"], row["groups_unwanted"]) == (12, 8, 4)
    assert capsys.readouterr().out.count("filter.max_draws = 3") == 1 and books_close(result.summary)


def test_groups_that_are_too_hard_or_too_easy_are_dropped(tmp_path):
    difficulty = {"min_reward": 1.0, "max_reward": 5.5}
    result = small_run(tmp_path / "run", steps=3, reward=sparse, filter=difficulty, held_out=None)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert all(1.0 <= row["reward"] <= 5.5 for row in rows) and sum(row["groups_filtered"] for row in rows) > 0
    assert {reason.split(":")[1].strip() for reason in result.summary["dropped_because"]} == {"too hard", "too easy"}


def test_exact_a_resumed_run_with_filter_and_sampler_is_bitwise_the_uninterrupted_one(tmp_path, monkeypatch):
    settings: dict = {"exact": True, "steps": 6, "staleness": {"max_lag": 1}}
    settings |= {"reward": sparse, "filter": {"max_tied": 0.25}, "sampler": {"kind": "learnable"}}
    whole = small_run(tmp_path / "whole", **settings)
    run_and_kill(tmp_path / "killed", monkeypatch, at=5, **settings)
    resumed = small_run(tmp_path / "killed", **settings)
    assert same_weights(whole.checkpoint, resumed.checkpoint)
    assert whole.summary["accounting"] == resumed.summary["accounting"] and whole.summary["accounting"]["filtered"] > 0
    manifest = json.loads((tmp_path / "killed" / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert len(manifest["data"]["sampler"]["memory"]) > 3


class OneRow:
    """Always the same task; notes what it is told."""

    def __init__(self, stream, *, seed):
        self.stream, self.told = stream, 0

    def next(self):
        return self.stream.get("tasks", 7)

    def report(self, task, rewards):
        assert task.row == TASKS[7] and len(rewards) == 4
        self.told += 1

    def state(self):
        return self.told

    def restore(self, state):
        self.told = state


def test_a_sampler_of_ones_own_is_told_of_every_group_and_saved(tmp_path, monkeypatch):
    run_and_kill(tmp_path / "run", monkeypatch, at=5, steps=6, sampler=OneRow)
    result = small_run(tmp_path / "run", steps=6, sampler=OneRow)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-6" / "manifest.json").read_text())
    told, waiting = manifest["data"]["sampler"], len(manifest["data"]["reports"])
    assert told + waiting >= 6 * 4 and all(row == TASKS[7] for _, row, *_ in manifest["in_flight"])
    assert (told + waiting) * 4 + result.summary["accounting"]["unused"] >= result.summary["accounting"]["submitted"]


def test_a_sampler_that_raises_leaves_books_that_close(tmp_path, monkeypatch):
    told = OneRow.report

    def fails(self, task, rewards):
        if self.told == 6:
            raise KeyError("mine")
        told(self, task, rewards)

    monkeypatch.setattr(OneRow, "report", fails)
    with pytest.raises(KeyError, match="mine"):
        small_run(tmp_path / "run", steps=4, sampler=OneRow, held_out=None)
    monkeypatch.setattr(OneRow, "report", told)
    assert books_close(small_run(tmp_path / "run", steps=4, sampler=OneRow, held_out=None).summary)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sampler": OneRow, "recipe": "with a section"}, "sampler: the recipe has a [sampler] and sampler= is given too"),
        ({"sampler": 7}, "sampler=: a int is not a class or function that makes a sampler"),
        ({"sampler": {"kind": "nowhere.py:Mine"}}, "sampler.kind = 'nowhere.py:Mine': nowhere.py: no such file"),
    ],
)
def test_a_sampler_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path, settings, problem):
    if "recipe" in settings:
        (tmp_path / "recipe.toml").write_text('[sampler]\nkind = "learnable"\n')
        settings["recipe"] = tmp_path / "recipe.toml"
    with pytest.raises(ConfigError) as caught:
        small_run(tmp_path / "run", **settings)
    assert str(caught.value).startswith(problem)
