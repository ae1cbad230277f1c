"""Adapters of experts: PEFT's files, logits and gradients; several versions in a batch; refused where nothing applies them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import families
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from headrace.config import make_recipe
from headrace.engine.native.core import EngineCore
from headrace.engine.native.kind import NativeKind
from headrace.engine.request import HeldAdapter, Request
from headrace.engine.vllm.open import open_engine
from headrace.lora import AdapterError, LoraSettings, adapter_of, add_adapter, merge_adapter, read_settings, read_tensors
from headrace.model import Head, ModelError, build_tokenizer, prepare, score
from headrace.records import Batch, Rollout, Sampling
from headrace.settings import ConfigError
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from headrace.records import Array

BOTH = LoraSettings(rank=4, alpha=8.0, targets=("all", "experts"))
IDS = torch.arange(6, 30).unsqueeze(0)
VLLM = {"engine.kind": "vllm", "partial.interrupt": "lease", "staleness.max_lag": 1}
every_family = pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", *(pytest.param(each, marks=pytest.mark.long) for each in ("mixtral", "deepseek_v3"))]
)
"""One whose weights are [experts, out, in], one with [experts, in, out] and biases."""


def make_model(family: str, settings: LoraSettings | None = BOTH, *, seed: int = 1) -> PreTrainedModel:
    model = prepare(families.make(family), name=family)
    if settings is not None:
        adapter, draws = add_adapter(model, settings), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapter.own.values():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=draws))
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits[0]


def eager(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def assert_near(left: torch.Tensor, right: torch.Tensor) -> None:
    left, right = left.detach(), right.detach()
    assert float((left - right).abs().max()) <= 1e-5 * max(1.0, float(right.abs().max()))


@every_family
def test_what_is_written_computes_and_learns_the_same_in_peft(family: str, tmp_path: Path) -> None:
    # peft takes the dense gate_proj and up_proj of a DeepSeek for its experts, as transformers 4 named these
    ours = eager(make_model(family, LoraSettings(rank=4, targets=("o_proj", "experts")) if family == "deepseek_v3" else BOTH))
    adapter = adapter_of(ours)
    adapter.write(tmp_path, adapter.own, base="")
    theirs = PeftModel.from_pretrained(families.make(family), str(tmp_path), is_trainable=True).eval()
    found, expected = logits(ours), logits(theirs)
    with adapter.off():
        assert float((logits(ours) - found).detach().abs().max()) > 1e-2
    assert_near(found, expected)
    weighed = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)) / found.numel()
    for each in (found, expected):
        (each * weighed).sum().backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert gradients.keys() == adapter.own.keys() and any("experts.base_layer.lora_A" in name for name in gradients)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert_near(adapter.own[name].grad, gradient)
    again = make_model(family, None)
    add_adapter(again, read_settings(tmp_path), tensors=read_tensors(tmp_path))
    assert torch.equal(logits(eager(again)), found)
    merge_adapter(again)
    assert_near(logits(again), found)


@every_family
def test_what_peft_writes_loads_here(family: str, tmp_path: Path) -> None:
    named = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    if family == "deepseek_v3":
        named["target_modules"] = ["o_proj"]
    config = LoraConfig(r=3, lora_alpha=5, use_rslora=True, init_lora_weights=False, **named)
    theirs = get_peft_model(families.make(family), config).eval()
    theirs.save_pretrained(str(tmp_path))
    ours, found = make_model(family, None), read_settings(tmp_path)
    assert found.targets == (*named["target_modules"], "experts.down_proj")
    add_adapter(ours, found, tensors=read_tensors(tmp_path))
    assert_near(logits(eager(ours)), logits(theirs))
    adapter_of(ours).write(tmp_path / "again", adapter_of(ours).own, base="")
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert {name: written[name] for name in named} == named


def sampled(core: EngineCore, held: list[HeldAdapter | None]) -> list[Rollout]:
    done: dict[str, Rollout] = {}
    for index, each in enumerate(held):
        prompt = Rollout.from_prompt(np.random.default_rng(index // 2).integers(3, 96, size=7), id=str(index))
        sampling = Sampling(max_tokens=9, seed=index)
        core.submit(Request(prompt, sampling, on_done=lambda one: done.__setitem__(one.id, one), held=each))
    while core.has_work:
        core.step()
    return [done[str(index)] for index in range(len(held))]


def differences(model: PreTrainedModel, rollouts: list[Rollout]) -> list[float]:
    scored: list[Array] = score(model, Head(model), rollouts, budget=512)
    return [float(np.abs((s - r.logprobs)[r.loss_mask]).max()) for s, r in zip(scored, rollouts, strict=True)]


def test_an_engine_runs_several_versions_of_it_in_a_batch() -> None:
    model = make_model("qwen3_moe")
    own = adapter_of(model).own
    older = HeldAdapter(0, {name: tensor.detach() * (-1 if "lora_B" in name else 1) for name, tensor in own.items()})
    rollouts = sampled(EngineCore(model, name="e", slots=8, context=64), [None, older, None, older])
    newest, kept = differences(model, rollouts[::2]), differences(model, rollouts[1::2])
    assert max(newest) < 1e-4 and min(kept) > 1e-2
    with adapter_of(model).applying([(older.tensors, None)]):
        assert max(differences(model, rollouts[1::2])) < 1e-4


def make_batch(rollouts: list[Rollout]) -> Batch:
    return Batch(
        rollouts=tuple(rollouts),
        advantages=tuple(np.where(r.loss_mask, 1 - 2 * (i % 2), 0).astype(np.float32) for i, r in enumerate(rollouts)),
        weights=tuple((r.loss_mask / 36).astype(np.float32) for r in rollouts),
        loss="reinforce",
        constants={},
        version=0,
    )


def test_only_the_adapter_is_trained() -> None:
    model = make_model("qwen3_moe", LoraSettings(rank=4, alpha=8.0, targets=("experts",)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rollouts = sampled(EngineCore(make_model("qwen3_moe", None), name="e", slots=8, context=64), [None] * 4)
    trainer = DeviceTrainer(model, tokenizer=build_tokenizer(), settings=TrainSettings())
    first = {name: tensor.clone() for name, tensor in trainer.tensors()}
    assert len(first) == 16 and all("experts" in name for name in first)
    batch = make_batch(rollouts)
    trainer.forward_backward(batch)
    trainer.optim_step(1e-2)
    assert all(not torch.equal(tensor, first[name]) for name, tensor in trainer.tensors())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_it_is_refused_where_nothing_would_apply_it(tmp_path: Path) -> None:
    exact = prepare(families.make("qwen3_moe"), name="qwen3_moe", exact=True)
    with pytest.raises(AdapterError, match=r"lora.targets names 'model.layers.0.mlp.experts.gate_up_proj': .*exact = false"):
        add_adapter(exact, BOTH)
    with pytest.raises(
        ModelError, match=r"lora.targets names .*a weight of experts, of which a batch on a GPU has one version.*CPU"
    ):
        EngineCore(make_model("qwen3_moe"), name="e", slots=2, context=64, kernels=True, graphs=False)
    families.make("qwen3_moe").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    tasks = [{"source": "builtin:sort_digits"}]
    recipe = make_recipe({"tasks": tasks, "lora.rank": 4, "lora.targets": ["experts.down_proj"], **VLLM})
    opening = open_engine(recipe, str(tmp_path), SimpleNamespace(receives_on="cpu"), sync=None, timeline=None)
    with pytest.raises(ConfigError, match=r"lora.targets names '.*experts.down_proj', a weight of experts: vLLM servers get"):
        asyncio.run(opening)
    with pytest.raises(AdapterError, match=r"lora.targets = 'experts': the model has no such layer"):
        add_adapter(prepare(families.make("qwen3"), name="qwen3"), BOTH)
    with pytest.raises(ConfigError, match=r"targets = \['all', 'q_proj'\]: .*'all', alone or with names of experts"):
        make_recipe({"tasks": tasks, "lora.rank": 4, "lora.targets": ["all", "q_proj"]})


def test_several_versions_in_a_batch_are_refused_on_a_gpu_before_a_model_loads() -> None:
    tasks, kind = [{"source": "builtin:sort_digits"}], NativeKind()
    settings = {"tasks": tasks, "lora.rank": 4, "partial.interrupt": "lease", "lora.targets": ["all", "experts"]}
    with pytest.raises(ConfigError, match=r"partial\.interrupt = 'lease'.*one version.*set it to 'keep'"):
        kind.check_machine(make_recipe(settings), device="cuda")
    kind.check_machine(make_recipe(settings), device="cpu")
    kind.check_machine(make_recipe({**settings, "partial.interrupt": "keep"}), device="cuda")
