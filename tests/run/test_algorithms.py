"""Whole small runs of what needs more than one forward pass of a step: columns asked for before it, and several steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import books_close, same_weights, small_run
from safetensors.torch import load_file
from test_runs import run_and_kill

from headrace.algorithms import turns_of
from headrace.envs import SingleTurn
from headrace.records import Episode, FinishReason, Source
from headrace.settings import ConfigError
from headrace.trainer import DeviceTrainer

if TYPE_CHECKING:
    from headrace.records import Array, Batch


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
        staleness={"max_lag": 1, "gate": "none"},
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

    pattern = r"train.advantage = 'group': episode 'g\d+/\d+' has step_rewards, which only 'gae', 'turn', 'turn_gae' look at"
    with pytest.raises(ConfigError, match=pattern):
        small_run(tmp_path / "refused", steps=1, held_out=None, environment=Stepwise())
    for number, train in enumerate(({"advantage": "gae", "loss": "ppo"}, {"advantage": "turn"})):
        small_run(tmp_path / f"run{number}", steps=1, held_out=None, environment=Stepwise(), train=train)


class TwoTurns:
    """The first turn earns a step reward of its own: 1 if it begins with a digit."""

    async def run(self, task, client) -> Episode:
        rollout = await client.generate(client.prompt(task["prompt"]))
        first = float(client.text(rollout)[:1].isdigit())
        rollout = rollout.append(client.prompt("next").token_ids, source=Source.TOOL)
        rollout = (await client.generate(rollout)).replace(step_rewards=((len(rollout) - 1, first),))
        return Episode(id=client.episode, group=client.group, task=task, rollouts=(rollout,), environment="two_turns")


@pytest.mark.parametrize("advantage", ["turn", "turn_gae"])
def test_turns_are_trained_by_advantages_of_their_own(tmp_path, monkeypatch, advantage: str) -> None:
    trained, backward = [], DeviceTrainer.forward_backward

    def forward_backward(self: DeviceTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return backward(self, batch)

    monkeypatch.setattr(DeviceTrainer, "forward_backward", forward_backward)
    train = {"advantage": advantage, "loss": "ppo" if advantage == "turn_gae" else "grpo"}
    how = {"environment": TwoTurns(), "train": train, "sampling": {"max_tokens": 4}}
    result, differ = small_run(tmp_path / "run", steps=2, held_out=None, **how), 0
    for batch in trained:
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            turns = turns_of(rollout)
            assert turns.max() == 1 and not values[turns < 0].any()
            (first,), (second,) = (set(values[turns == turn].tolist()) for turn in (0, 1))
            differ += first != second
    assert len(trained) == 2 and differ > 8 and books_close(result.summary)


ADAPTING = {
    **{"mini_batches": 2, "epochs": 2, "kl": 0.1, "kl_target": 0.001, "kl_horizon": 16, "reference_every": 2},
    **{"reference_mix": 0.5, "entropy": 0.01, "entropy_target": 9.0, "entropy_quantile": 0.5},
}


def test_all_that_adapts_is_resumed_to_the_bit(tmp_path, monkeypatch) -> None:
    """Killed after version 3, with the checkpoint of version 2: epochs, adapted weights, a reference mixed at 2 and 4."""
    settings = {"exact": True, "steps": 4, "held_out": None, "checkpoint": {"every": 2}, "train": ADAPTING}
    settings["staleness"] = {"max_lag": 1, "correct": "tis"}
    whole = small_run(tmp_path / "whole", **settings)
    run_and_kill(tmp_path / "killed", monkeypatch, at=3, **settings)
    small_run(tmp_path / "killed", **settings)
    for step in (2, 4):
        ours, theirs = (tmp_path / name / "checkpoints" / f"step-{step}" for name in ("whole", "killed"))
        assert same_weights(ours, theirs)
        left, right = (load_file(folder / "trainer/reference.safetensors") for folder in (ours, theirs))
        assert left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)
    found = rows(tmp_path / "whole")
    names = ("train/kl_weight", "train/entropy_weight", "train/reference_version", "train/loss")
    assert [[row[name] for name in names] for row in found] == [
        [row[name] for name in names] for row in rows(tmp_path / "killed")
    ]
    assert [row["train/reference_version"] for row in found] == [0, 0, 2, 2]
    assert [row["train/entropy_weight"] for row in found] == pytest.approx([0.01 + 0.005 * step for step in range(4)])
    assert len({row["train/kl_weight"] for row in found}) == 4 and found[0]["train/kl_weight"] == 0.1
    assert all(row["train/masked"] >= 0.4 for row in found), "half of the tokens have no loss"
    assert whole.summary["accounting"]["trained"] == 4 * 16, "each rollout once, however many epochs"
    assert whole.summary["tokens"]["trained"] == sum(round(16 * row["completions/mean_length"]) for row in found)


def test_every_epoch_takes_its_ratios_against_the_start_of_the_version(tmp_path, monkeypatch) -> None:
    asked, trained = [], []
    forward, backward = DeviceTrainer.forward, DeviceTrainer.forward_backward

    def counting(self: DeviceTrainer, batch: Batch, *, column: str = "proximal") -> list[Array]:
        asked.append(column)
        return forward(self, batch, column=column)

    def keeping(self: DeviceTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return backward(self, batch)

    monkeypatch.setattr(DeviceTrainer, "forward", counting)
    monkeypatch.setattr(DeviceTrainer, "forward_backward", keeping)
    train = {"loss": "decoupled_ppo", "epochs": 3, "kl": 0.1, "schedule": "linear", "learning_rate": 0.02}
    result = small_run(tmp_path / "run", steps=2, held_out=None, train=train)
    assert result.summary["version"] == 2 and len(trained) == 6 and asked.count("reference") == 2
    for first in (0, 3):
        proximal = [[rollout.columns["proximal"] for rollout in batch.rollouts] for batch in trained[first : first + 3]]
        assert all(ours is theirs for other in proximal[1:] for ours, theirs in zip(proximal[0], other, strict=True))
    found = rows(tmp_path / "run")
    assert [row["train/learning_rate"] for row in found] == pytest.approx([0.02, 0.01]), "by versions"
    assert all(row["train/clipped"] > 0 for row in found), "later epochs have moved away"


def test_a_reference_that_cannot_take_the_policys_weights_is_refused(tmp_path, tiny_model) -> None:
    train = {"kl": 0.1, "reference_every": 2, "reference": tiny_model}
    with pytest.raises(ConfigError, match=r"train.reference_every = 2: train.reference = .* has another shape than the model"):
        small_run(tmp_path / "run", train=train)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_trainer_in_its_own_process_adapts_as_one_in_line_does(tmp_path) -> None:
    settings = {"exact": True, "steps": 4, "held_out": None, "staleness": {"max_lag": 0}, "train": ADAPTING}
    inline = small_run(tmp_path / "inline", **settings)
    local = small_run(tmp_path / "local", **settings, orchestrate="local", engine={"slots": 8})
    assert local.summary["status"] == "finished"
    assert books_close(local.summary)
    assert same_weights(inline.folder / "checkpoints" / "step-4", local.folder / "checkpoints" / "step-4")
    left, right = (load_file(run.folder / "checkpoints/step-4/trainer/reference.safetensors") for run in (inline, local))
    assert all(left[name].equal(right[name]) for name in left)
    ours, theirs = ([row["train/kl_weight"] for row in rows(run.folder)] for run in (inline, local))
    assert ours == theirs


@pytest.mark.parametrize("is_masked", [False, True])
def test_rewards_by_name_reach_the_advantages_and_a_batch_cut_off_everywhere_trains_nothing(
    tmp_path, monkeypatch, is_masked: bool
) -> None:
    trained: list[Batch] = []
    backward = DeviceTrainer.forward_backward

    def forward_backward(self: DeviceTrainer, batch: Batch) -> dict[str, float]:
        trained.append(batch)
        return backward(self, batch)

    def odd(completion: str) -> float:
        return 100.0 * (len(completion) % 2)

    def early(completion: str) -> float:
        return float(sum(map(ord, completion)) % 3)

    monkeypatch.setattr(DeviceTrainer, "forward_backward", forward_backward)
    train = {"normalize_each_reward": True, "advantage": "global", "mask_truncated": is_masked}
    sampling = {"max_tokens": 1}  # so that nearly all end there
    run = small_run(
        tmp_path / "run", steps=1, held_out=None, reward=[odd, early], reward_weights=[2.0, 1.0], train=train, sampling=sampling
    )
    (batch,) = trained
    assert run.summary["accounting"]["trained"] == len(batch.rollouts) == 16
    assert {"odd", "early"} <= batch.rollouts[0].rewards.keys()
    is_cut = [rollout.finish_reason is FinishReason.LENGTH for rollout in batch.rollouts]
    assert sum(is_cut) > 8
    assert [not rollout.loss_mask.any() for rollout in batch.rollouts] == [is_masked and cut for cut in is_cut]
    size = len(batch.rollouts) // len({rollout.group for rollout in batch.rollouts})
    summed = []
    for start in range(0, 16, size):
        parts = [rollout.rewards for rollout in batch.rollouts[start : start + size]]
        each = {name: np.array([part[name] for part in parts]) for name in ("odd", "early")}
        scaled = {name: (v - v.mean()) / v.std() if v.std() else np.zeros(size) for name, v in each.items()}
        summed += (2 * scaled["odd"] + scaled["early"]).tolist()
    expected = (np.array(summed) - np.mean(summed)) / (np.std(summed) or 1)
    for rollout, values, wanted in zip(batch.rollouts, batch.advantages, expected, strict=True):
        np.testing.assert_allclose(values, np.where(rollout.loss_mask, wanted, 0), atol=1e-5)
