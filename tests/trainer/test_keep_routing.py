"""The trainer computes with the experts that the engine used, whatever its own routers would choose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from routed import every_family, freed, gradient, make_batch, make_model, make_trainer, nudged, rounded, sampled

from headrace.algorithms import REFERENCE
from headrace.model.head import Head
from headrace.model.load import ModelError
from headrace.model.packing import score
from headrace.records import unknown_expert
from headrace.trainer import FrozenModel

if TYPE_CHECKING:
    from collections.abc import Callable


@every_family
def test_every_layer_of_a_training_pass_uses_the_recorded_experts(family: str) -> None:
    rollout = sampled(make_model(family), count=1)[0]
    trainer = make_trainer(make_model(family, change=nudged))
    known = rollout.expert_routing[:-1].astype(np.int64)
    assert (rollout.expert_routing[-1] == 255).all() and (known < 4).all()

    def used(action: Callable[[], object]) -> np.ndarray:
        chosen: dict[int, torch.Tensor] = {}
        with trainer._routers.recording(chosen.__setitem__):
            action()
        assert sorted(chosen) == list(range(3 if family == "deepseek_v3" else 4))
        return torch.stack([chosen[layer] for layer in sorted(chosen)], dim=1).numpy()

    batch, freely = make_batch((rollout,)), make_batch(freed((rollout,)))
    free = used(lambda: trainer.forward(freely))[:-1]
    assert np.array_equal(used(lambda: trainer.forward(batch))[:-1], known)
    seen: dict[str, float] = {}
    assert np.array_equal(used(lambda: seen.update(trainer.forward_backward(batch)))[:-1], known)
    for name, parameter in trainer.model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            assert float(parameter.grad.abs().max()) > 0, name
    # A later layer's live choice follows forced experts below it, so that only the first layer's is known from a free pass.
    differs = (np.sort(free[:, 0]) != np.sort(known[:, 0])).any(axis=-1)
    assert differs.any() and 0 < seen["routing_differs"] < 1
    assert "routing_differs" not in trainer.forward_backward(freely)


def test_the_share_of_differing_choices_counts_rows_that_predict_a_target() -> None:
    rollout = sampled(make_model("mixtral"), count=1)[0]
    trainer = make_trainer(make_model("mixtral"))
    at = np.flatnonzero(rollout.loss_mask)
    assert trainer.forward_backward(make_batch((rollout,)))["routing_differs"] == 0
    last = rollout.expert_routing.copy()
    last[0, 3] = [each for each in range(4) if each not in last[0, 3]]  # of the prompt: not counted
    last[at[2] - 1, 3] = [each for each in range(4) if each not in last[at[2] - 1, 3]]  # the last layer, which no other sees
    seen = trainer.forward_backward(make_batch((rollout.replace(expert_routing=last),)))["routing_differs"]
    assert seen == pytest.approx(1 / (4 * len(at)))
    last[at[-1] - 1] = unknown_expert(last.dtype)  # routed freely: not counted
    seen = trainer.forward_backward(make_batch((rollout.replace(expert_routing=last),)))["routing_differs"]
    assert seen == pytest.approx(1 / (4 * (len(at) - 1)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_gradient_depends_on_the_recorded_routing_and_not_on_packing(family: str) -> None:
    rollouts = sampled(make_model(family))
    batch, found = make_batch(rollouts), []
    ways = [{"share_prefixes": False}, {}, {"micro_batch_tokens": 40}, {"recompute": "layers"}]
    for way in ways:
        trainer = make_trainer(make_model(family, change=nudged), **way)
        seen = trainer.forward_backward(batch)
        found.append((gradient(trainer), seen))
    (reference, first), *others = found
    for other, seen in others:
        assert float((other - reference).norm() / reference.norm()) < 1e-5
        assert seen["routing_differs"] == pytest.approx(first["routing_differs"], abs=1e-9) and first["routing_differs"] > 0
        assert seen["mismatch"] == pytest.approx(first["mismatch"], rel=1e-4)
    trainer = make_trainer(make_model(family, change=nudged))
    trainer.forward_backward(make_batch(freed(rollouts)))
    assert float((gradient(trainer) - reference).norm() / reference.norm()) > 1e-2


def test_siblings_share_a_prompt_only_where_its_routing_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling whose prompt went to other experts, as after a weight update, is computed with its own."""
    rollouts = sampled(make_model("qwen3_moe"))
    routing = rollouts[2].expert_routing.copy()
    routing[4] = (routing[4] + 1) % 4
    moved = (*rollouts[:2], rollouts[2].replace(expert_routing=routing), rollouts[3])
    rows, forward = [], torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: rows.append(ids.numel()) or forward(self, ids))
    trainer, apart = (make_trainer(make_model("qwen3_moe"), share_prefixes=share) for share in (True, False))
    rows.clear()
    together = [trainer.forward(make_batch(each)) for each in (rollouts, moved)]
    prompt = int(np.flatnonzero(rollouts[0].loss_mask)[0])
    assert rows[1] - rows[0] == prompt - 4  # the part before the fifth token is still shared
    for one, other in zip(together[1], apart.forward(make_batch(moved)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)
    assert not np.allclose(together[1][2], together[0][2], atol=1e-4)


@every_family
def test_at_equal_weights_an_exact_pass_is_replayed_bit_for_bit(family: str) -> None:
    rollouts = sampled(make_model(family, exact=True), exact=True)
    trainer = make_trainer(make_model(family, exact=True), exact=True)
    seen = trainer.forward_backward(make_batch(rollouts))
    assert seen["mismatch_max"] == 0 and seen["routing_differs"] == 0
    for rollout, logprobs in zip(rollouts, trainer.forward(make_batch(rollouts)), strict=True):
        assert np.array_equal(logprobs[rollout.loss_mask], rollout.logprobs[rollout.loss_mask])


def test_replay_shrinks_the_mismatch_of_engine_weights_rounded_to_bfloat16() -> None:
    rollouts = sampled(make_model("qwen3_moe", change=rounded), count=12)
    trainer = make_trainer(make_model("qwen3_moe"))
    kept, free = (trainer.forward_backward(make_batch(each)) for each in (rollouts, freed(rollouts)))
    assert kept["routing_differs"] > 0
    assert kept["mismatch"] < 0.7 * free["mismatch"] and kept["mismatch_max"] < 0.5 * free["mismatch_max"]


def test_a_reference_routes_freely() -> None:
    rollouts = sampled(make_model("mixtral"))
    frozen = {REFERENCE: FrozenModel(make_model("mixtral", change=nudged))}
    trainer = make_trainer(make_model("mixtral"), frozen=frozen, kl=0.1)
    other = make_model("mixtral", change=nudged)
    expected = score(other, Head(other), freed(rollouts), budget=4096)
    for rollout, one, found in zip(rollouts, expected, trainer.forward(make_batch(rollouts), column=REFERENCE), strict=True):
        np.testing.assert_allclose(found[rollout.loss_mask], one[rollout.loss_mask], atol=1e-5, rtol=1e-5)


def test_routing_of_another_model_is_refused_before_a_gradient_is_taken() -> None:
    rollouts = sampled(make_model("qwen3_moe"))
    trainer, clean = (make_trainer(make_model("qwen3_moe")) for _ in range(2))
    deep = dataclasses.replace(rollouts[3], expert_routing=np.zeros((len(rollouts[3]), 5, 2), np.uint8))
    with pytest.raises(ModelError, match=r"rollout '3': its expert_routing is of 5 layers with 2"):
        trainer.forward_backward(make_batch((*rollouts[:3], deep)))
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    for each in (trainer, clean):
        each.forward_backward(make_batch(rollouts))
    assert torch.equal(gradient(trainer), gradient(clean))
    with pytest.raises(ModelError, match="the model has no experts"):
        make_trainer(make_model("qwen3")).forward_backward(make_batch(rollouts))
