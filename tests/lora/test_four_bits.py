"""QLoRA: the trainer's weights in 4 bits, and everybody else with the very numbers that they stand for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from test_adapter import IDS, vary

from headrace.config import make_recipe
from headrace.launch import build, build_trainer
from headrace.launch.forecast import forecast_memory
from headrace.lora import AdapterError, LoraSettings, adapter_of, hold_in_four_bits, merge_adapter, round_weights
from headrace.model import ModelShape, load_model, load_plain, load_tokenizer
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LORA = LoraSettings(rank=4, alpha=8.0, quantize="nf4")


@pytest.fixture(scope="module")
def rounded(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose weights 4 bits can hold."""
    pytest.importorskip("bitsandbytes")
    folder = str(tmp_path_factory.mktemp("rounded"))
    model = load_plain(tiny_model, dtype="float32")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert round_weights(model, LORA, device="cpu")
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {name for name in before if "proj" in name}, "not embedding, head or norms"
    for name in changed:
        assert 0.05 < (after[name] - before[name]).abs().mean() / before[name].abs().mean() < 0.12
    assert not round_weights(model, LORA, device="cpu"), "a second time changes no bit"
    model.save_pretrained(folder)
    load_tokenizer(tiny_model).save_pretrained(folder)
    return folder


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.set_attn_implementation("eager")
    model(IDS, use_cache=False).logits.square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in adapter_of(model).named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_in_four_bits_computes_what_the_rounded_one_does(rounded: str, dtype: str) -> None:
    plain, held = (load_model(rounded, lora=LORA, dtype=dtype) for _ in range(2))
    if dtype == "bfloat16":
        for model in (plain, held):
            round_weights(model, LORA, device="cpu")
    hold_in_four_bits(held, LORA, device="cpu")
    for model in (plain, held):
        vary(model, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        wanted, found = gradients(plain), gradients(held)
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    names = held.state_dict()
    assert not any(name.endswith("proj.weight") for name in names)
    full = sum(each.numel() for name, each in plain.state_dict().items() if "proj" in name)
    assert sum(each.nbytes for name, each in names.items() if "proj" in name) == full * (1 / 2 + 4 / 64)


def test_a_pass_saves_no_weight_of_full_size(rounded: str) -> None:
    model, saved = load_model(rounded, lora=LORA), []
    hold_in_four_bits(model, LORA, device="cpu")
    widths = {layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    model.set_attn_implementation("eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model(IDS, use_cache=False)
    head = model.get_output_embeddings().weight.numel()
    assert any(each.dtype == torch.uint8 for each in saved)
    assert not [each for each in saved if each.numel() in widths - {head} and each.dtype.is_floating_point]


def test_compiled_as_one_graph_no_weight_of_full_size_is_kept_for_the_backward_pass(rounded: str) -> None:
    model, saved = load_model(rounded, lora=LORA), []
    hold_in_four_bits(model, LORA, device="cpu")
    layer = model.base_model.layers[0].mlp
    hidden = torch.randn(1, 5, layer.gate_proj.in_features, requires_grad=True)
    layer(hidden).sum().backward()
    wanted, hidden.grad = hidden.grad, None
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = compiled(hidden)
    output.sum().backward()
    assert torch.allclose(hidden.grad, wanted, atol=1e-6)
    full = layer.gate_proj.in_features * layer.gate_proj.out_features
    assert saved and not [each for each in saved if each.numel() == full]


def test_a_model_that_is_not_rounded_is_refused(tiny_model: str) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(AdapterError, match=r"lora.quantize = 'nf4': .*q_proj.weight of .* numbers that 4 bits cannot hold"):
        hold_in_four_bits(load_model(tiny_model, lora=LORA), LORA, device="cpu")


def test_without_bitsandbytes_it_is_refused_before_a_model_loads(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe({"model": {"path": tiny_model}, "lora": {"rank": 4, "quantize": "nf4"}})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"lora.quantize = 'nf4': it needs bitsandbytes.*headrace\[qlora\]"):
        build.check_quantization(recipe)
    with pytest.raises(ConfigError, match="'none' without an adapter; set rank"):
        make_recipe({"lora": {"quantize": "nf4"}})


def test_the_trainers_memory_is_predicted(rounded: str) -> None:
    recipe = make_recipe({"model": {"path": rounded}, "lora": {"rank": 4, "quantize": "nf4"}, "device": "cpu"})
    trainer = build_trainer(recipe, rounded, device="cpu")
    shape = ModelShape.of(trainer.model.config)
    predicted = forecast_memory(recipe, shape, context=64, longest_prompt=16).trainer
    held = trainer._weights.num_bytes + trainer.arena.num_bytes
    assert predicted.weights == pytest.approx(held, rel=0.05)
    whole = forecast_memory(
        make_recipe({"model": {"path": rounded}, "lora": {"rank": 4}}), shape, context=64, longest_prompt=16
    )
    assert predicted.weights < 0.5 * whole.trainer.weights


def test_merging_adds_the_adapter_to_the_rounded_weights(rounded: str, tmp_path: Path) -> None:
    model = load_model(rounded, lora=LORA)
    hold_in_four_bits(model, LORA, device="cpu")
    vary(model, seed=1)
    adapter_of(model).write(tmp_path, adapter_of(model).own, base=rounded)
    again = load_model(str(tmp_path))
    merge_adapter(again)
    model.set_attn_implementation("eager")
    again.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(again(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits, atol=1e-4)
