"""`headrace bench learn`: every goal is judged on every seed, and each loss is tried with the constants of the table."""

from __future__ import annotations

import json

import pytest

from headrace.bench import learn


def test_each_loss_has_a_row_for_each_seed(tmp_path, monkeypatch, capsys):
    asked = []
    after = {("grpo", 0): 0.99, ("grpo", 1): 0.97, ("cispo", 0): 0.96, ("cispo", 1): 0.5}

    def trained(seed, *, steps, train):
        asked.append((train["loss"], seed, steps, train["constants"]))
        rates = {"success_before": 0.2, "greedy_before": 0.5, "greedy_after": 1.0, "success_after": after[train["loss"], seed]}
        return {**rates, "seconds": {"rl": 1.0}, "lag": {"mean": 1.0}}

    monkeypatch.setattr(learn, "_train", trained)
    file = tmp_path / "out.json"
    assert learn.run(losses="grpo, cispo", seeds=2, quick=False, json_file=file) == 1
    assert asked == [(loss, seed, None, learn.LOSSES[loss]["constants"]) for loss in ("grpo", "cispo") for seed in (0, 1)]
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["cispo, seed 1: success after"] == rows["cispo, all seeds: least success after"] == 0.5
    said = capsys.readouterr().out
    assert "missed: cispo, seed 1: success after: 0.5 share, goal ≥ 0.95" in said and "missed: grpo" not in said
    asked.clear()
    assert learn.run(losses="grpo", quick=True, json_file=None) == 0
    assert [each[:3] for each in asked] == [("grpo", 0, 10), ("grpo", 1, 10)]
    asked.clear()
    assert learn.run(losses="grpo", seeds=1, steps=75, quick=False, json_file=None) == 0
    assert [each[:3] for each in asked] == [("grpo", 0, 75)]


@pytest.mark.parametrize(
    "change", [{}, {"success_before": 0.19}, {"greedy_before": 0.61}, {"success_after": 0.94}, {"seconds": {"rl": 91.0}}]
)
def test_every_goal_of_a_seed_is_judged(monkeypatch, capsys, change):
    good = {"success_before": 0.2, "greedy_before": 0.6, "success_after": 0.95, "greedy_after": 1.0, "seconds": {"rl": 90.0}}
    summaries = [{**good, "lag": {"mean": 1.0}}, {**good, "lag": {"mean": 1.0}, **change}]
    monkeypatch.setattr(learn, "_train", lambda seed, steps: summaries[seed])
    assert learn.run(seeds=2, quick=False, json_file=None) == (1 if change else 0)
    assert ("missed: seed 1" in capsys.readouterr().out) == bool(change)
    assert learn.run(quick=True, json_file=None) == 0
    assert "missed" not in capsys.readouterr().out
