"""The trainer on a GPU: compiled layers, kernels, and everything that saves memory, against plain float32 arithmetic."""

from __future__ import annotations

import families
import numpy as np
import pytest
import torch

from headrace.bench.loads import make_rollouts
from headrace.model.load import prepare
from headrace.model.tiny import build_tokenizer
from headrace.records import Batch
from headrace.trainer import DeviceTrainer, TrainSettings

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "granite", "qwen3_moe", "deepseek_v3")


def batch(*, groups: int = 3, siblings: int = 4) -> Batch:
    """Groups that share a prompt, of completions of different lengths."""
    items = []
    for group in range(groups):
        for index in range(siblings):
            made = make_rollouts([20 + 9 * index + group], prompt_tokens=12, vocabulary=90, seed=group)[0]
            items.append(made.replace(id=f"{group}/{index}", episode=f"{group}/{index}", group=str(group), index=index))
    mask = np.concatenate([item.loss_mask for item in items])
    values = np.random.default_rng(0).normal(size=len(mask)).astype(np.float32)
    return Batch.from_columns(
        items, advantages=np.where(mask, values, 0), weights=mask.astype(np.float32) / mask.sum(), loss="reinforce", version=0
    )


def make(family: str, *, device: str, dtype: torch.dtype, std: float = 0.2, **settings) -> DeviceTrainer:
    """`std` of matrices: with 0.2 attention is so sharp that bfloat16 alone moves a gradient by a tenth."""
    model = families.make(family)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and std != 0.2:
            torch.nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(parameter.numel()))
    prepare(model, name=family).to(device)
    return DeviceTrainer(model, tokenizer=build_tokenizer(), settings=TrainSettings(**settings), dtype=dtype)


def gradient(trainer: DeviceTrainer) -> torch.Tensor:
    names = sorted(trainer.optimizer.names)
    return torch.cat([trainer.optimizer.gradient(name).flatten().cpu() for name in names])


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gradients_are_the_cpus(family: str) -> None:
    """Kernels with soft caps, sinks, windows, shared prefixes; sums in another order."""
    found = []
    for device in ("cpu", "cuda"):
        trainer = make(family, device=device, dtype=torch.float32)
        trainer.forward_backward(batch())
        found.append(gradient(trainer))
    assert apart(found[1], found[0]) < 2e-4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_bfloat16_gradients_are_near_and_do_not_depend_on_sharing(family: str) -> None:
    exact = make(family, device="cpu", dtype=torch.float32, std=0.05)
    exact.forward_backward(batch())
    narrow = {}
    for share in (True, False):
        trainer = make(family, device="cuda", dtype=torch.bfloat16, std=0.05, share_prefixes=share)
        trainer.forward_backward(batch())
        narrow[share] = gradient(trainer)
        assert apart(narrow[share], gradient(exact)) < 0.03
    assert apart(narrow[True], narrow[False]) < 0.03


@pytest.mark.parametrize("saving", [{"recompute": "layers"}, {"offload": ("activations",)}, {"offload": ("optimizer",)}])
def test_what_saves_memory_trains_the_same(saving: dict) -> None:
    weights = []
    for settings in ({}, saving):
        trainer = make("qwen3", device="cuda", dtype=torch.bfloat16, **settings)
        for _ in range(3):
            trainer.forward_backward(batch())
            assert trainer.optim_step(1e-3)["skipped"] == 0
        trainer.optimizer.settle()
        weights.append(torch.cat([trainer.optimizer.master(name).flatten().cpu() for name in sorted(trainer.optimizer.names)]))
    torch.testing.assert_close(weights[1], weights[0], atol=2e-3, rtol=2e-2)
