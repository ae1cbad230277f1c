"""Training with shared prompts: the same gradient whatever is shared, packed or ordered."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from siblings import mixed

from headrace.model.load import load_model, load_tokenizer
from headrace.records import Batch
from headrace.trainer import DeviceTrainer, TrainSettings


def make_batch() -> Batch:
    random, rollouts = np.random.default_rng(1), mixed()
    total = sum(rollout.num_sampled for rollout in rollouts)
    return Batch(
        rollouts=tuple(rollouts),
        advantages=tuple(np.where(rollout.loss_mask, random.normal(), 0).astype(np.float32) for rollout in rollouts),
        weights=tuple((rollout.loss_mask / total).astype(np.float32) for rollout in rollouts),
        loss="reinforce",
        version=0,
    )


def reordered(batch: Batch) -> Batch:
    order = np.random.default_rng(0).permutation(len(batch.rollouts))
    columns = {name: tuple(getattr(batch, name)[at] for at in order) for name in ("rollouts", "advantages", "weights")}
    return dataclasses.replace(batch, **columns)


def make_trainer(model_path: str, *, exact: bool = False, **settings: object) -> DeviceTrainer:
    model, tokenizer = load_model(model_path, exact=exact), load_tokenizer(model_path)
    return DeviceTrainer(model, tokenizer=tokenizer, settings=TrainSettings(**settings), exact=exact)


def gradient(trainer: DeviceTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def test_gradient_does_not_depend_on_sharing_packing_or_order(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32, summed in another order: relative difference of the whole gradient under 1e-5."""
    rows = []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: rows.append(ids.numel()) or forward(self, ids))
    batch, found = make_batch(), []
    cases = [(False, 16384, batch), (True, 16384, batch), (True, 64, batch), (True, 40, batch), (True, 150, reordered(batch))]
    for share, budget, given in cases:
        trainer = make_trainer(tiny_model, share_prefixes=share, micro_batch_tokens=budget)
        rows.clear()
        seen = trainer.forward_backward(given)
        found.append((gradient(trainer), seen, sum(rows)))
    (reference, first, all_rows), *others = found
    assert float(reference.norm()) > 1e-3 and all_rows == batch.num_tokens
    for shared, seen, fewer_rows in others:
        assert fewer_rows < all_rows
        assert float((shared - reference).norm() / reference.norm()) < 1e-5
        assert seen.keys() == first.keys()
        for name in seen:
            assert seen[name] == pytest.approx(first[name], rel=1e-5, abs=1e-5), name


def test_logprobs_come_back_in_the_order_of_the_batch(tiny_model: str) -> None:
    batch = make_batch()
    apart = make_trainer(tiny_model, share_prefixes=False).forward(batch)
    for budget in (16384, 64):
        shared = make_trainer(tiny_model, micro_batch_tokens=budget).forward(batch)
        for rollout, one, other in zip(batch.rollouts, apart, shared, strict=True):
            assert (one[rollout.loss_mask] < 0).all() and not other[~rollout.loss_mask].any()
            np.testing.assert_allclose(other, one, atol=1e-5, rtol=1e-5)


def test_nothing_is_shared_in_exact_mode(tiny_model: str) -> None:
    batch = make_batch()
    trainers = [make_trainer(tiny_model, exact=True, share_prefixes=share) for share in (True, False)]
    for trainer in trainers:
        trainer.forward_backward(batch)
    assert torch.equal(gradient(trainers[0]), gradient(trainers[1]))
