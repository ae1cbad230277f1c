"""What the routers' hooks see is what the routers choose, computed again by hand from their logits."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import FAMILIES, MOE, SMALL, make

from headrace.model.attention import PackedContext
from headrace.model.load import ModelError, hidden_states, prepare
from headrace.model.routers import Routers, find_readable_routers
from headrace.records import unknown_expert

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_EXPERTS, TOP_K = 4, 2
MOE_LAYERS = {"qwen3_moe": (0, 1, 2, 3), "mixtral": (0, 1, 2, 3), "gpt_oss": (0, 1, 2, 3), "deepseek_v3": (1, 2, 3)}
ROUTER = {"qwen3_moe": "gate", "mixtral": "gate", "gpt_oss": "router", "deepseek_v3": "gate"}
TOKENS = torch.arange(3, 26)


def routers_of(model: transformers.PreTrainedModel) -> Routers:
    routers = find_readable_routers(model)
    assert routers is not None
    return routers


def unknown_of(routers: Routers) -> int:
    return unknown_expert(str(routers.dtype).removeprefix("torch."))


def forward(
    model: transformers.PreTrainedModel, tokens: torch.Tensor = TOKENS, mask: torch.Tensor | None = None
) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens.unsqueeze(0), attention_mask=mask, use_cache=False).logits[0]


def experts_by_hand(family: str, router: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, top_k] sorted, from nothing but the router's weights and what went into it."""
    logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
    if family == "deepseek_v3":
        logits = logits.sigmoid() + router.e_score_correction_bias  # one group, so no group is masked
    return logits.argsort(dim=-1, descending=True)[:, :TOP_K].sort(dim=-1).values


@contextlib.contextmanager
def inputs_of(modules: list[torch.nn.Module]):
    seen: list[torch.Tensor] = []
    handles = [module.register_forward_pre_hook(lambda module, given: seen.append(given[0])) for module in modules]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", MOE_LAYERS)
def test_what_is_recorded_is_what_the_router_chose(family: str) -> None:
    model = make(family)
    modules = [getattr(model.model.layers[layer].mlp, ROUTER[family]) for layer in MOE_LAYERS[family]]
    for module in modules:
        if family == "deepseek_v3":  # a bias that changes the choice but not the logits
            module.e_score_correction_bias.copy_(torch.tensor([0.0, 0.4, -0.4, 0.2]))
    routers = routers_of(model)
    assert (routers.num_layers, routers.top_k, routers.dtype) == (len(modules), TOP_K, torch.uint8)

    recorded: list[tuple[int, torch.Tensor]] = []
    with inputs_of(modules) as hidden, routers.recording(lambda layer, indices: recorded.append((layer, indices))):
        forward(model)
    assert [layer for layer, _ in recorded] == list(range(len(modules)))
    different = set()
    for (_, indices), module, given in zip(recorded, modules, hidden, strict=True):
        assert indices.shape == (len(TOKENS), TOP_K)
        assert torch.equal(indices.sort(dim=-1).values, experts_by_hand(family, module, given))
        different.add(tuple(indices.flatten().tolist()))
    assert len(different) == len(modules)  # or the order of layers would not have been tested


@pytest.mark.parametrize(
    "family", [each if each == "qwen3_moe" else pytest.param(each, marks=pytest.mark.long) for each in MOE_LAYERS]
)
def test_recording_changes_nothing_and_ends_when_it_is_left(family: str) -> None:
    model = make(family)
    before = forward(model)
    routers, calls = routers_of(model), []
    assert torch.equal(forward(model), before)
    with routers.recording(lambda layer, indices: calls.append(layer)):
        assert torch.equal(forward(model), before)
    with pytest.raises(RuntimeError, match="stop here"), routers.recording(stop_here):
        forward(model)
    num_calls = len(calls)
    assert torch.equal(forward(model), before)
    assert len(calls) == num_calls == routers.num_layers
    with routers.recording(lambda layer, indices: calls.append(layer)):
        forward(model)
    assert len(calls) == 2 * num_calls


def stop_here(layer: int, indices: torch.Tensor) -> None:
    raise RuntimeError("stop here")


def test_one_recording_at_a_time() -> None:
    routers = routers_of(make("mixtral"))
    with routers.recording(stop_here), pytest.raises(AssertionError, match="already"), routers.recording(stop_here):
        pass


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - MOE_LAYERS.keys()))
def test_a_dense_model_has_no_routers(family: str) -> None:
    assert find_readable_routers(make(family)) is None


def test_indices_are_found_wherever_a_router_returns_them() -> None:
    """Granite's come first, not last."""
    config = transformers.GraniteMoeConfig(**{**SMALL, **MOE})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    modules = [layer.block_sparse_moe.router for layer in model.model.layers]
    for module in modules:
        torch.nn.init.normal_(module.weight)
    routers, recorded = routers_of(model), []
    with inputs_of(modules) as hidden, routers.recording(lambda layer, indices: recorded.append(indices)):
        forward(model)
    for indices, module, given in zip(recorded, modules, hidden, strict=True):
        assert torch.equal(indices.sort(dim=-1).values, experts_by_hand("granitemoe", module, given))
    assert len(recorded) == 4


@pytest.mark.parametrize(("num_experts", "dtype", "unknown"), [(254, torch.uint8, 255), (255, torch.int16, -1)])
def test_many_experts_need_wider_numbers(num_experts: int, dtype: torch.dtype, unknown: int) -> None:
    small = {**SMALL, "hidden_size": 16, "moe_intermediate_size": 2, "num_experts_per_tok": 3, "num_hidden_layers": 1}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**small, num_experts=num_experts))
    routers = routers_of(model)
    assert (routers.top_k, routers.num_layers, routers.dtype) == (3, 1, dtype)
    assert unknown_of(routers) == unknown


# Models whose routing cannot be read


def llama4() -> transformers.PreTrainedModel:
    """Its router returns scores over all experts and no indices."""
    config = transformers.Llama4TextConfig(
        **{**SMALL, "num_hidden_layers": 2}, num_local_experts=4, interleave_moe_layer_step=1, intermediate_size_mlp=96
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def differing() -> transformers.PreTrainedModel:
    model = make("mixtral")
    model.model.layers[2].mlp.gate.top_k = 1
    return model


def without_a_router() -> transformers.PreTrainedModel:
    model = make("qwen3_moe")
    model.model.layers[1].mlp.gate = torch.nn.Linear(64, 4)
    return model


def without_a_size() -> transformers.PreTrainedModel:
    model = make("qwen3_moe")
    del model.model.layers[1].mlp.gate.num_experts
    return model


@pytest.mark.parametrize("make_model", [llama4, differing, without_a_router, without_a_size])
def test_routers_of_another_form_are_not_read(make_model: Callable) -> None:
    assert find_readable_routers(make_model()) is None


def test_a_router_that_returns_something_else_is_refused_when_it_does() -> None:
    model = make("mixtral")
    routers = routers_of(model)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1  # it now chooses fewer than it said
    with pytest.raises(ModelError, match="MixtralTopKRouter does not return the indices of 2"), routers.recording(stop_here):
        forward(model)


# Compiled and captured


class Buffers:
    """A sink that leaves the indices where they can be found after the pass, as an engine's does."""

    def __init__(self, routers: Routers, num_tokens: int, *, device: str = "cpu") -> None:
        shape = (num_tokens, routers.num_layers, routers.top_k)
        self.routing = torch.full(shape, unknown_of(routers), dtype=routers.dtype, device=device)

    def __call__(self, layer: int, indices: torch.Tensor) -> None:
        self.routing[:, layer].copy_(indices)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_a_compiled_model_is_recorded_in_one_graph(family: str) -> None:
    model = make(family)
    model.set_experts_implementation("batched_mm")
    routers = routers_of(model)
    expected, recorded = Buffers(routers, len(TOKENS)), Buffers(routers, len(TOKENS))
    other = torch.flip(TOKENS, dims=[0])
    with routers.recording(expected):
        logits = forward(model)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count_graphs(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.nn.Module:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=count_graphs, fullgraph=True)
    torch.testing.assert_close(forward(compiled), logits)
    assert len(graphs) == 1
    assert (recorded.routing == unknown_of(routers)).all()
    for _ in range(3):
        with routers.recording(recorded):
            forward(compiled, other)
            torch.testing.assert_close(forward(compiled), logits)
        assert torch.equal(recorded.routing, expected.routing)
        forward(compiled, other)
        assert torch.equal(recorded.routing, expected.routing)
    assert len(graphs) == 2  # one without and one with: the same sink again is not compiled again


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", MOE_LAYERS)
def test_a_captured_graph_records_at_every_replay(family: str) -> None:
    model = make(family).to(device="cuda", dtype=torch.bfloat16)
    routers = routers_of(model)
    tokens = TOKENS.cuda()
    is_later = torch.ones(len(TOKENS), len(TOKENS), device="cuda").triu(1).bool()
    mask = torch.zeros(1, 1, *is_later.shape, dtype=torch.bfloat16, device="cuda").masked_fill(is_later, -1e4)  # made before
    expected, recorded = (Buffers(routers, len(TOKENS), device="cuda") for _ in range(2))
    with routers.recording(recorded):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            forward(model, tokens, mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(model, tokens, mask)
    for seed in range(3):
        tokens.copy_(torch.randint(3, 96, TOKENS.shape, generator=torch.Generator().manual_seed(seed)))
        recorded.routing.fill_(unknown_of(routers))
        graph.replay()
        with routers.recording(expected):
            forward(model, tokens, mask)
        assert torch.equal(recorded.routing, expected.routing)


# Many sequences in one pass


@pytest.mark.parametrize("family", MOE_LAYERS)
def test_rows_lie_in_the_order_of_the_packed_tokens(family: str) -> None:
    """And each is what its sequence alone would have chosen, so that a recorded row can be replayed in any packing."""
    model = prepare(make(family), name=family, exact=True)
    routers, lengths = routers_of(model), [17, 5, 40, 1]
    sequences = [torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]

    def routing_of(members: list[torch.Tensor]) -> torch.Tensor:
        sizes = [len(member) for member in members]
        buffers, positions = Buffers(routers, sum(sizes)), torch.cat([torch.arange(size) for size in sizes])
        with torch.no_grad(), routers.recording(buffers):
            hidden_states(model, torch.cat(members), positions, PackedContext(sizes, exact=True))
        return buffers.routing

    together = routing_of(sequences).split(lengths)
    for sequence, rows in zip(sequences, together, strict=True):
        assert (rows < NUM_EXPERTS).all()
        assert torch.equal(rows, routing_of([sequence]))
