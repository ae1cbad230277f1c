"""Experts as grouped products: they are the eager ones, and layers with them compile once, free, recorded and replayed."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from routed import FAMILIES_WITH_EXPERTS, every_family, make_model
from torch._dynamo.utils import counters

from headrace.model import experts, narrow
from headrace.model.load import hidden_states
from headrace.model.routers import Routers, find_readable_routers
from headrace.trainer import layers

if TYPE_CHECKING:
    import transformers

TOKENS = torch.randint(3, 96, (37,), generator=torch.Generator().manual_seed(1))
SEEN = torch.randn(37, 64, generator=torch.Generator().manual_seed(2))


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_family
def test_grouped_experts_are_eager_ones(family: str, dtype: torch.dtype) -> None:
    """Forward and backward, with an expert that nobody chose."""
    model = make_model(family)
    assert model.config._experts_implementation == experts.NAME
    block = next(each for each in model.modules() if hasattr(each, "experts")).experts.to(dtype)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(37, 3, generator=generator).argsort(dim=-1)[:, :2]
    found = {}
    for way in ("eager", experts.NAME):
        model.set_experts_implementation(way)
        block.zero_grad()
        hidden = SEEN.to(dtype, copy=True).requires_grad_()
        weights = torch.linspace(0.1, 1, 74).view(37, 2).to(dtype).requires_grad_()
        output = block(hidden, chosen, weights)
        (output.float() * SEEN.flip(0)).sum().backward()
        found[way] = [output, hidden.grad, weights.grad, *(each.grad.clone() for each in block.parameters())]
    for ours, theirs in zip(found[experts.NAME], found["eager"], strict=True):
        assert ours.dtype == theirs.dtype == dtype and float(theirs.abs().max()) > 0
        assert apart(ours, theirs) < (1e-6 if dtype == torch.float32 else 0.01)
    assert not block.down_proj.grad[3].any()


class OneDocument:
    """Attention that any compiler takes."""

    def attend(self, module, query, key, value, spec):
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=spec.scaling, enable_gqa=True)
        return attended[0].transpose(0, 1)


def run_pass(
    model: transformers.PreTrainedModel, routers: Routers, count: int, forced: torch.Tensor | None
) -> list[torch.Tensor]:
    """Hidden states, the experts that were used, where the router would have chosen others, and all gradients."""
    used: dict[int, torch.Tensor] = {}
    model.zero_grad()
    replaying = contextlib.nullcontext(torch.empty(0)) if forced is None else routers.replaying(forced)
    with replaying as differs, routers.recording(used.__setitem__):
        hidden = hidden_states(model, TOKENS[:count], torch.arange(count), OneDocument())
        (hidden.float() * SEEN[:count]).sum().backward()
    gradients = [each.grad for each in model.base_model.parameters() if each.grad is not None]
    return [hidden.detach(), torch.stack([used[layer] for layer in range(routers.num_layers)], dim=1), differs, *gradients]


def check_compiled(model: transformers.PreTrainedModel, compile_layers, *, tolerance: float, num_graphs: int) -> None:
    routers = find_readable_routers(model)
    assert routers is not None
    order = torch.rand(37, routers.num_layers, 4, generator=torch.Generator().manual_seed(3)).argsort(dim=-1)
    forced = order[..., :2].to(torch.int16)
    forced[5] = -1
    passes = [(37, None), (29, None), (37, forced), (29, forced[8:])]
    expected = [run_pass(model, routers, *each) for each in passes]
    torch._dynamo.reset()
    counters.clear()
    compile_layers(model)
    for (count, given), wanted in zip(passes, expected, strict=True):
        found = run_pass(model, routers, count, given)
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])
        if given is not None:
            is_known = given[:, 0, 0] >= 0
            assert torch.equal(found[1][is_known], given[is_known].long()) and found[2].any()
        for ours, theirs in zip([found[0], *found[3:]], [wanted[0], *wanted[3:]], strict=True):
            assert apart(ours, theirs) < tolerance
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(each, marks=pytest.mark.long) for each in FAMILIES_WITH_EXPERTS[1:])]
)
def test_compiled_layers_share_one_graph_and_replay_in_another(family: str) -> None:
    def compile_layers(model: transformers.PreTrainedModel) -> None:
        for layer in model.base_model.layers:
            layer.compile(dynamic=True, fullgraph=True, backend="aot_eager")

    num_graphs = {"deepseek_v3": 3, "gpt_oss": 4}.get(family, 2)  # a dense layer is never replayed; two kinds of windows
    check_compiled(make_model(family), compile_layers, tolerance=1e-5, num_graphs=num_graphs)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_the_trainers_compilation_in_bfloat16() -> None:
    model = make_model("qwen3_moe")
    narrow(model, torch.bfloat16)
    check_compiled(model, layers.compile_all, tolerance=0.03, num_graphs=3)  # with the last norm


@every_family
def test_a_narrow_model_routes_in_float32_whether_followed_or_not(family: str) -> None:
    """As a reference does, whose routing nobody reads; and its residual stream is wide."""
    model = make_model(family)
    narrow(model, torch.bfloat16)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return hidden_states(model, TOKENS, torch.arange(len(TOKENS)), OneDocument())

    before = forward()
    routers = find_readable_routers(model)
    assert routers is not None
    with routers.watching() as seen:
        assert torch.equal(forward(), before) and before.dtype == torch.float32
    assert len(seen) == routers.num_layers
    for logits, shares, _ in seen.values():
        assert shares.dtype == torch.float32 and torch.allclose(shares.sum(dim=-1), torch.ones(len(TOKENS)))
        assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())
