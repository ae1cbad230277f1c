"""Weights in one flat buffer per dtype: the layout, ties, joined views, and the second set that new weights come through."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from manifests import fill, make_manifest
from torch import nn

from headrace.model.arena import ALIGNMENT, Arena, ArenaError
from headrace.model.weights import StagedWeights, WeightError, checksum, make_inspector, named_tensors
from headrace.records import WeightUpdate

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "biases and a tie": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "biases, no tie": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=False),
    "experts in three dimensions": lambda: transformers.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
}
ATTENTION = "model.layers.1.self_attn"


def make(kind: str = "biases and a tie", dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind]()).to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


class Mixed(nn.Module):
    """Of bfloat16 with a buffer of float32 in it, counters, a buffer that is not saved, and every kind of tie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.twin = nn.Linear(6, 11, bias=False, dtype=torch.bfloat16)
        self.twin.weight = nn.Parameter(self.embed.weight.data)
        self.row = nn.Parameter(self.embed.weight.data.view(-1))
        self.register_buffer("scale", torch.randn(6))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("passing", torch.ones(6, dtype=torch.bfloat16), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embed(ids)) * self.scale.bfloat16() * self.passing + self.count
        return self.head(hidden) + self.twin(hidden) + self.row.view(11, 6)[ids] @ self.row[:6, None]


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(model)}


def changed(model: nn.Module, by: float = 1.5) -> dict[str, Tensor]:
    return {name: (tensor * by).to(tensor.dtype) for name, tensor in named_tensors(model)}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def announce(tensors: dict[str, Tensor], version: int = 1) -> WeightUpdate:
    return WeightUpdate(policy="policy", lineage="life", version=version, manifest=make_manifest(tensors.items()))


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        if isinstance(model, Mixed):
            return model(torch.arange(11))
        return model(torch.arange(3, 43).view(2, 20), use_cache=False).logits


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def garbage(num_bytes: int, device: torch.device) -> Tensor:
    """Memory that was someone else's: NaN in every floating dtype."""
    buffer = torch.full((num_bytes + ALIGNMENT,), 0xFF, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % ALIGNMENT
    return buffer[start : start + num_bytes]


# The layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_an_adopted_model_computes_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    model = make(kind, dtype)
    before, tensors, parameters = outputs(model), copied(model), dict(model.named_parameters())
    Arena.adopt(model, garbage)
    assert torch.equal(outputs(model), before)
    assert equal(copied(model), tensors)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("model", [make(), make("experts in three dimensions", torch.bfloat16), Mixed()])
def test_every_tensor_has_a_place_of_its_own(model: nn.Module) -> None:
    needs_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    arena = Arena.adopt(model, garbage)
    assert list(arena.views) == [name for name, _ in named_tensors(model)]
    for name, tensor in named_tensors(model):
        view = arena.views[name]
        assert (tensor.data_ptr(), tensor.shape, tensor.stride()) == (view.data_ptr(), view.shape, view.stride())
        assert view.is_contiguous() and view.data_ptr() % ALIGNMENT == 0, name
        low, high = span(arena.flat[tensor.dtype])
        assert not view.numel() or (low <= span(view)[0] and span(view)[1] <= high), name
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == needs_grad
    places = sorted({span(view) for view in arena.views.values() if view.numel()})
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(places))
    assert arena.num_bytes == sum(-(-(stop - start) // ALIGNMENT) * ALIGNMENT for start, stop in places)


def test_matrices_come_first_and_padding_is_zero() -> None:
    model = make(dtype=torch.bfloat16)
    arena = Arena.adopt(model, garbage)
    by_place = sorted(arena.slots, key=lambda name: arena.slots[name].start)
    names = list(arena.views)
    matrices = [name for name in names if arena.views[name].ndim >= 2]
    assert by_place == matrices + [name for name in names if name not in matrices]
    for other in (arena, arena.like()):
        flat = other.flat[torch.bfloat16].clone()
        for slot in other.slots.values():
            flat[slot.start : slot.stop] = 0
        assert not flat.view(torch.int16).any()


def test_ties_are_stored_once_and_stay_ties() -> None:
    model = Mixed()
    before = outputs(model)
    arena = Arena.adopt(model)
    assert torch.equal(outputs(model), before)
    assert model.head.weight is model.embed.weight and model.twin.weight is not model.embed.weight
    assert model.twin.weight.data_ptr() == model.embed.weight.data_ptr() == model.row.data_ptr()
    assert "head.weight" not in arena.views and arena.slots["twin.weight"] == arena.slots["embed.weight"]
    aligned = {torch.bfloat16: 3 * ALIGNMENT, torch.float32: ALIGNMENT, torch.int64: ALIGNMENT}
    assert {dtype: flat.numel() * flat.element_size() for dtype, flat in arena.flat.items()} == aligned
    with torch.no_grad():
        model.embed.weight[2] = 7
    assert (model.twin.weight[2] == 7).all() and (model.row[12:18] == 7).all() and (arena.views["row"][12:18] == 7).all()


def test_a_model_may_be_adopted_again() -> None:
    model = Mixed()
    before, first = outputs(model), Arena.adopt(model)
    second = Arena.adopt(model)
    assert torch.equal(outputs(model), before) and first.slots == second.slots
    first.flat[torch.bfloat16].zero_()
    assert torch.equal(outputs(model), before)
    assert first.strayed() == "row" and second.strayed() is None


def test_half_a_tie_is_refused_by_name() -> None:
    model = nn.Module()
    model.whole = nn.Parameter(torch.randn(8, 4))
    model.part = nn.Parameter(model.whole.data[2:4])
    with pytest.raises(ArenaError, match="'whole' and 'part' share a part of their memory"):
        Arena.adopt(model)
    model.part = nn.Parameter(model.whole.data.t())
    with pytest.raises(ArenaError, match="share a part"):
        Arena.adopt(model)


def test_slices_that_do_not_overlap_are_no_tie() -> None:
    memory = torch.randn(10, 4)
    model = nn.Module()
    model.first, model.second = nn.Parameter(memory[:6]), nn.Parameter(memory[6:])
    arena = Arena.adopt(model)
    assert torch.equal(arena.joined(["first", "second"][:1]), memory[:6]) and torch.equal(model.second, memory[6:])


def test_a_strided_parameter_becomes_contiguous() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 6).t())
    values = model.weight.detach().clone()
    Arena.adopt(model)
    assert model.weight.is_contiguous() and torch.equal(model.weight, values)


def test_a_model_in_two_places_or_none_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ArenaError, match="cpu, meta"):
        Arena.adopt(model)
    with pytest.raises(ArenaError, match="are on meta"):
        Arena.adopt(model[1])


def test_the_allocator_is_asked_once_and_its_answer_checked() -> None:
    asked = []

    def allocate(num_bytes: int, device: torch.device) -> Tensor:
        asked.append((num_bytes, device.type))
        return garbage(num_bytes, device)

    arena = Arena.adopt(Mixed(), allocate)
    assert asked == [(sum(flat.numel() * flat.element_size() for flat in arena.flat.values()), "cpu")]
    assert {flat.untyped_storage().data_ptr() for flat in arena.flat.values()} == {arena.memory.untyped_storage().data_ptr()}
    assert sum(num_bytes for num_bytes, _ in asked) == arena.num_bytes
    arena.like()
    assert len(asked) == 1  # a second arena lies in torch's own memory
    for wrong in (
        lambda num_bytes, device: garbage(num_bytes + 8, device)[8:],
        lambda num_bytes, device: garbage(num_bytes, device)[1:],
        lambda num_bytes, device: garbage(num_bytes, device).view(torch.int8),
    ):
        model = Mixed()
        before = outputs(model)
        with pytest.raises(ArenaError, match="allocate"):
            Arena.adopt(model, wrong)
        assert torch.equal(outputs(model), before)


def test_training_an_adopted_model_is_training_its_arena() -> None:
    plain, adopted = make(), make()
    arena = Arena.adopt(adopted)
    for model in (plain, adopted):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.arange(3, 43).view(2, 20), use_cache=False).logits.square().mean().backward()
        optimizer.step()
    assert equal(dict(named_tensors(plain)), arena.views)


def test_an_adopted_model_is_saved_whole(tmp_path: Path) -> None:
    model = make()
    Arena.adopt(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path)), outputs(model))


# Joined views


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_query_key_and_value_are_one_matrix(part: str) -> None:
    model = make()
    model.model.layers[1].self_attn.k_proj.bias.data *= 3
    arena = Arena.adopt(model)
    names = [f"{ATTENTION}.{one}_proj.{part}" for one in "qkv"]
    if part == "bias":
        assert arena.joined(names) is None, "32 numbers of float32 are not a multiple of 256 bytes"
        names = names[:2]  # the first has 64
    tensors = [dict(named_tensors(model))[name] for name in names]
    joined = arena.joined(names)
    assert torch.equal(joined, torch.cat(tensors)) and joined.is_contiguous()
    joined[70:] = 5
    assert (tensors[1][6:] == 5).all() and not (tensors[0] == 5).any()


def test_experts_and_gates_join_too() -> None:
    arena = Arena.adopt(make())
    gate, up = (arena.views[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up"))
    joined = arena.joined([f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up")])
    assert torch.equal(joined, torch.cat([gate, up])) and joined.data_ptr() == gate.data_ptr()


def test_what_does_not_touch_or_fit_is_not_joined() -> None:
    arena = Arena.adopt(make())
    query, key, value = (f"{ATTENTION}.{one}_proj.weight" for one in "qkv")
    assert arena.joined([query, key, value]) is not None
    assert arena.joined([key, query]) is None, "another order"
    assert arena.joined([query, value]) is None, "one between"
    assert arena.joined([query, query]) is None, "the same twice"
    assert arena.joined([f"{ATTENTION}.o_proj.weight", "model.layers.1.mlp.gate_proj.weight"]) is not None
    assert arena.joined(["model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"]) is None, "other columns"
    mixed = Arena.adopt(Mixed())
    assert mixed.joined(["count"]) is None, "no first dimension"
    assert mixed.joined(["embed.weight", "scale"]) is None, "other dtypes"
    assert mixed.joined(["embed.weight", "norm.weight"]) is None, "a gap"
    with pytest.raises(KeyError, match="nobody"):
        arena.joined([query, "nobody"])


# The second set


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("make_model", [Mixed, make])
def test_what_was_filled_is_what_runs(make_model, in_place: bool) -> None:
    model = make_model()
    spare = StagedWeights(model, arena=Arena.adopt(model, garbage), in_place=in_place)
    before, old = outputs(model), copied(model)
    new = changed(model)
    assert fill(spare, new.items(), update := announce(new)) == update.manifest
    assert torch.equal(outputs(model), before) and equal(copied(model), old)
    spare.exchange()
    reference = make_model()
    reference.load_state_dict(new, strict=False)
    assert torch.equal(outputs(model), outputs(reference)) and equal(copied(model), new) and equal(spare.arena.views, new)
    assert not torch.equal(outputs(model), before)


def test_in_place_every_address_and_joined_view_holds() -> None:
    model = make()
    spare = StagedWeights(model, in_place=True)
    names = [f"{ATTENTION}.{one}_proj.weight" for one in "qkv"]
    joined = spare.arena.joined(names)
    places = {name: tensor.data_ptr() for name, tensor in named_tensors(model)}
    for version in (1, 2, 3):
        new = changed(model, 1 + version)
        fill(spare, new.items(), announce(new, version))
        assert not torch.equal(joined, torch.cat([new[name] for name in names]))
        spare.exchange()
        assert torch.equal(joined, torch.cat([new[name] for name in names]))
        assert {name: tensor.data_ptr() for name, tensor in named_tensors(model)} == places


def test_pointers_exchanged_twice_give_back_what_was() -> None:
    model = make()
    spare = StagedWeights(model)
    names = [f"{ATTENTION}.{one}_proj.weight" for one in "qkv"]
    old, before, flat = copied(model), outputs(model), spare.arena.flat
    fill(spare, (new := changed(model)).items(), announce(new))
    staged = spare._staging.flat
    for arena, held in ((staged, new), (flat, old), (staged, new)):
        spare.exchange()
        assert spare.arena.flat is arena and equal(copied(model), held)
        assert torch.equal(spare.arena.joined(names), torch.cat([held[name] for name in names]))
        assert torch.equal(outputs(model), before) == (held is old)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_by_name(number: float, dtype: torch.dtype, in_place: bool) -> None:
    model = make(dtype=dtype)
    spare, before = StagedWeights(model, in_place=in_place), outputs(model)
    new = changed(model)
    new[f"{ATTENTION}.k_proj.bias"][-1] = number
    new["model.norm.weight"][0] = -number
    with pytest.raises(WeightError, match=rf"version 1: tensor '{ATTENTION}\.k_proj\.bias' holds NaN or infinity"):
        fill(spare, new.items(), announce(new))
    assert torch.equal(outputs(model), before)
    with pytest.raises(WeightError, match="no weights lie ready"):
        spare.exchange()
    assert torch.equal(outputs(model), before)
    good = changed(model)
    fill(spare, good.items(), announce(good))
    spare.exchange()
    assert equal(copied(model), good)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    """Though their sum is not."""
    model = make(dtype=dtype)
    new = {name: torch.full_like(tensor, torch.finfo(dtype).max) for name, tensor in named_tensors(model)}
    spare = StagedWeights(model)
    fill(spare, new.items(), announce(new))
    new["model.norm.weight"][3] = float("inf")
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' holds NaN or infinity"):
        fill(spare, new.items(), announce(new))


def faulty(fault: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A set of tensors with something wrong about one of them."""
    name = f"{ATTENTION}.v_proj.weight"
    tensor = tensors[name]
    if fault in ("missing", "renamed"):
        del tensors[name]
    if fault == "renamed":
        tensors[f"{name}s"] = tensor
    elif fault == "more":
        tensors["another"] = tensor
    elif fault == "turned":
        tensors[name] = tensor.t().contiguous()
    elif fault == "broadcast":
        tensors[name] = tensor[:1]
    elif fault == "reshaped":
        tensors[name] = tensor.reshape(-1)
    elif fault == "wider":
        tensors[name] = tensor.double()
    elif fault == "same width":
        tensors[name] = tensor.view(torch.int32)
    return tensors


@pytest.mark.parametrize("fault", ["missing", "renamed", "more", "turned", "broadcast", "reshaped", "wider", "same width"])
def test_what_is_not_this_model_is_refused_whole(fault: str) -> None:
    model = make()
    spare, before = StagedWeights(model, in_place=True), outputs(model)
    fill(spare, (first := changed(model, 1.25)).items(), announce(first))
    wrong = faulty(fault, changed(model))
    with pytest.raises(WeightError, match=r"version 1: .*(v_proj|another)"):
        fill(spare, wrong.items(), announce(wrong))
    assert equal(spare._staging.views, first), "seen before anything was copied"
    with pytest.raises(WeightError, match="no weights lie ready"):
        spare.exchange()
    assert torch.equal(outputs(model), before)


def test_a_changed_bit_is_seen() -> None:
    model = make()
    spare = StagedWeights(model)
    new = changed(model)
    update = announce(new)
    new["model.norm.weight"].view(torch.int32)[5] ^= 1
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' differs from what was sent"):
        fill(spare, new.items(), update)


def test_two_names_of_one_memory_must_agree() -> None:
    model = Mixed()
    spare = StagedWeights(model)
    new = changed(model)
    new["twin.weight"] = new["twin.weight"] * 2
    with pytest.raises(WeightError, match="differs from what was sent"):
        fill(spare, new.items(), announce(new))


def test_the_second_set_is_made_late_and_given_up() -> None:
    model = make()
    spare = StagedWeights(model)
    num_bytes = sum(-(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT for _, tensor in named_tensors(model))
    assert spare._staging is None and spare.arena.num_bytes == num_bytes
    with pytest.raises(WeightError, match="no weights lie ready"):
        spare.exchange()
    for version in (1, 2):
        fill(spare, (new := changed(model, 1 + version)).items(), announce(new, version))
        spare.exchange()
        memory = weakref.ref(spare._staging.flat[torch.float32])
        spare.release()
        gc.collect()
        assert memory() is None and equal(copied(model), new)
        with pytest.raises(WeightError, match="no weights lie ready"):
            spare.exchange()


def test_a_model_moved_out_of_its_arena_is_not_left_behind() -> None:
    model = make()
    spare = StagedWeights(model, in_place=True)
    for tensor in dict(named_tensors(model)).values():
        tensor.copy_(tensor * 2)  # in place: it stays where it is
    assert spare.arena.strayed() is None
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    new = changed(model)
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' is not in its arena any more"):
        fill(spare, new.items(), announce(new))


@pytest.mark.parametrize("in_place", [False, True])
def test_filling_beside_a_model_that_computes_does_not_disturb_it(in_place: bool) -> None:
    model = make()
    spare, before = StagedWeights(model, in_place=in_place), outputs(model)
    stop, failures = threading.Event(), []

    def keep_filling() -> None:
        version = 0
        while not stop.is_set():
            new = changed(model, 2 + version % 7)
            try:
                fill(spare, new.items(), announce(new, version))
            except RuntimeError as error:
                failures.append(error)
            version += 1

    thread = threading.Thread(target=keep_filling)
    thread.start()
    for _ in range(30):
        assert torch.equal(outputs(model), before)
    stop.set()
    thread.join()
    assert not failures
    spare.exchange()
    assert not torch.equal(outputs(model), before)


# Checksums


def test_an_arena_says_what_it_holds() -> None:
    model = Mixed()
    arena = Arena.adopt(model, garbage)
    for odd in (None, "scale"):
        sums, found = make_inspector(arena)(arena)
        assert found == odd and sums.tolist() == make_manifest(named_tensors(model)).checksums.tolist()
        model.scale[2] = float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_any_one_bit_changes_a_checksum(dtype: torch.dtype) -> None:
    """Signs too: the highest bit of a word reaches only the highest of the sum."""
    tensor = torch.arange(1, 12).to(dtype)
    before, octets = checksum(tensor), tensor.view(torch.uint8)
    for place in range(octets.numel()):
        for bit in range(8):
            octets[place] ^= 1 << bit
            assert checksum(tensor) != before, (place, bit)
            octets[place] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_exchanged_change_a_checksum(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Parts of one word, and of as many words as are summed at once, half of them and twice as many."""
    monkeypatch.setattr("headrace.model.weights._WORDS", 4)
    words = torch.arange(1, 33) * -(3**39)  # products far beyond 64 bits
    parts, before = words.split(size), checksum(words)
    assert before == sum(word * (2 * place + 1) for place, word in enumerate(words.tolist())) % 2**64
    for first, second in itertools.combinations(range(len(parts)), 2):
        swapped = list(parts)
        swapped[first], swapped[second] = parts[second], parts[first]
        assert checksum(torch.cat(swapped)) != before, (first, second)


INTERPRETED = """
import itertools, torch
from headrace.model import checksum_kernel
from headrace.model.arena import Arena
from headrace.model.weights import checksum, make_inspector

checksum_kernel._BLOCK = 64
torch.manual_seed(0)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = [(), (1,), (3,), (7,), (0, 4), (64,), (63, 4), (8, 8, 4), (65, 9), (513,), (331, 3)]
NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
count = 0
for dtype in [*NUMBERS, torch.int64, torch.int32, torch.uint8, torch.bool]:
    model = torch.nn.Module()
    for place, shape in enumerate(SHAPES):
        if dtype in NUMBERS:
            tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
        else:
            tensor = torch.randint(0, 2 if dtype == torch.bool else 256, shape).to(dtype)
        if dtype == torch.int64:
            tensor = tensor * -(2**55) - 1
        model.register_buffer(f"t{place}", tensor)
    arena = Arena.adopt(model)
    flat, tables = arena.flat[dtype], checksum_kernel.FlatTables(arena)

    def check(odd):
        sums, first = tables.inspect(arena)
        assert sums.tolist() == [checksum(view) for view in arena.views.values()], (dtype, odd)
        assert tables._found[1].tolist() == [place in odd for place in range(len(SHAPES))], (dtype, odd)
        assert first == (f"t{min(odd)}" if odd else None)

    check(set())
    count += 1
    if dtype not in NUMBERS:
        continue
    limits = torch.finfo(dtype)
    views = {place: arena.views[f"t{place}"].view(-1) for place in (0, 2, 6, 8, 10)}
    for share, number in zip([0, 0.5, 1], [float("nan"), float("inf"), float("-inf")], strict=True):
        kept = flat.clone()
        for view in views.values():
            view[int((len(view) - 1) * share)] = number
        check(set(views))
        flat.copy_(kept)
        count += 1
    bits = arena.views["t9"].view(BITS[dtype.itemsize])
    for pattern in (torch.tensor(float("inf"), dtype=dtype), torch.tensor(float("-inf"), dtype=dtype)):
        kept = bits[100].clone()
        bits[100] = pattern.view(BITS[dtype.itemsize]) + 1  # the smallest payload: a signalling NaN
        check({9})
        bits[100] = kept
    view = arena.views["t9"]
    for place, number in enumerate([limits.max, limits.min, limits.tiny, -0.0, limits.smallest_normal / 2]):
        view[place::5] = number
    check(set())
print("checked", count)

mixed = torch.nn.Sequential(torch.nn.Linear(9, 5).bfloat16(), torch.nn.BatchNorm1d(5))
arena = Arena.adopt(mixed)
mixed[1].running_var[2] = float("inf")
sums, odd = make_inspector(arena)(arena)
assert odd == "1.running_var" and len(arena.flat) == 3
arena.device = torch.device("cuda")  # so that the kernel is taken, on memory that is not there
found, found_odd = make_inspector(arena)(arena)
assert found.tolist() == sums.tolist() and found_odd == odd
"""


@pytest.mark.long
def test_the_kernel_gives_every_checksum_and_finds_what_is_not_finite() -> None:
    """In Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked ") and int(done.stdout.split()[1]) == 8 + 4 * 3


def test_without_a_gpu_triton_is_not_imported() -> None:
    script = """
import sys, torch
from headrace.model.weights import StagedWeights, make_inspector
before = "triton" in sys.modules
arena = StagedWeights(torch.nn.Linear(3, 3)).arena
make_inspector(arena)(arena)
sys.exit("headrace.model.checksum_kernel" in sys.modules or ("triton" in sys.modules) != before)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_padding_changes_no_checksum() -> None:
    model = nn.Linear(3, 5, dtype=torch.bfloat16)
    alone = [checksum(tensor) for _, tensor in named_tensors(model)]
    arena = Arena.adopt(model, garbage)
    assert [checksum(view) for view in arena.views.values()] == alone
    padded = nn.functional.pad(arena.views["weight"].view(-1), (0, 1))
    assert checksum(padded) == alone[0], "a tensor that does not fill its last word is as if zeros followed"


def test_room_behind_a_matrix_is_part_of_the_joined_view_and_of_nothing_else() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 16), nn.Linear(64, 8))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    arena = Arena.adopt(model, room={"1.weight": 5})
    joined = arena.joined(["0.weight", "1.weight"])
    assert joined is not None and joined.shape == (32 + 16 + 5, 64) and not joined[48:].any()
    joined[48:] = 7.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    assert arena.joined(["1.weight", "2.weight"]) is None  # the room is between them
