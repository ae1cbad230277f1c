"""Whole small runs of what needs more than one forward pass of a step: columns asked for before it, and several steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import small_run

from headrace.envs import SingleTurn
from headrace.settings import ConfigError
from headrace.trainer import DeviceTrainer

if TYPE_CHECKING:
    from headrace.records import Array, Batch, Episode


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_trainer_is_asked_for_a_teachers_logprobs_and_they_become_advantages(tmp_path, monkeypatch, tiny_model) -> None:
    real, asked, trained = DeviceTrainer.forward, [], []

    def forward(self: DeviceTrainer, batch: Batch, *, column: str = "proximal") -> list[Array]:
        asked.append(column)
        if column != "teacher":
            return real(self, batch, column=column)
        return [np.where(rollout.loss_mask, -1.0, 0).astype(np.float32) for rollout in batch.rollouts]

    def forward_backward(self: DeviceTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return backward(self, batch)

    backward = DeviceTrainer.forward_backward
    monkeypatch.setattr(DeviceTrainer, "forward", forward)
    monkeypatch.setattr(DeviceTrainer, "forward_backward", forward_backward)
    run = small_run(
        tmp_path / "run", steps=2, held_out=None, train={"advantage": "distill", "teacher": tiny_model, "group_size": 1}
    )
    assert run.summary["accounting"]["trained"] == 32 and asked.count("teacher") == 2
    for batch in trained:
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            np.testing.assert_allclose(values, np.where(rollout.loss_mask, -1.0 - rollout.logprobs, 0), atol=1e-6)


@pytest.mark.parametrize("loss", ["decoupled_ppo", "m2po"])
def test_several_steps_a_version_look_at_the_policy_it_began_with(tmp_path, monkeypatch, loss: str) -> None:
    trained: list[Batch] = []
    backward = DeviceTrainer.forward_backward

    def forward_backward(self: DeviceTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return backward(self, batch)

    monkeypatch.setattr(DeviceTrainer, "forward_backward", forward_backward)
    small_run(tmp_path / "run", steps=2, held_out=None, staleness={"max_lag": 2}, train={"loss": loss, "mini_batches": 2})
    assert len(trained) == 4 and all("proximal" in rollout.columns for batch in trained for rollout in batch.rollouts)
    first = rows(tmp_path / "run")[-1]
    assert {"train/ess", "train/chi2", "train/masked", "train/kl", "train/version_spread", "train/entropy"} <= first.keys()


def test_rejected_rollouts_are_a_share_of_what_a_version_settled(tmp_path) -> None:
    """Without a gate more is drawn ahead than may be trained; every row's share closes with the books."""
    small_run(
        tmp_path / "run",
        steps=6,
        held_out=None,
        staleness={"max_lag": 1, "gate": False},
        buffer={"kind": "stream"},
        engine={"slots": 64},
    )
    found, before = rows(tmp_path / "run"), {"trained": 0, "rejected": 0}
    assert any(row["rejected"] > 0 for row in found)
    for row in found:
        trained, rejected = (row[f"rollouts/{name}"] - before[name] for name in before)
        before = {name: row[f"rollouts/{name}"] for name in before}
        assert row["rejected"] == pytest.approx(rejected / (trained + rejected))


def test_step_rewards_that_nothing_would_look_at_are_refused_at_the_first(tmp_path) -> None:
    class Stepwise(SingleTurn):
        async def run(self, task, client) -> Episode:
            episode = await super().run(task, client)
            rollout = episode.rollouts[0]
            return episode.replace(rollouts=(rollout.replace(step_rewards=((len(rollout) - 1, 0.5),)),))

    pattern = r"train.advantage = 'group': episode 'g\d+/\d+' has step_rewards, which only 'gae' looks at; set it to 'gae'"
    with pytest.raises(ConfigError, match=pattern):
        small_run(tmp_path / "refused", steps=1, held_out=None, environment=Stepwise())
    small_run(tmp_path / "run", steps=1, held_out=None, environment=Stepwise(), train={"advantage": "gae", "loss": "ppo"})
