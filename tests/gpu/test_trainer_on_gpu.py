"""The trainer on a GPU: compiled layers, kernels, and everything that saves memory, against plain float32 arithmetic."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import families
import numpy as np
import pytest
import torch
from helpers import small_run

from headrace.algorithms import REFERENCE
from headrace.bench.loads import make_rollouts
from headrace.lora import LoraSettings, add_adapter
from headrace.model import narrow
from headrace.model.load import prepare
from headrace.model.tiny import build_tokenizer
from headrace.observe.sinks import read_metrics
from headrace.records import Batch
from headrace.trainer import DeviceTrainer, FrozenModel, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

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


def make(
    family: str, *, device: str, dtype: torch.dtype, std: float = 0.2, lora: LoraSettings | None = None, **settings
) -> DeviceTrainer:
    """`std` of matrices: with 0.2 attention is so sharp that bfloat16 alone moves a gradient by a tenth."""
    model = families.make(family)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and std != 0.2:
            torch.nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(parameter.numel()))
    prepare(model, name=family)
    if lora is not None:
        for index, parameter in enumerate(add_adapter(model, lora).to(device).parameters()):
            draws = torch.Generator().manual_seed(index)
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=draws))
    model.to(device)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_narrow_gradients_are_near_and_do_not_depend_on_sharing(family: str, dtype: torch.dtype) -> None:
    exact = make(family, device="cpu", dtype=torch.float32, std=0.05)
    exact.forward_backward(batch())
    narrow = {}
    for share in (True, False):
        trainer = make(family, device="cuda", dtype=dtype, std=0.05, share_prefixes=share)
        trainer.forward_backward(batch())
        scale = trainer.optimizer.loss_scale
        narrow[share] = gradient(trainer) / (1.0 if scale is None else scale.value)
        assert apart(narrow[share], gradient(exact)) < 0.03
    assert apart(narrow[True], narrow[False]) < 0.03


def test_an_adapters_gradient_through_compiled_layers_is_near_and_its_reference_is_the_base() -> None:
    found, references = [], []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        trainer = make("qwen3", device=device, dtype=dtype, std=0.05, lora=LoraSettings(rank=8, alpha=16.0))
        trainer.forward_backward(batch())
        found.append(gradient(trainer))
        references.append(np.concatenate(trainer.forward(batch(), column=REFERENCE)))
        policy = np.concatenate(trainer.forward(batch()))
        assert np.abs(policy - references[-1]).max() > 1e-3
        if device == "cuda":
            assert trainer.model.base_model.layers[-1]._compiled_call_impl is not None
    assert apart(found[1], found[0]) < 0.03
    np.testing.assert_allclose(references[1], references[0], atol=0.05)


@pytest.mark.parametrize("settings", [{}, {"recompute": "layers", "router_aux": 0.01}])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_gradients_through_compiled_experts_are_near(family: str, settings: dict) -> None:
    """With the same experts forced on both sides, so that no rounding chooses others."""
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        trainer = make(family, device=device, dtype=dtype, std=0.05, **settings)
        routers, given = trainer._routers, batch()
        scores = np.random.default_rng(0).random((64, routers.num_layers, routers.num_experts))
        table = scores.argsort(axis=-1)[..., : routers.top_k].astype(np.uint8)
        rollouts = tuple(
            each.replace(expert_routing=np.vstack([table[: len(each) - 1], table[:1] | 255])) for each in given.rollouts
        )
        trainer.forward_backward(dataclasses.replace(given, rollouts=rollouts))
        found.append(gradient(trainer))
        if device == "cuda":
            assert trainer.model.base_model.layers[-1]._compiled_call_impl is not None
            trainer.forward_backward(given)  # and routed freely
    assert apart(found[1], found[0]) < 0.05


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


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_each_optimizer_steps_as_on_a_cpu_and_offloaded(optimizer: str) -> None:
    """Muon orthogonalises in bfloat16 here, 8-bit codes may round to a neighbour: near, over three steps of a float16 model."""
    moved = {}
    for device, offload in (("cpu", ()), ("cuda", ()), ("cuda", ("optimizer",))):
        dtype = torch.float32 if device == "cpu" else torch.float16
        trainer = make("qwen3", device=device, dtype=dtype, std=0.05, optimizer=optimizer, offload=offload)
        names = sorted(trainer.optimizer.names)
        start = {name: trainer.optimizer.master(name).cpu().clone() for name in names}
        for _ in range(3):
            trainer.forward_backward(batch())
            seen = trainer.optim_step(1e-4)
            assert seen["skipped"] == 0 and seen.get("overflowed", 0) == 0
        trainer.optimizer.settle()
        moved[device, offload] = torch.cat([(trainer.optimizer.master(n).cpu() - start[n]).flatten() for n in names])
    exact, here, away = moved.values()
    assert apart(here, exact) < 0.15
    torch.testing.assert_close(away, here, atol=1e-6, rtol=1e-2)


def test_an_overflow_on_a_gpu_is_cured() -> None:
    trainer = make("qwen3", device="cuda", dtype=torch.float16, std=0.05)
    assert trainer.optimizer.loss_scale is not None
    trainer.optimizer.loss_scale.value = 2.0**24
    seen = []
    for _ in range(9):
        trainer.forward_backward(batch())
        seen.append(trainer.optim_step(1e-4))
    assert seen[0]["overflowed"] == 1 and seen[-1]["overflowed"] == 0 and not any(step["skipped"] for step in seen)


def test_a_run_in_float16(tmp_path: Path) -> None:
    """Engine, trainer and weight sync on the GPU."""
    small = {"model": {"dtype": "float16"}, "train": {"optimizer": "muon"}, "orchestrate": "local", "device": "cuda"}
    result = small_run(tmp_path / "run", steps=4, **small)
    rows = read_metrics(result.folder / "metrics.jsonl")
    assert result.summary["status"] == "finished" and len(rows) == 4
    assert all(row["train/skipped"] == 0 for row in rows)
    assert max(row["train/mismatch"] for row in rows if "train/mismatch" in row) < 0.02


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_an_entropy_bonus_has_the_gradient_of_the_cpu(family: str) -> None:
    """The backward kernel with entropies, with and without a soft cap."""
    asked, found = dataclasses.replace(batch(), entropy_weight=0.5), []
    for device in ("cpu", "cuda"):
        trainer = make(family, device=device, dtype=torch.float32)
        trainer.forward_backward(asked)
        found.append(gradient(trainer))
    assert apart(found[1], found[0]) < 2e-4


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_is_mixed_and_kept_wherever_it_waits(offload: bool) -> None:
    def frozen() -> FrozenModel:
        model = prepare(families.make("qwen3"), name="qwen3").to("cuda")
        narrow(model, torch.bfloat16)
        return FrozenModel(model, offload=offload, keep_digits=True)

    reference, trainer = frozen(), make("qwen3", device="cuda", dtype=torch.bfloat16, std=0.05)
    start = {name: tensor.float() for name, tensor in reference.state().items()}
    for _ in range(3):
        reference.mix(trainer.arena, 0.1)
    policy = dict(trainer.tensors())
    for name, tensor in reference.state().items():
        torch.testing.assert_close(tensor, start[name].lerp(policy[name].float().cpu(), 1 - 0.9**3), atol=1e-5, rtol=1e-4)
    with reference:
        for name, tensor in reference.arena:
            torch.testing.assert_close(tensor.float().cpu(), reference.state()[name].to(tensor.dtype).float())
    again = frozen()
    again.load_state(reference.state())
    for name, tensor in again.state().items():
        assert torch.equal(tensor, reference.state()[name])
