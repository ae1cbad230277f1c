"""Router losses against their formulas, one rollout and one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from routed import every_family, freed, gradient, make_batch, make_model, make_trainer, nudged, sampled

from headrace.settings import ConfigError
from headrace.trainer import TrainSettings

AUX, Z = 0.3, 0.02


def slow(trainer, batch, *, has_sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(balance, z) by the formulas."""
    num_targets = sum(each.num_sampled for each in batch.rollouts)
    balance, squares, outputs = [], [], []
    modules = [each for each in trainer.model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    handles = [each.register_forward_hook(lambda module, given, output: outputs.append(output)) for each in modules]
    for rollout in batch.rollouts:
        outputs.clear()
        tokens = torch.from_numpy(rollout.token_ids.astype(np.int64)).unsqueeze(0)
        trainer.model.set_attn_implementation("eager")
        trainer.model(tokens, use_cache=False)
        trainer.model.set_attn_implementation("headrace")
        rows = np.flatnonzero(rollout.loss_mask) - 1
        for output in outputs:
            logits = next(each for each in output if each.is_floating_point() and each.shape[-1] == 4)
            chosen = next(each for each in output if not each.is_floating_point())
            share, mean = torch.zeros(4), torch.zeros(4)
            for row in rows.tolist():
                for expert in chosen[row].tolist():
                    share[expert] += 1 / len(rows)
                scores = logits[row].sigmoid() if has_sigmoid else logits[row].exp()
                mean = mean + scores / scores.sum() / len(rows)
                squares.append(logits[row].exp().sum().log() ** 2 / len(outputs) / num_targets)
            balance.append(4 * (share * mean).sum() * len(rows) / num_targets / len(outputs))
    for handle in handles:
        handle.remove()
    return torch.stack(balance).sum(), torch.stack(squares).sum()


@every_family
def test_the_losses_are_their_formulas_in_any_packing(family: str) -> None:
    batch = make_batch(freed(sampled(make_model(family))))
    plain = make_trainer(make_model(family, change=nudged))
    plain_seen = plain.forward_backward(batch)
    aux, z = slow(plain, batch, has_sigmoid=family == "deepseek_v3")
    assert float(aux) > 2 and float(z) > 0
    (AUX * aux + Z * z).backward()
    expected = gradient(plain)
    for way in ({}, {"micro_batch_tokens": 40}, {"recompute": "layers"}, {"share_prefixes": False}):
        trainer = make_trainer(make_model(family, change=nudged), router_aux=AUX, router_z=Z, **way)
        seen = trainer.forward_backward(batch)
        assert seen["router_aux"] == pytest.approx(float(aux), rel=1e-5)
        assert seen["router_z"] == pytest.approx(float(z), rel=1e-4)
        assert seen["loss"] == pytest.approx(plain_seen["loss"] + AUX * float(aux) + Z * float(z), rel=1e-4, abs=1e-5)
        assert float((gradient(trainer) - expected).norm() / expected.norm()) < 1e-4
    assert not {"router_aux", "router_z"} & plain_seen.keys()


def test_the_balance_loss_balances() -> None:
    """Alone, it moves the router towards even use."""
    batch = make_batch(freed(sampled(make_model("qwen3_moe"))))
    batch = make_batch(batch.rollouts, advantages=tuple(np.zeros_like(each) for each in batch.advantages))
    trainer = make_trainer(make_model("qwen3_moe"), router_aux=1.0, learning_rate=1e-3)
    values = []
    for _ in range(12):
        values.append(trainer.forward_backward(batch)["router_aux"])
        trainer.optim_step(1e-3)
    assert values[-1] < values[0] - 0.05 and min(values) >= 2 * 0.9


def test_settings_that_cannot_be() -> None:
    for name in ("router_aux", "router_z"):
        with pytest.raises(ConfigError, match=name):
            TrainSettings(**{name: -0.1})
        with pytest.raises(ConfigError, match=rf"^train.{name} = 0.1: the model has no router to train; set it to 0"):
            make_trainer(make_model("qwen3"), **{name: 0.1})
