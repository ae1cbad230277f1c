"""docs/observing.md names every metric that a run writes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from helpers import TASKS, length_reward, small_run

from headrace.observe import read_metrics
from headrace.records import FinishReason
from headrace.run.metrics import completion_metrics, reward_metrics, settled_shares

if TYPE_CHECKING:
    from headrace.launch import RunResult

DOCS = Path(__file__).parents[2] / "docs"


def digits(prompt: str, completion: str, **_: object) -> float | None:
    """Judges half of the tasks."""
    return float(sum(letter.isdigit() for letter in completion)) if int(prompt) % 2 else None


@pytest.fixture(scope="module", params=["inline", pytest.param("local", marks=pytest.mark.long)])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    sources = [(TASKS[:6], 1.0), (TASKS[6:], 1.0)]
    how = {"orchestrate": request.param, "held_out": sources, "observe": {"table_rows": 3, "sinks": ["tensorboard"]}}
    how |= {"filter": {"min_reward": -1e9}, "evaluate": {"samples": 2}}
    return small_run(folder, reward=[length_reward, digits], tasks=sources, steps=2, **how)


def names_in_table() -> tuple[str, set[str]]:
    """A pattern for the metrics of the table, and the names under `train/` of docs/losses.md."""
    rows = [line.split("|")[1] for line in (DOCS / "observing.md").read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    losses = (DOCS / "losses.md").read_text().partition("## What every version logs")[2].partition("\n## ")[0]
    of_losses = {f"train/{name}" for name in re.findall(r"`(\w+)`", losses)}
    patterns = [re.sub(r"[A-Z]{3,}|(?<=@)K", ".+", re.escape(name)) for name in names if name != "train/NAME"]
    return "|".join(patterns), of_losses


def test_every_metric_is_in_the_table(finished: RunResult) -> None:
    pattern, of_losses = names_in_table()
    written = {name for row in read_metrics(finished.folder / "metrics.jsonl") for name in row}
    missing = {name for name in written if not re.fullmatch(pattern, name)} - of_losses
    assert not missing


def test_each_function_and_source_has_its_own(finished: RunResult) -> None:
    row = read_metrics(finished.folder / "metrics.jsonl")[-1]
    per_source = [row[f"reward/source/{name}"] for name in ("tasks", "tasks#2") if f"reward/source/{name}" in row]
    assert min(per_source) <= row["reward"] <= max(per_source)
    assert row["reward/length_reward"] <= 1 and row["reward/digits/std"] >= 0
    assert row["completions/min_length"] <= row["completions/mean_length"] <= row["completions/max_length"] <= 6


def group(*lengths_and_rewards: tuple[int, str, dict[str, float]], source: str) -> SimpleNamespace:
    """A group of episodes of one rollout each."""
    rollouts = [SimpleNamespace(num_sampled=n, finish_reason=why, rewards=parts) for n, why, parts in lengths_and_rewards]
    rewards = [sum(each.rewards.values()) for each in rollouts]
    episodes = [
        SimpleNamespace(rollouts=(each,), reward=reward, unshaped_reward=each.rewards.get("unshaped", reward))
        for each, reward in zip(rollouts, rewards, strict=True)
    ]
    return SimpleNamespace(episodes=episodes, source=source)


def test_truncated_ones_are_left_out_of_terminated_lengths() -> None:
    groups = [group((2, FinishReason.STOP, {}), (8, FinishReason.LENGTH, {}), (5, FinishReason.STOP, {}), source="")]
    assert completion_metrics(groups) == {  # type: ignore[arg-type]
        "completions/truncated": pytest.approx(1 / 3),
        **{"completions/mean_length": 5, "completions/min_length": 2, "completions/max_length": 8},
        "completions/mean_terminated_length": 3.5,
        **{"completions/min_terminated_length": 2, "completions/max_terminated_length": 5},
    }
    alone = completion_metrics([group((8, FinishReason.LENGTH, {}), source="")])  # type: ignore[list-item]
    assert alone["completions/truncated"] == 1 and not any("terminated" in name for name in alone)


def test_a_function_is_averaged_over_what_it_judged_and_a_source_over_its_own() -> None:
    stop = FinishReason.STOP
    groups = [
        group((1, stop, {"right": 1.0, "short": 0.5}), (1, stop, {"right": 0.0, "short": 0.5}), source="sums"),
        group((1, stop, {"right": 0.0}), (1, stop, {"right": 0.0}), source="words"),
    ]
    assert reward_metrics(groups, success_at=1.0) == {  # type: ignore[arg-type]
        **{"reward/right": 0.25, "reward/right/std": pytest.approx(0.4330127), "reward/short": 0.5, "reward/short/std": 0.0},
        **{"reward/source/sums": 1.0, "reward/source/words": 0.0, "success/source/sums": 0.5, "success/source/words": 0.0},
    }


def test_a_punished_right_answer_is_a_success() -> None:
    parts = {"right": 1.0, "unshaped": 1.0, "overlong": -1.5}
    found = reward_metrics([group((1, FinishReason.STOP, parts), source="sums")], success_at=1.0)  # type: ignore[list-item]
    assert found["reward/source/sums"] == 0.5 and found["success/source/sums"] == 1.0


def test_each_end_is_a_share_of_it_and_what_was_trained() -> None:
    before = {"trained": 10, "rejected": 1, "filtered": 0, "failed": 0}
    now = {"trained": 18, "rejected": 9, "filtered": 2, "failed": 0}
    assert settled_shares(before, now) == {"rejected": 0.5, "filtered": 0.2, "failed": 0.0}
