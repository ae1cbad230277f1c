"""Losses, means and masks against TRL's own, on the same numbers: its loss is called unbound, with a stand-in for itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from per_token import COUNTS, VERSION, make_tokens

from headrace.algorithms import batch_advantages, sum_of_normalised
from headrace.algorithms.token_objective import objective
from headrace.records import Batch

pytestmark = pytest.mark.long  # TRL takes seconds to import
LENGTH = 16
"""TRL's max_completion_length, our sampling.max_tokens."""
OF_ROLLOUT = torch.tensor([-0.7, 0.0, -1.2, 2.0, -0.4, 0.9], dtype=torch.float64)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}

CASES = {
    # name: TRL's settings, our loss, constants and mean
    "grpo": ({"loss_type": "grpo"}, "grpo", CLIPS, "sequence"),
    "bnpo": ({"loss_type": "bnpo"}, "grpo", CLIPS, "token"),
    "dapo": ({"loss_type": "dapo"}, "grpo", CLIPS, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "grpo", CLIPS, "constant"),
    "delta": ({"loss_type": "dapo", "delta": 1.5}, "grpo", {**CLIPS, "dual_clip": 1.5}, "token"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, "cispo", {"clip_low": 1.0, "clip_high": 0.5}, "token"),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo", CLIPS, "sequence"),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "luspo", CLIPS, "sum"),
    "sapo": ({"loss_type": "sapo"}, "sapo", {}, "sequence"),
    "vespo": ({"loss_type": "vespo"}, "vespo", {}, "token"),
    "gmpo": ({"epsilon_low": 0.4, "epsilon_high": 0.4}, "gmpo", {}, "sequence"),
}


def padded(values: torch.Tensor) -> torch.Tensor:
    """[rollouts, longest]: one row a rollout, 0 behind its end."""
    rows, start = [], 0
    for count in COUNTS:
        rows.append(torch.nn.functional.pad(values[start : start + count], (0, max(COUNTS) - count)))
        start += count
    return torch.stack(rows)


def trl_loss(logprobs: torch.Tensor, old: torch.Tensor, **settings: Any) -> torch.Tensor:
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    given = {"loss_type": None, "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, **settings}
    constants = {"delta": given.pop("delta", None), "use_bias_correction_kl": False, "steps_per_generation": 1}
    constants |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    constants |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    mask = padded(torch.ones_like(old))
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda tensor, reduction: tensor, gather=lambda tensor: torch.atleast_1d(tensor)
    )
    trainer: Any = SimpleNamespace(
        **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0, "use_vllm": False, **given},
        args=SimpleNamespace(**constants),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(logprobs), torch.zeros_like(mask), None),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )
    ids = torch.zeros(len(COUNTS), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": mask.long(),
        "completion_mask": mask,
        "advantages": OF_ROLLOUT,
        "old_per_token_logps": padded(old),
        "num_items_in_batch": mask.sum(),
    }
    kind = GRPOTrainer if trainer.loss_type else GMPOTrainer
    return kind._compute_loss(trainer, None, inputs)


def our_loss(name: str, constants: dict[str, float], mean: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient) by logprob."""
    tokens = make_tokens(spread=0.3)
    tokens = replace(tokens, advantages=OF_ROLLOUT[tokens.sequence])
    lengths = torch.tensor(COUNTS, dtype=torch.float64)[tokens.sequence]
    weights = {
        "token": torch.full_like(lengths, 1 / sum(COUNTS)),
        "sequence": 1 / (len(COUNTS) * lengths),
        "sum": torch.full_like(lengths, 1 / len(COUNTS)),
        "constant": torch.full_like(lengths, 1 / (len(COUNTS) * LENGTH)),
    }[mean]
    batch = Batch(rollouts=(), advantages=(), weights=(), loss=name, constants=constants, version=VERSION, **changes)
    asked = objective(tokens, weights, batch)
    asked.loss.backward()
    assert tokens.logprobs.grad is not None
    return asked.loss.detach(), tokens.logprobs.grad


@pytest.mark.parametrize("name", CASES)
def test_a_loss_with_its_mean_is_trls(name: str) -> None:
    settings, loss, constants, mean = CASES[name]
    tokens = make_tokens(spread=0.3)
    theirs = trl_loss(tokens.logprobs, tokens.old, **settings)
    theirs.backward()
    value, gradient = our_loss(loss, constants, mean)
    torch.testing.assert_close(value, theirs.detach())
    torch.testing.assert_close(gradient, tokens.logprobs.grad)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("limit", [1e-4, 0.05])
def test_opsm_is_trls_off_policy_mask(limit: float) -> None:
    tokens = make_tokens(spread=0.3)
    theirs = trl_loss(tokens.logprobs, tokens.old, loss_type="dapo", off_policy_mask_threshold=limit)
    theirs.backward()
    value, gradient = our_loss("grpo", CLIPS, "token", corrections={"opsm": {"limit": limit}})
    torch.testing.assert_close(value, theirs.detach())
    torch.testing.assert_close(gradient, tokens.logprobs.grad)
    assert not torch.equal(gradient, our_loss("grpo", CLIPS, "token")[1])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_scaled_advantages_are_trls(scale: str) -> None:
    """But for its 1e-4 on the divisor and its sample standard deviation: √(n ÷ (n − 1)) times ours."""
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([[0.0, 1.0, 1.0, 4.0], [2.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
    spread = {"group": nanstd(rewards, dim=1, keepdim=True), "batch": nanstd(rewards), "none": torch.ones(())}[scale]
    count = {"group": 4, "batch": 8, "none": float("inf")}[scale]
    theirs = (rewards - rewards.mean(dim=1, keepdim=True)) / spread * ((count / (count - 1)) ** 0.5 if scale != "none" else 1)
    ours = batch_advantages(rewards.tolist(), baseline="group", scale=scale)
    np.testing.assert_allclose(np.stack(ours), theirs.numpy(), rtol=1e-6)


def test_rewards_normalised_one_by_one_are_trls() -> None:
    """`multi_objective_aggregation = "normalize_then_sum"`, with the same two differences."""
    from trl.trainer.utils import nanstd

    grouped = torch.tensor([[[1.0, 0.0], [0.0, 9.0], [0.0, 0.0]], [[1.0, 3.0], [1.0, 3.5], [0.0, 0.5]]], dtype=torch.float64)
    each = (grouped - grouped.mean(dim=1, keepdim=True)) / nanstd(grouped, dim=1, keepdim=True) * (3 / 2) ** 0.5
    summed = (each * torch.tensor([1.0, 0.5], dtype=torch.float64)).sum(-1)
    theirs = (summed - summed.mean()) / nanstd(summed) * (6 / 5) ** 0.5
    parts = [[{"right": right, "short": short} for right, short in group] for group in grouped.tolist()]
    rewards = [sum_of_normalised(group, weights={"right": 1.0, "short": 0.5}) for group in parts]
    ours = batch_advantages(rewards, baseline="global", scale="batch")
    np.testing.assert_allclose(np.stack(ours), theirs.numpy(), atol=1e-6)
