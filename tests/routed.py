"""Models with experts, rollouts of theirs with the engine's routing, and their trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from families import FAMILIES, MOE, make
from stepping import ask, make_core, run

from headrace.model.load import prepare
from headrace.model.tiny import build_tokenizer
from headrace.records import Batch, Rollout, Sampling
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    import transformers

FAMILIES_WITH_EXPERTS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"]
_OFTEN = ("qwen3_moe", "deepseek_v3")
every_family = pytest.mark.parametrize(
    "family", [each if each in _OFTEN else pytest.param(each, marks=pytest.mark.long) for each in FAMILIES_WITH_EXPERTS]
)
"""Two of them in `make test`, all of them in `make test-all`."""


def make_model(family: str, *, exact: bool = False, change: Callable | None = None) -> transformers.PreTrainedModel:
    if family == "granitemoe":
        FAMILIES.setdefault(family, ("GraniteMoeConfig", MOE))
    model = make(family)
    if change is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(change(parameter))
    return prepare(model, name=family, exact=exact)


def nudged(parameter: torch.Tensor) -> torch.Tensor:
    return parameter + 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))


def rounded(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.bfloat16().float()


def sampled(model: transformers.PreTrainedModel, *, exact: bool = False, count: int = 4) -> tuple[Rollout, ...]:
    """Siblings of two prompts, with the engine's routing."""
    core = make_core(model, exact=exact, record_routing=True)
    prompts = [np.random.default_rng(group).integers(3, 96, size=11 + 3 * group) for group in range(2)]
    asked = [
        ask(
            core,
            Rollout.from_prompt(prompts[index % 2], id=str(index), group=str(index % 2), index=index),
            Sampling(max_tokens=8 + 3 * index, seed=index),
        )
        for index in range(count)
    ]
    run(core)
    return tuple(each.done for each in asked)


def make_batch(rollouts: tuple[Rollout, ...], **changes: object) -> Batch:
    total = sum(each.num_sampled for each in rollouts)
    values = {
        "advantages": tuple(np.where(each.loss_mask, 1.0 - each.index % 3, 0).astype(np.float32) for each in rollouts),
        "weights": tuple((each.loss_mask / total).astype(np.float32) for each in rollouts),
        "loss": "reinforce",
        "version": 0,
    }
    return Batch(rollouts=rollouts, **{**values, **changes})


def make_trainer(model: transformers.PreTrainedModel, *, exact: bool = False, frozen: dict | None = None, **settings: object):
    settings = TrainSettings(**settings)
    return DeviceTrainer(model, tokenizer=build_tokenizer(), settings=settings, exact=exact, frozen=frozen)


def freed(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    return tuple(each.replace(expert_routing=None) for each in rollouts)


def gradient(trainer: DeviceTrainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
