"""Adapters by row: the kernels against plain torch, and whole engines with several versions in a batch."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, ints
from test_runner import assert_same, finish, make_model, prompt
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from headrace.engine.native.core import EngineCore
from headrace.engine.native.cuda import attention, runner
from headrace.engine.native.cuda.adapters import add_low_rank
from headrace.engine.native.cuda.runner import CudaRunner
from headrace.engine.request import HeldAdapter, Request
from headrace.lora import LoraSettings, adapter_of, add_adapter
from headrace.model import StagedWeights, prepare
from headrace.records import Rollout, Sampling, Source

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
)


@pytest.mark.parametrize(
    ("widths", "inputs", "rows", "rank"),
    [([24, 8, 8], 16, 7, 5), ([40], 1100, 20, 16), ([130, 10], 140, 70, 3), ([70, 70], 40, 20, 3)],
)
@pytest.mark.parametrize("num_places", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])])  # not interpreted
def test_each_row_gets_the_version_at_its_place(
    widths: list[int], inputs: int, rows: int, rank: int, num_places: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    shapes = [*((rank, inputs) for _ in widths), *((width, rank) for width in widths)]
    memory = torch.randn(
        num_places, sum(map(math.prod, shapes)), dtype=dtype, device=DEVICE
    )  # a version in each row, as in the bank
    parts = memory.split([math.prod(shape) for shape in shapes], dim=1)
    matrices = [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]
    downs, ups = matrices[: len(widths)], matrices[len(widths) :]
    hidden = torch.randn(rows, inputs, dtype=dtype, device=DEVICE)
    output = torch.randn(rows, sum(widths), dtype=dtype, device=DEVICE)
    places = torch.randint(0, num_places, (rows,), dtype=torch.int32, device=DEVICE)
    found = add_low_rank(output, hidden, downs, ups, places, 0.5)
    place = places.long()
    added = [
        torch.einsum("nor,nr->no", up[place].float(), torch.einsum("nri,ni->nr", down[place].float(), hidden.float()))
        for down, up in zip(downs, ups, strict=True)
    ]
    wanted = output.float() + 0.5 * torch.cat(added, dim=1)
    between = [torch.einsum("pri,ni->npr", down.float(), hidden.float()) for down in downs]
    columns = torch.cat(between, dim=2).flatten(1).to(dtype)  # as a product with all the first matrices gives them
    wide = torch.cat([output, columns], dim=1)
    for each in (found, add_low_rank(wide, hidden, downs, ups, places, 0.5)):
        assert (each.float() - wanted).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * wanted.abs().max()
    if widths == [70, 70]:
        gated = F.silu(wanted[:, :70]) * wanted[:, 70:]
        for given in (output, wide):
            each = add_low_rank(given, hidden, downs, ups, places, 0.5, True).float()
            assert (each - gated).abs().max() <= (1e-5 if dtype == torch.float32 else 3e-2) * gated.abs().max()


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_SPLITS", 1)
    monkeypatch.setattr(runner, "CudaRunner", functools.partial(CudaRunner, prompt_buckets=(4, 8)))


def make_core(*, kernels: bool, targets: tuple[str, ...] = ("all",), places: int = 8, **options: bool) -> EngineCore:
    model = make_model(layers=1)
    adapter = add_adapter(model, LoraSettings(rank=3, alpha=6.0, targets=targets), seed=1)
    with torch.no_grad():
        for index, tensor in enumerate(adapter.parameters()):
            draws = torch.Generator().manual_seed(index)
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draws))
    shape = {"slots": 4, "context": 12, "block_size": 4, "adapter_places": places}
    return EngineCore(model, name="e", **shape, kernels=kernels, graphs=False, **options)


def versions_of(core: EngineCore, count: int) -> list[HeldAdapter | None]:
    """The engine's own, then others."""
    assert core.adapter is not None
    own = {name: tensor.detach().clone() for name, tensor in core.adapter.own.items()}
    return [None, *(HeldAdapter(50 + i, {name: -i * tensor for name, tensor in own.items()}) for i in range(1, count))]


def generated(core: EngineCore, versions: list[HeldAdapter | None], *, num_tokens: int = 6) -> dict[str, Rollout]:
    done: dict[str, Rollout] = {}
    for index, held in enumerate(versions):
        given = Rollout.from_prompt(prompt(3 + index, seed=index), id=f"r{index}")
        sampling = Sampling(max_tokens=num_tokens, seed=index)
        core.submit(Request(given, sampling, on_done=lambda each: done.__setitem__(each.id, each), held=held))
    finish(core)
    return done


@pytest.mark.parametrize("places", [2, 3])
def test_a_batch_of_several_versions_is_what_the_plain_engine_samples(places: int) -> None:
    """With two places, more than there were; projections of one input that an adapter targets in part stay apart."""
    targets = ("q_proj", "gate_proj", "up_proj", "down_proj")
    cores = [make_core(kernels=kernels, targets=targets, places=places) for kernels in (True, False)]
    found, wanted = (generated(core, versions_of(core, 3), num_tokens=2) for core in cores)
    assert found.keys() == wanted.keys() and len({tuple(each.token_ids.tolist()) for each in found.values()}) == 3
    for name, rollout in found.items():
        assert_same(rollout, wanted[name])
    assert found["r0"].versions[-1] == 0 and found["r2"].versions[-1] == 52
    assert isinstance(cores[0].runner, CudaRunner) and cores[0].runner._bank is not None
    assert len(cores[0].runner._bank._memory) == {2: 4, 3: 3}[places]
    assert len(cores[0].runner._bank._rooms) == {2: 0, 3: 4}[places]  # one layer: the twin's linear layers that are targeted


def test_experts_and_modules_trained_whole_run_beside_the_rows() -> None:
    config = Qwen3MoeConfig(
        **{name: getattr(make_model().config, name) for name in SIZES},
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
    )
    found = []
    for kernels in (True, False):
        torch.manual_seed(0)
        model = prepare(AutoModelForCausalLM.from_config(config).float().eval().to(DEVICE), name="small")
        whole = ("lm_head", "embed_tokens", "norm", "q_proj")
        adapter = add_adapter(model, LoraSettings(rank=3, alpha=6.0, targets=("all", "experts"), whole=whole), seed=1)
        with torch.no_grad():
            for index, tensor in enumerate(adapter.parameters()):
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)).to(DEVICE))
        core = EngineCore(model, name="e", slots=4, context=12, block_size=4, kernels=kernels, graphs=False, adapter_places=1)
        found.append([generated(core, [None, None], num_tokens=2)])
        core.received.flat[torch.float32].mul_(-1.5)  # in place, as updates arrive
        core.runner.exchanged()
        core.changed_weights(policy="p", lineage="l", version=1)
        found[-1].append(generated(core, [None, None], num_tokens=2))
    for ours, plain in zip(*found, strict=True):
        for name in plain:
            assert_same(ours[name], plain[name])
    assert not np.array_equal(found[0][0]["r0"].logprobs, found[0][1]["r0"].logprobs)


def leased(*, kernels: bool) -> dict[str, Rollout]:
    """A rollout that runs when an update comes and keeps its version, one that begins later, and two turns of one that is
    between them when it comes."""
    core, done = make_core(kernels=kernels, keeps_leases=True), dict[str, Rollout]()
    assert core.adapter is not None
    spare = StagedWeights(core.adapter, arena=core.received, in_place=kernels)

    def submit(name: str, rollout: Rollout | None = None) -> None:
        rollout = rollout or Rollout.from_prompt(prompt(3), id=name)
        core.submit(Request(rollout, Sampling(max_tokens=4), on_done=lambda r: done.update({name: r})))
        core.step()

    submit("turn")
    finish(core)
    submit("before")
    spare._staging, spare._is_whole = core.received.like(), True
    spare._staging.memory.copy_(core.received.memory)
    spare._staging.flat[torch.float32].mul_(-1.5)
    replaced = core.exchange_weights(spare, keep=True)
    assert replaced is not None
    core.changed_weights(policy="p", lineage="l", version=1, held=HeldAdapter(0, replaced.views, replaced.memory))
    core.step()  # with nobody new in the batch
    submit("after")
    submit("next turn", done["turn"].append(np.array([5], dtype=np.int32), source=Source.TOOL))
    finish(core)
    return done


def test_an_update_reaches_the_rows_and_leased_ones_keep_their_version() -> None:
    found, wanted = leased(kernels=True), leased(kernels=False)
    versions = {name: set(rollout.versions[rollout.is_sampled].tolist()) for name, rollout in found.items()}
    assert versions == {"turn": {0}, "before": {0}, "after": {1}, "next turn": {0}}
    for name in found:
        assert_same(found[name], wanted[name])


COMPILED = """
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from headrace.engine.native.cuda import compiled
from headrace.engine.native.cuda.adapters import AdapterBank
from headrace.lora import LoraSettings, adapter_of, add_adapter
from headrace.model import Arena, hidden_states
from headrace.model.load import prepare

class Causal:
    def attend(self, module, query, key, value, spec):
        key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        heads = (each.transpose(0, 1) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True, scale=spec.scaling).transpose(0, 1)

torch.manual_seed(0)
same = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
config, settings = {
    "dense": lambda: (Qwen3Config(**same), LoraSettings(rank=3, alpha=6.0)),
    "experts": lambda: (
        Qwen3MoeConfig(**same, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
        LoraSettings(rank=3, alpha=6.0, targets=("all", "experts"), whole=("embed_tokens", "v_proj", "q_norm", "norm")),
    ),
}[KIND]()
model = prepare(AutoModelForCausalLM.from_config(config).eval(), name="small")
adapter = add_adapter(model, settings, seed=1)
with torch.no_grad():
    for tensor in adapter.parameters():
        tensor.normal_()
arena, places = Arena.adopt(model, room=compiled.room_for_adapter(model, PLACES)), PLACES
twin = compiled.make_twin(model, arena)
bank = AdapterBank(adapter, Arena.adopt(adapter), slots=4, places=places)
bank.attach(model), bank.attach(twin)
tokens = torch.arange(6)
slots = torch.zeros(6, dtype=torch.int32)
compiled.compile_layers(twin)
assert sum(type(module).__name__ == "_GatedLayers" for module in twin.modules()) == (3 if KIND == "dense" else 0)

def run(which):
    with torch.no_grad(), bank.adding(which, slots):
        return hidden_states(which, tokens, tokens, Causal())

with torch.no_grad():
    plain = hidden_states(model, tokens, tokens, Causal())
    with adapter.off():
        without = hidden_states(model, tokens, tokens, Causal())
assert (plain - without).abs().max() > 1e-2
assert (run(model) - plain).abs().max() < 1e-4
assert (run(twin) - plain).abs().max() < 1e-4
with torch.no_grad():  # an update
    for name, tensor in bank.arena.views.items():
        tensor.mul_(1.5)
bank.fill_rooms()
with torch.no_grad():
    updated = hidden_states(model, tokens, tokens, Causal())
assert (updated - plain).abs().max() > 1e-2
assert (run(twin) - updated).abs().max() < 1e-4
layers = counters["stats"]["unique_graphs"]
assert layers <= 4, f"{layers} graphs: each layer is compiled anew"
"""


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="interpreted; tests/gpu/test_graphs.py has the real ones")
@pytest.mark.parametrize(("kind", "places"), [("dense", 8), ("dense", 1), ("experts", 1)])
def test_layers_with_an_adapter_share_one_compilation(kind: str, places: int) -> None:
    given = f"KIND, PLACES = {kind!r}, {places}\n{COMPILED}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", given], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_model_and_its_twin_add_at_the_same_time() -> None:
    """A twin is captured in one thread while the model runs in another: what one adds to its rows is not the other's."""
    core = make_core(kernels=True)
    assert isinstance(core.runner, CudaRunner) and core.runner._bank is not None
    model, twin = core.model, core.runner.graphs._twin
    assert adapter_of(model) is not adapter_of(twin)
    with core.runner._bank.adding(twin, ints([0])):
        assert adapter_of(model).by_row is None
