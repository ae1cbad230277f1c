"""Modules trained whole beside an adapter: PEFT's files, logits and gradients; trained, published, merged, or refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import families
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_expert_adapters import assert_near, differences, eager, logits, make_batch, sampled

from headrace.config import make_recipe
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.lora import AdapterError, LoraSettings, adapter_of, add_adapter, merge_adapter, read_settings, read_tensors
from headrace.model import Head, ModelError, build_tokenizer, prepare, score
from headrace.observe import Timeline
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

ENDS = LoraSettings(rank=4, alpha=8.0, targets=("q_proj", "up_proj"), whole=("lm_head", "embed_tokens", "model.norm"))
NAMES = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


def make_base() -> PreTrainedModel:
    model = families.make("qwen3")
    model.config.tie_word_embeddings = False
    torch.manual_seed(7)
    model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn_like(model.lm_head.weight))
    return model


def make_model(settings: LoraSettings | None = ENDS, *, change: float = 0.1, exact: bool = False) -> PreTrainedModel:
    model = prepare(make_base(), name="qwen3", exact=exact)
    if settings is not None:
        adapter, draws = add_adapter(model, settings), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in adapter.own.values():
                tensor.add_(change * torch.randn(tensor.shape, generator=draws))
    return model


def test_they_begin_as_the_models_own() -> None:
    assert torch.equal(logits(eager(make_model(change=0.0))), logits(eager(make_model(None))))


def test_what_is_written_computes_and_learns_the_same_in_peft(tmp_path: Path) -> None:
    ours = eager(make_model())
    adapter = adapter_of(ours)
    assert adapter.own.keys() > NAMES and not any(parameter.requires_grad for parameter in ours.parameters())
    adapter.write(tmp_path, adapter.own, base="")
    theirs = PeftModel.from_pretrained(make_base(), str(tmp_path), is_trainable=True).eval()
    found, expected = logits(ours), logits(theirs)
    assert_near(found, expected)
    with adapter.off():
        assert torch.equal(logits(ours), logits(eager(make_model(None))))
    for each in (found, expected):
        (each * torch.randn(each.shape, generator=torch.Generator().manual_seed(2)) / each.numel()).sum().backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default.", "."): each.grad
        for name, each in theirs.named_parameters()
        if each.requires_grad
    }
    assert gradients.keys() == adapter.own.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert_near(adapter.own[name].grad, gradient)
    again = make_model(None)
    add_adapter(again, read_settings(tmp_path), tensors=read_tensors(tmp_path))
    assert torch.equal(logits(eager(again)), found)
    merge_adapter(again)
    assert_near(logits(again), found)


def test_what_peft_writes_loads_here(tmp_path: Path) -> None:
    config = LoraConfig(r=8, lora_alpha=5, target_modules=["v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    theirs = get_peft_model(make_base(), config).eval()
    with torch.no_grad():
        theirs.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    theirs.save_pretrained(str(tmp_path))
    ours, found = make_model(None), read_settings(tmp_path)
    assert found.whole == ("lm_head",)
    add_adapter(ours, found, tensors=read_tensors(tmp_path))
    assert_near(logits(eager(ours)), logits(theirs))


@pytest.mark.parametrize("exact", [False, True])
def test_engine_and_trainer_agree_after_an_update(exact: bool) -> None:
    """The head is trained and published with the adapter; the reference is the model with its own head."""
    trainer = DeviceTrainer(make_model(exact=exact), tokenizer=build_tokenizer(), settings=TrainSettings(), exact=exact)
    core = EngineCore(make_model(exact=exact), name="e", slots=8, context=64, exact=exact)
    sync = WeightSync(Lineage("life"), MemoryTransport(), adapter=ENDS.to_plain())
    engine = NativeEngine(core, sync=sync, timeline=Timeline("engine"))
    rollouts = sampled(core, [None] * 4)
    batch = make_batch(rollouts)
    before = {name: tensor.clone() for name, tensor in trainer.tensors()}
    base = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert trainer.forward_backward(batch)["mismatch_max"] <= (0 if exact else 1e-4)
    trainer.optim_step(1e-2)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.tensors())
    assert all(torch.equal(tensor, base[name]) for name, tensor in trainer.model.state_dict().items())

    async def publish() -> None:
        serving = asyncio.ensure_future(engine.serve())
        await engine.load(sync.offer(1, trainer.tensors()))
        serving.cancel()

    asyncio.run(publish())
    updated = sampled(core, [None] * 4)
    for rollout, logprobs in zip(updated, trainer.forward(make_batch(updated)), strict=True):
        np.testing.assert_allclose(logprobs[rollout.loss_mask], rollout.logprobs[rollout.loss_mask], atol=0 if exact else 1e-4)
    assert max(differences(make_model(exact=exact), updated)) > 1e-2
    plain, off = make_model(None, exact=exact), trainer.model
    with adapter_of(off).off():
        scored = [score(each, Head(each), updated, budget=512) for each in (off, plain)]
    for mine, theirs in zip(*scored, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_cannot_be_is_refused() -> None:
    tied = prepare(families.make("qwen3"), name="qwen3")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    for wrong, told in (
        ("lm_head", "the model's head is tied to its embedding"),
        ("lm_hed", "no such module .nearest: lm_head"),
    ):
        with pytest.raises(AdapterError, match=f"lora.whole = '{wrong}': .*{told}"):
            add_adapter(tied, LoraSettings(rank=2, whole=(wrong,)))
    with pytest.raises(ModelError, match=r"lora.whole names 'lm_head', of which a batch on a GPU has one version"):
        settings = LoraSettings(rank=4, targets=("q_proj",), whole=("lm_head",))
        EngineCore(make_model(settings), name="e", slots=2, context=64, kernels=True, graphs=False)
    given = {"tasks": [{"source": "builtin:sort_digits"}], "lora.rank": 4, "lora.whole": ["lm_head"], "staleness.max_lag": 1}
    with pytest.raises(
        ConfigError, match=r"partial.interrupt = 'lease': a batch has one version of lora.whole = \['lm_head'\]"
    ):
        make_recipe({**given, "partial.interrupt": "lease"})
