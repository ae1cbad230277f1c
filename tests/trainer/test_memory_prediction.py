"""The prediction of memory: its table against what autograd really saves, and what settings do to it."""

from __future__ import annotations

import subprocess
import sys

import families
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config

from headrace.engine import EngineSettings
from headrace.engine.native.engine_memory import predict_engine_memory
from headrace.model.attention import PackedContext
from headrace.model.load import hidden_states, prepare
from headrace.model.shape import ModelShape
from headrace.observe.process_memory import peak_memory
from headrace.trainer import TrainSettings
from headrace.trainer.memory_prediction import BACKWARD, COMPILED, EAGER, OUTSIDE, Costs, SavedTensor, predict_memory

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


def test_the_table_is_what_a_compiled_layer_saves() -> None:
    """The partitioner that decides it is the same for every device."""
    model = prepared("qwen3", torch.bfloat16)
    expected = expected_of_a_layer(COMPILED, model, width=2)
    saved = saved_by_a_layer(model, OneDocument(), backend="aot_eager_decomp_partition")
    assert saved == pytest.approx(expected, rel=0.01)


def test_a_row_names_a_width_that_every_shape_has() -> None:
    widths = ModelShape.of(Qwen3Config()).widths()
    rows = [row for part in (COMPILED.saved, EAGER.saved, OUTSIDE, BACKWARD) for row in part]
    assert {row.of for row in rows} <= widths.keys() and all(isinstance(row, SavedTensor) for row in rows)


MIDDLING = ModelShape.of(
    Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
)


def middling(dtype: str = "bfloat16", tokens: int = 16_384, **settings):
    return predict_memory(MIDDLING, TrainSettings(**settings), dtype=dtype, tokens=tokens)


def test_what_stays_is_so_many_bytes_of_each_parameter() -> None:
    parameters = MIDDLING.matrices + MIDDLING.vectors
    assert parameters == 596_049_920
    narrow, wide = middling(), middling("float32")
    assert narrow.weights + narrow.masters + narrow.gradients + narrow.moments == pytest.approx(18 * parameters, rel=1e-3)
    assert wide.weights + wide.gradients + wide.moments == 16 * parameters and wide.masters == 0
    assert narrow.total < wide.total < 2 * narrow.total


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


def test_the_table_for_people_ends_with_the_peak() -> None:
    lines = str(middling()).splitlines()
    assert lines[0].split() == ["weights", "1.19", "GB"] and lines[-1].startswith("at the peak")
    assert any(line.startswith("activations of 16,384 tokens") for line in lines)


def test_a_checkpoint_being_written_is_a_copy_of_weights_and_moments_which_a_gpu_keeps_on_the_host() -> None:
    on_cpu = predict_memory(MIDDLING, TrainSettings(), dtype="float32", tokens=1024, on_gpu=False)
    assert on_cpu.saving == on_cpu.weights + on_cpu.moments and middling().saving == 0
    assert "checkpoint being written" in str(on_cpu) and "checkpoint" not in str(middling())


def test_a_model_that_is_only_asked_counts_its_weights() -> None:
    one = predict_memory(MIDDLING, TrainSettings(), dtype="bfloat16", tokens=1024, num_references=1)
    assert one.references == one.weights
    away = predict_memory(MIDDLING, TrainSettings(offload=("reference",)), dtype="bfloat16", tokens=1024, num_references=1)
    assert one.total - away.total == one.weights


def test_an_engine_holds_its_weights_twice_and_the_cache_that_fits() -> None:
    settings = EngineSettings(slots=64)
    few = predict_engine_memory(MIDDLING, settings, dtype="bfloat16", context=4096, free=20 * 10**9)
    assert few.weights == few.staging and few.cache == pytest.approx(0.4 * (20e9 - few.weights), rel=0.01)
    many = predict_engine_memory(MIDDLING, settings, dtype="bfloat16", context=4096, free=10**12)
    assert many.cache == (64 * 256 + 1) * 16 * MIDDLING.cached_numbers * 2
    assert many.asleep("never") == many.total > many.asleep("cache") > many.asleep("weights")


def test_the_peak_is_of_this_process_and_not_of_what_started_it() -> None:
    script = (
        "from headrace.observe.process_memory import peak_resident\n"
        "print(peak_resident()); block = b'1' * 200_000_000; print(peak_resident()); del block; print(peak_resident())"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    before, during, after = map(int, child.stdout.split())
    assert before < peak_memory(torch.device("cpu")) / 2
    assert before + 190e6 < during < before + 300e6 and after > during - 10e6
