"""The prediction of memory: its table against what autograd really saves, and what settings do to it."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import TYPE_CHECKING

import families
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import LiveStorages
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from headrace.bench.loads import QWEN3_0_6B, model_shape
from headrace.engine import EngineSettings
from headrace.engine.native.engine_memory import predict_engine_memory
from headrace.launch.examples import _rollout
from headrace.launch.sft import supervised_batch
from headrace.lora import Adapter, LoraSettings, add_adapter, find_targets
from headrace.model import named_tensors
from headrace.model.arena import Arena
from headrace.model.attention import PackedContext
from headrace.model.load import hidden_states, prepare
from headrace.model.shape import ModelShape
from headrace.model.tiny import build_tokenizer
from headrace.observe.process_memory import peak_memory
from headrace.trainer import DeviceTrainer, TrainSettings
from headrace.trainer.memory_prediction import (
    BACKWARD,
    COMPILED,
    EAGER,
    OUTSIDE,
    Costs,
    SavedTensor,
    TrainerMemory,
    predict_memory,
)
from headrace.trainer.optimizer import FlatOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = 64


class OneDocument:
    """Attention as it is on a GPU: a kernel that takes what it is given and keeps no scores."""

    def attend(self, module, query, key, value, spec):
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scaling, enable_gqa=True)
        return attended[0].transpose(0, 1)


def saved_by_a_layer(model, context, *, backend: str = "") -> float:
    """Bytes of a token that the second layer keeps for its backward pass, each storage once."""
    layer = model.base_model.layers[1]
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    found: dict[int, int] = {}
    kept = []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.numel() >= TOKENS and tensor.dtype.is_floating_point:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    forward = torch.compile(layer.forward, backend=backend, dynamic=False) if backend else layer.forward

    def watched(*arguments, **keywords):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*arguments, **keywords)

    layer.forward = watched
    hidden_states(model, torch.arange(TOKENS) % 90, torch.arange(TOKENS), context)
    rotations = 2 * TOKENS * ModelShape.of(model.config).key_dim * 4  # which are the same for every layer
    return (sum(found.values()) - rotations) / TOKENS


def expected_of_a_layer(costs: Costs, model, *, width: int) -> float:
    widths = ModelShape.of(model.config).widths()
    rows = [row for row in costs.saved if width == 2 or not row.is_narrow_only]
    return sum(widths[row.of] * row.count * (4 if row.is_wide else width) for row in rows)


def prepared(family: str, dtype: torch.dtype):
    return prepare(families.make(family).to(dtype), name=family)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_table_is_what_an_eager_layer_saves(family: str) -> None:
    model = prepared(family, torch.float32)
    expected = expected_of_a_layer(EAGER, model, width=4)
    assert saved_by_a_layer(model, PackedContext([TOKENS // 2] * 2)) == pytest.approx(expected, rel=0.01)


def test_the_table_is_what_an_eager_layer_saves_in_bfloat16() -> None:
    """But for attention's output, of which only attention over several documents at once makes a second copy."""
    model = prepared("llama", torch.bfloat16)
    shape = ModelShape.of(model.config)
    expected = expected_of_a_layer(EAGER, model, width=2) - 2 * shape.heads * shape.value_dim
    assert saved_by_a_layer(model, OneDocument()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("family", "margin"), [("qwen3", 0.01), pytest.param("qwen3_moe", 0.05, marks=pytest.mark.long)])
def test_the_table_is_what_a_compiled_layer_saves(family: str, margin: float) -> None:
    """The partitioner that decides it is the same for every device."""
    model = prepared(family, torch.bfloat16)
    expected = expected_of_a_layer(COMPILED, model, width=2)
    saved = saved_by_a_layer(model, OneDocument(), backend="aot_eager_decomp_partition")
    assert saved == pytest.approx(expected, rel=margin)


def test_a_row_names_a_width_that_every_shape_has() -> None:
    widths = ModelShape.of(Qwen3Config()).widths()
    rows = [row for part in (COMPILED.saved, EAGER.saved, OUTSIDE, BACKWARD) for row in part]
    assert {row.of for row in rows} <= widths.keys() and all(isinstance(row, SavedTensor) for row in rows)


MIDDLING = ModelShape.of(AutoConfig.for_model(**QWEN3_0_6B))


def middling(dtype: str = "bfloat16", tokens: int = 16_384, **settings):
    return predict_memory(MIDDLING, TrainSettings(**settings), dtype=dtype, tokens=tokens)


def test_what_stays_is_so_many_bytes_of_each_parameter() -> None:
    parameters = MIDDLING.matrices + MIDDLING.vectors
    assert parameters == 596_049_920
    narrow, wide = middling(), middling("float32")
    assert narrow.weights + narrow.masters + narrow.gradients + narrow.moments == pytest.approx(18 * parameters, rel=1e-3)
    assert wide.weights + wide.gradients + wide.moments == 16 * parameters and wide.masters == 0
    assert narrow.total < wide.total < 2 * narrow.total


def test_each_optimizer_has_state_of_its_own_and_what_is_frozen_has_none() -> None:
    matrices, vectors, plain = MIDDLING.matrices, MIDDLING.vectors, middling()
    assert middling(optimizer="adamw_8bit").moments == pytest.approx(2.0625 * matrices + 2.125 * vectors, rel=1e-6)
    assert middling(optimizer="muon").moments == 4 * matrices + 4 * MIDDLING.embedding + 8 * vectors
    given = {"dtype": "float16", "tokens": 16_384, "frozen": [MIDDLING.embedding]}
    frozen = predict_memory(MIDDLING, TrainSettings(), **given)
    with_muon = predict_memory(MIDDLING, TrainSettings(optimizer="muon"), **given)
    assert with_muon.moments == 4 * (matrices - MIDDLING.embedding) + 8 * vectors
    assert plain.weights == frozen.weights and plain.moments - frozen.moments == 8 * MIDDLING.embedding
    assert plain.gradients - frozen.gradients == plain.masters - frozen.masters == 4 * MIDDLING.embedding


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_a_steps_temporaries_are_predicted(name: str) -> None:
    """For one matrix of 512 × 256, against the storages that are alive during the step."""
    model = torch.nn.Linear(256, 512, bias=False)
    settings = TrainSettings(optimizer=name)
    optimizer = FlatOptimizer([(Arena.adopt(model), dict(model.named_parameters()))], settings)
    model.weight.backward(torch.randn(512, 256))
    with LiveStorages() as alive:
        optimizer.step(1e-3)
    shape = dataclasses.replace(MIDDLING, hidden=256, intermediate=512)
    given = {"dtype": "float32", "tokens": 16, "on_gpu": False, "num_parameters": shape.vectors + 512 * 256}
    predicted = predict_memory(shape, settings, **given)
    assert alive.peak - 1000 <= predicted.step <= 1.3 * alive.peak
    away = middling(tokens=16, optimizer=name, offload=("optimizer",))  # so that the step is the peak
    assert away.total == away.weights + away.masters + away.gradients + away.moments + away.step
    assert (away.step > 0) == (name != "adamw")


def test_settings_that_save_memory_do_in_this_order() -> None:
    plain, half = middling(), middling(tokens=8_192)
    assert half.activations == plain.activations // 2 and half.moments == plain.moments
    recomputed = middling(recompute="layers")
    assert recomputed.activations < plain.activations / 4 and recomputed.layer > plain.layer
    assert recomputed.total < half.total < plain.total
    offloaded = middling(offload=("activations",))
    assert offloaded.activations < plain.activations / 10
    optimizer = middling(offload=("optimizer",))
    assert plain.total - optimizer.total == plain.masters + plain.moments, "a pass needs neither"
    few = middling(tokens=16, offload=("optimizer",))
    assert few.total >= few.weights + few.masters + few.gradients + few.moments, "the step itself needs both"


def test_a_checkpoint_being_written_is_a_copy_of_weights_and_moments_which_a_gpu_keeps_on_the_host() -> None:
    on_cpu = predict_memory(MIDDLING, TrainSettings(), dtype="float32", tokens=1024, on_gpu=False)
    assert on_cpu.saving == on_cpu.weights + on_cpu.moments and middling().saving == 0


def test_a_model_that_is_only_asked_counts_its_weights() -> None:
    one = predict_memory(MIDDLING, TrainSettings(), dtype="bfloat16", tokens=1024, num_references=1)
    assert one.references == one.weights
    away = predict_memory(MIDDLING, TrainSettings(offload=("reference",)), dtype="bfloat16", tokens=1024, num_references=1)
    assert one.total - away.total == one.weights


def test_a_reference_that_follows_the_policy_is_copied_for_a_checkpoint_and_mixed_in_float32() -> None:
    def on_cpu(frozen: Sequence[int] = (), **settings) -> TrainerMemory:
        given, more = TrainSettings(kl=0.1, **settings), {"on_gpu": False, "num_references": 1, "frozen": frozen}
        return predict_memory(MIDDLING, given, dtype="bfloat16", tokens=1024, **more)

    fixed, following, mixed = on_cpu(), on_cpu(reference_every=4), on_cpu(reference_every=4, reference_mix=0.5)
    assert following.saving - fixed.saving == fixed.weights and following.references == fixed.references
    assert mixed.saving - fixed.saving == mixed.references - fixed.references == fixed.masters
    frozen = on_cpu(reference_every=4, reference_mix=0.5, frozen=[MIDDLING.embedding])
    assert frozen.references == mixed.references, "whatever is trained"
    away = TrainSettings(kl=0.1, reference_every=4, reference_mix=0.5)
    on_gpu = predict_memory(MIDDLING, away, dtype="bfloat16", tokens=1024, num_references=1)
    assert on_gpu.references == on_gpu.weights and on_gpu.saving == 0, "on the host"


def test_an_engine_holds_its_weights_twice_and_the_cache_that_fits() -> None:
    settings = EngineSettings(slots=64)
    few = predict_engine_memory(MIDDLING, settings, dtype="bfloat16", context=4096, free=20 * 10**9)
    assert few.weights == few.staging and few.cache == pytest.approx(0.4 * (20e9 - few.weights), rel=0.01)
    many = predict_engine_memory(MIDDLING, settings, dtype="bfloat16", context=4096, free=10**12)
    assert many.cache == (64 * 256 + 1) * 16 * MIDDLING.cached_numbers * 2
    assert many.asleep("never") == many.total > many.asleep("cache") > many.asleep("weights")


def test_recorded_routing_is_part_of_the_cache() -> None:
    config = Qwen3MoeConfig(num_experts=300, num_experts_per_tok=4, num_hidden_layers=3, head_dim=16)
    shape, settings = ModelShape.of(config), EngineSettings(kv_blocks=10)

    def predict(settings: EngineSettings) -> int:
        return predict_engine_memory(shape, settings, dtype="bfloat16", context=64, free=10**12).cache

    recorded = dataclasses.replace(settings, record_routing=True)
    assert predict(recorded) - predict(settings) == 10 * 16 * 3 * 4 * 2, "two bytes for numbers up to 299"
    narrow = dataclasses.replace(shape, experts=128)
    assert narrow.routing_bytes == 3 * 4


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_replayed_routing_and_the_losses_of_routers_are_kept_for_all_layers(recompute: str) -> None:
    """What they add to a pass, against the storages that are alive during it; with recomputation they add no more."""
    many = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4}
    chosen = np.random.default_rng(0).random((512, 4, 64)).argsort(axis=-1)[:, :, :8].astype(np.uint8)
    rollout = _rollout([([8] * 16, False), ([9] * 496, True)], name="r", group="r")
    found = []
    for replays, settings in (
        (False, TrainSettings(recompute=recompute)),
        (True, TrainSettings(recompute=recompute, router_z=0.01)),
    ):
        model = prepare(families.make("qwen3_moe", **many), name="experts")
        trainer = DeviceTrainer(model, tokenizer=build_tokenizer(), settings=settings)
        batch = supervised_batch([rollout.replace(expert_routing=chosen if replays else None)])
        with LiveStorages() as alive:
            trainer.forward_backward(batch)
        shape, given = ModelShape.of(model.config), {"dtype": "float32", "tokens": 512, "on_gpu": False}
        found.append((alive.peak, predict_memory(shape, settings, **given, replays=replays).activations))
    (plain, less), (peak, more) = found
    assert peak - plain == pytest.approx(more - less, rel=0.12)


def test_the_peak_is_of_this_process_and_not_of_what_started_it() -> None:
    script = (
        "from headrace.observe.process_memory import peak_resident\n"
        "print(peak_resident()); block = b'1' * 200_000_000; print(peak_resident()); del block; print(peak_resident())"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    before, during, after = map(int, child.stdout.split())
    assert before < peak_memory(torch.device("cpu")) / 2
    assert before + 190e6 < during < before + 300e6 and after > during - 10e6


ADAPTED = AutoConfig.for_model(**model_shape("qwen3", 8192, 256, 768, 4, 4, 2, 64, 32_768))


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.long) for name in ("adamw_8bit", "muon"))]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_an_adapter_only_that_has_gradients_masters_and_moments(dtype: str, optimizer: str) -> None:
    """Predicted against what a trainer really holds, and against what a pass makes at its peak."""
    lora = LoraSettings(rank=8)
    model = prepare(AutoModelForCausalLM.from_config(ADAPTED, dtype=torch.float32), name="adapted")
    adapter = add_adapter(model, lora)
    settings = TrainSettings(optimizer=optimizer)
    trainer = DeviceTrainer(model, tokenizer=None, settings=settings, dtype=getattr(torch, dtype))  # type: ignore[arg-type]
    count = sum(parameter.numel() for parameter in adapter.parameters())
    assert count == sum(map(math.prod, Adapter.shapes(find_targets(model, lora), lora).values()))
    shape = ModelShape.of(ADAPTED)
    given = {"dtype": dtype, "tokens": 512, "on_gpu": False, "adapter": count, "adapter_width": lora.rank * 7}
    predicted = predict_memory(shape, settings, **given)
    weights = sum(tensor.nbytes for _, tensor in named_tensors(model)) + sum(each.nbytes for each in adapter.parameters())
    assert predicted.weights == pytest.approx(weights, rel=0.01)
    assert predicted.gradients == 4 * count and predicted.masters == (0 if dtype == "float32" else 4 * count)
    batch = supervised_batch([_rollout([([8] * 16, False), ([9] * 496, True)], name="r", group="r")])
    with LiveStorages() as alive:
        trainer.forward_backward(batch)
    made = predicted.activations + max(predicted.head, predicted.layer)
    assert 0.5 * made <= alive.peak <= made
    trainer.optim_step(1e-3)
    moments = [each for name, each in trainer.optimizer.state().items() if not name.endswith(".step")]
    assert predicted.moments == pytest.approx(sum(each.nbytes for each in moments), rel=0.02)
    whole = predict_memory(shape, settings, **given | {"adapter": 0, "adapter_width": 0})
    assert predicted.saving < 0.1 * whole.saving and predicted.resident < whole.resident
