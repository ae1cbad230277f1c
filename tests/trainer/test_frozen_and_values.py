"""Models that are looked at, the value head, and passes that keep less."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_trainer import gradients, make_batch, nudge, rollouts

from headrace.algorithms.columns import REFERENCE, RETURNS, TEACHER, VALUES
from headrace.model.load import load_model, load_tokenizer
from headrace.trainer import DeviceTrainer, TrainSettings
from headrace.trainer.frozen_model import FrozenModel


def make(model_path: str, *, frozen: tuple[str, ...] = (), **settings) -> DeviceTrainer:
    looked_at = {name: FrozenModel(load_model(model_path)) for name in frozen}
    for model in looked_at.values():
        nudge(model.model)
    return DeviceTrainer(
        load_model(model_path), tokenizer=load_tokenizer(model_path), settings=TrainSettings(**settings), frozen=looked_at
    )


def test_a_reference_and_a_teacher_fill_their_columns(tiny_model: str) -> None:
    """What they give is what a trainer with their weights gives, and what comes with the rollouts is taken as it is."""
    items = rollouts(tiny_model, 6)
    trainer, other = make(tiny_model, frozen=(REFERENCE, TEACHER)), make(tiny_model)
    nudge(other.model)
    expected = other.forward(make_batch(items))
    for column in (REFERENCE, TEACHER):
        for ours, theirs in zip(trainer.forward(make_batch(items), column=column), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    asked = {"loss": "distill", "constants": {}, "kl": "k3", "kl_weight": 0.3}
    seen = trainer.forward_backward(make_batch(items, **asked))
    found = gradients(trainer)
    brought = tuple(
        item.replace(columns={REFERENCE: values, TEACHER: values}) for item, values in zip(items, expected, strict=True)
    )
    alone = make(tiny_model)
    assert alone.forward_backward(make_batch(list(brought), **asked))["loss"] == pytest.approx(seen["loss"], rel=1e-4)
    for name, gradient in gradients(alone).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3)


def ppo_batch(items, trainer: DeviceTrainer):
    values = trainer.forward(make_batch(items), column=VALUES)
    columned = [
        item.replace(columns={VALUES: value, RETURNS: np.where(item.loss_mask, 1.0, 0.0).astype(np.float32)})
        for item, value in zip(items, values, strict=True)
    ]
    return make_batch(columned, loss="ppo", constants={})


def test_a_value_head_learns_and_is_kept(tiny_model: str, tmp_path) -> None:
    items = rollouts(tiny_model, 6)
    trainer = make(tiny_model, loss="ppo", advantage="gae")
    assert not any(value.any() for value in trainer.forward(make_batch(items), column=VALUES))
    for _ in range(30):
        trainer.forward_backward(ppo_batch(items, trainer))
        trainer.optim_step(3e-3)
    learnt = trainer.forward(make_batch(items), column=VALUES)
    drawn = np.concatenate([value[item.loss_mask] for item, value in zip(items, learnt, strict=True)])
    assert 0.5 < drawn.mean() < 1.5
    trainer.save(tmp_path)
    assert (tmp_path / "trainer/optimizer.safetensors").is_file()
    resumed = make(tiny_model, loss="ppo", advantage="gae")
    resumed.load(tmp_path)
    for ours, theirs in zip(resumed.forward(make_batch(items), column=VALUES), learnt, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert "value_head.weight" not in dict(trainer.tensors())  # engines have none


def test_the_value_head_has_a_learning_rate_of_its_own(tiny_model: str) -> None:
    """Ten times the policy's where none is set; the schedule moves both."""
    items, found = rollouts(tiny_model, 6), {}
    for rate in (0.0, 5e-2):
        settings = {"learning_rate": 1e-6, "value_learning_rate": rate, "loss": "ppo", "advantage": "gae"}
        trainer = make(tiny_model, **settings)
        trainer.forward_backward(ppo_batch(items, trainer))
        seen = trainer.optim_step(5e-7)
        assert seen["learning_rate"] == 5e-7 and seen["value_learning_rate"] == pytest.approx(rate / 2 or 5e-6)
        assert seen["grad_norm"] > 0 and seen["value_grad_norm"] > 0
        found[rate] = float(trainer.optimizer.master("value_head.bias").abs())
    assert found[0.0] == pytest.approx(5e-6, rel=1e-3) and found[5e-2] == pytest.approx(2.5e-2, rel=1e-3)


def test_what_is_computed_again_has_the_same_gradient(tiny_model: str) -> None:
    batch = make_batch(rollouts(tiny_model, 8))
    found = []
    for recompute in ("none", "layers"):
        trainer = make(tiny_model, recompute=recompute)
        nudge(trainer.model)
        calls = []
        layer = trainer.model.base_model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.forward_backward(batch)
        found.append((len(calls), gradients(trainer)))
    assert found[1][0] == 2 * found[0][0]
    for name, gradient in found[0][1].items():
        assert torch.equal(found[1][1][name], gradient)


def test_an_optimizer_in_the_hosts_memory_trains_the_same(tiny_model: str) -> None:
    batch = make_batch(rollouts(tiny_model, 4))
    results = []
    for offload in ((), ("optimizer",)):
        trainer = make(tiny_model, offload=offload)
        for _ in range(3):
            trainer.forward_backward(batch)
            trainer.optim_step(1e-3)
        results.append({name: tensor.clone() for name, tensor in trainer.tensors()})
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=1e-7, rtol=1e-6)


def test_a_loss_over_whole_rollouts_is_the_same_judged_or_not(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gspo weighs a token by its whole rollout: where chunks hold whole ones it is judged in the head, else after it."""
    batch = make_batch(rollouts(tiny_model, 8), loss="gspo", constants={"clip_low": 0.3, "clip_high": 0.4})
    found = []
    for elements in (1 << 24, 32 * 96, 1):
        monkeypatch.setattr("headrace.model.fused_head._CHUNK_ELEMENTS", {"cpu": elements})
        trainer = make(tiny_model)
        nudge(trainer.model)
        seen = trainer.forward_backward(dataclasses.replace(batch))
        found.append((seen["loss"], gradients(trainer)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        for name, expected in found[0][1].items():
            torch.testing.assert_close(gradient[name], expected, atol=1e-6, rtol=1e-4)


def test_an_entropy_bonus_reaches_a_trainer_with_a_value_head(tiny_model: str) -> None:
    """There the loss is not called inside the head."""
    found = []
    for weight in (0.0, 0.5):
        trainer = make(tiny_model, loss="ppo", advantage="gae")
        nudge(trainer.model)
        batch = dataclasses.replace(ppo_batch(rollouts(tiny_model, 4), trainer), entropy_weight=weight)
        seen = trainer.forward_backward(batch)
        found.append((seen["loss"] + weight * seen["entropy"], torch.cat([g.flatten() for g in gradients(trainer).values()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    alone = make(tiny_model)
    nudge(alone.model)
    alone.forward_backward(
        make_batch(
            rollouts(tiny_model, 4),
            loss="reinforce",
            constants={},
            entropy_weight=0.5,
            advantages=[np.zeros(len(item), dtype=np.float32) for item in rollouts(tiny_model, 4)],
        )
    )
    bonus = torch.cat([g.flatten() for g in gradients(alone).values()])
    torch.testing.assert_close(found[1][1] - found[0][1], bonus, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_follows_the_policy_and_is_kept(tiny_model: str, tmp_path, dtype: str) -> None:
    """Mixed in float32, so that small shares add up in bfloat16 too, and restored to the bit."""

    def make_following(share: float) -> DeviceTrainer:
        held = FrozenModel(load_model(tiny_model, dtype=dtype), keep_digits=share < 1)
        settings = TrainSettings(kl=0.1, reference_every=1, reference_mix=share)
        return DeviceTrainer(
            load_model(tiny_model),
            tokenizer=load_tokenizer(tiny_model),
            settings=settings,
            dtype=getattr(torch, dtype),
            frozen={REFERENCE: held},
        )

    items = rollouts(tiny_model, 4)
    trainer = make_following(0.1)
    start = {name: tensor.float().clone() for name, tensor in trainer._frozen[REFERENCE].arena}
    nudge(trainer.model, scale=0.005)
    for _ in range(3):
        trainer.mix_reference(0.1)
    policy = {name: tensor.float() for name, tensor in trainer.tensors()}
    for name, tensor in trainer._frozen[REFERENCE].arena:
        wanted = start[name].lerp(policy[name], 1 - 0.9**3).to(tensor.dtype)
        torch.testing.assert_close(tensor, wanted, atol=1e-6, rtol=1e-2 if tensor.dtype == torch.bfloat16 else 1e-5)
    trainer.save(tmp_path)
    resumed = make_following(0.1)
    resumed.load(tmp_path)
    resumed.arena.copy_from(trainer.arena)  # a nudge does not reach the masters that are saved
    for each in (trainer, resumed):
        each.mix_reference(0.1)
    for (name, ours), (_, theirs) in zip(resumed._frozen[REFERENCE].arena, trainer._frozen[REFERENCE].arena, strict=True):
        assert torch.equal(ours, theirs), name
    whole = make_following(1.0)
    nudge(whole.model, scale=0.005)
    assert max(abs(float((a - b).max())) for a, b in zip(*reference_and_own(whole, items), strict=True)) > 1e-3
    whole.mix_reference(1.0)
    for reference, own in zip(*reference_and_own(whole, items), strict=True):
        np.testing.assert_array_equal(reference, own)


def reference_and_own(trainer: DeviceTrainer, items) -> tuple[list, list]:
    return trainer.forward(make_batch(items), column=REFERENCE), trainer.forward(make_batch(items))
