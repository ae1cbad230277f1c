"""Adapters of experts, and modules trained whole, on a GPU: compiled in the trainer, compiled and captured in the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import numpy as np
import pytest
import torch
import transformers
from test_graphs import MOE, SMALL, captured, generate
from test_trainer_on_gpu import apart, batch, gradient, make

from headrace.algorithms import REFERENCE
from headrace.bench.loads import make_batch
from headrace.bench.measure import MEAN, compare
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.lora import LoraSettings, add_adapter
from headrace.model import build_tokenizer
from headrace.model.load import prepare
from headrace.observe import Timeline
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

EXPERTS = LoraSettings(rank=4, alpha=8.0, targets=("all", "experts"))
WHOLE = LoraSettings(
    rank=4, alpha=8.0, targets=("all", "experts"), whole=("lm_head", "embed_tokens", "norm", "v_proj", "q_norm")
)


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engine.native.cuda import runner

    monkeypatch.setattr(runner, "CudaRunner", functools.partial(runner.CudaRunner, prompt_buckets=(64, 128)))


def make_model(settings: LoraSettings, dtype: torch.dtype) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**SMALL, **MOE, "initializer_range": 0.1})
    model = prepare(transformers.AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval(), name="small")
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in add_adapter(model, settings).own.values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=draws).to("cuda"))
    return model


@pytest.mark.parametrize("settings", [EXPERTS, WHOLE], ids=["experts", "whole"])
def test_engine_and_trainer_agree_before_and_after_an_update(settings: LoraSettings) -> None:
    model = make_model(settings, torch.float32)
    trainer = DeviceTrainer(model, tokenizer=build_tokenizer(), settings=TrainSettings(), dtype=torch.bfloat16)
    core = EngineCore(
        make_model(settings, torch.bfloat16),
        name="e",
        slots=6,
        context=96,
        num_blocks=24,
        record_routing=True,
        adapter_places=1,
    )
    core.wait_warm()
    assert captured(core, is_restricted=False) and core.runner.graphs._compiles
    sync = WeightSync(Lineage("life"), MemoryTransport("cuda"), adapter=settings.to_plain())
    engine = NativeEngine(core, sync=sync, timeline=Timeline("engine"))

    async def publish() -> None:
        serving = asyncio.ensure_future(engine.serve())
        await engine.load(sync.offer(1, trainer.arena))
        serving.cancel()

    first = list(generate(core).values())
    given = make_batch(first, advantages=[1.0 if index % 2 else -1.0 for index in range(len(first))])
    assert compare(first, trainer.forward(given))[MEAN] < 0.03
    assert compare(first, trainer.forward(given, column=REFERENCE))[MEAN] > 0.2
    trainer.forward_backward(given)
    trainer.optim_step(3e-2)
    assert trainer.model.base_model.layers[-1]._compiled_call_impl is not None
    asyncio.run(publish())
    updated = list(generate(core).values())
    assert compare(updated, trainer.forward(make_batch(updated, advantages=[1.0] * len(updated))))[MEAN] < 0.03
    assert compare(first, trainer.forward(given))[MEAN] > 0.1
    assert all((each.versions[each.is_sampled] == 1).all() for each in updated)


@pytest.mark.parametrize(
    "settings", [EXPERTS, LoraSettings(rank=4, whole=("embed_tokens", "norm", "q_norm"))], ids=["experts", "whole"]
)
def test_gradients_through_compiled_layers_are_near(settings: LoraSettings) -> None:
    """With the same experts forced on both sides, so that no rounding chooses others."""
    found, references = [], []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        trainer = make("qwen3_moe", device=device, dtype=dtype, std=0.05, lora=settings)
        routers, given = trainer._routers, batch()
        scores = np.random.default_rng(0).random((64, routers.num_layers, routers.num_experts))
        table = scores.argsort(axis=-1)[..., : routers.top_k].astype(np.uint8)
        forced = [each.replace(expert_routing=np.vstack([table[: len(each) - 1], table[:1] | 255])) for each in given.rollouts]
        trainer.forward_backward(dataclasses.replace(given, rollouts=tuple(forced)))
        found.append(gradient(trainer))
        references.append(np.concatenate(trainer.forward(given, column=REFERENCE)))
    assert trainer.model.base_model.layers[-1]._compiled_call_impl is not None
    assert apart(found[1], found[0]) < 0.05
    assert np.abs(references[1] - references[0]).mean() < 0.05
