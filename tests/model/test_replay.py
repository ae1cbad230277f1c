"""Recorded routing, replayed: every layer takes the recorded experts, weighs them by its own formula, and learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from families import MOE, SMALL, make
from siblings import make_prompt, sibling
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from headrace.model.attention import PackedContext
from headrace.model.head import Head
from headrace.model.load import ModelError, hidden_states, prepare
from headrace.model.packing import score
from headrace.model.routers import Routers, check_recorded, find_readable_routers

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_EXPERTS, TOP_K, NUM_TOKENS = 4, 2, 37
VARIANTS = {
    "qwen3_moe_plain": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v3_grouped": ("deepseek_v3", {"n_group": 2, "topk_group": 1}),  # both experts are of the better half
}
TOKENS = torch.randint(3, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def make_moe(family: str) -> tuple[transformers.PreTrainedModel, Routers]:
    """The model, and its routers."""
    if family == "granitemoe":
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.GraniteMoeConfig(**{**SMALL, **MOE}))
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                torch.nn.init.normal_(parameter, std=0.2)
    else:
        name, changes = VARIANTS.get(family, (family, {}))
        model = make(name, **{"norm_topk_prob": True, **changes})
    if family.startswith("deepseek_v3"):
        for layer in model.model.layers[1:]:  # changes the choice and not the weights
            layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.4, -0.4, 0.2]))
    routers = find_readable_routers(prepare(model, name=family))
    assert routers is not None
    return model, routers


def weights_by_hand(family: str, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What each family's paper says of the chosen experts' weights."""
    every = logits.sigmoid() if family.startswith("deepseek_v3") else logits.softmax(dim=-1)
    if family in ("gpt_oss", "granitemoe"):
        return logits.gather(-1, chosen).softmax(dim=-1)
    weights = every.gather(-1, chosen)
    if family == "qwen3_moe_plain":
        return weights
    return weights / weights.sum(dim=-1, keepdim=True) * (2.5 if family.startswith("deepseek_v3") else 1.0)


FAMILIES = ["qwen3_moe", "qwen3_moe_plain", "mixtral", "deepseek_v3", "deepseek_v3_grouped", "gpt_oss", "granitemoe"]
OFTEN = ("qwen3_moe", "deepseek_v3_grouped")
every_family = pytest.mark.parametrize(
    "family", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.long) for each in FAMILIES]
)


def forward(model: transformers.PreTrainedModel) -> torch.Tensor:
    return hidden_states(model, TOKENS, torch.arange(NUM_TOKENS), PackedContext([NUM_TOKENS]))


def record(model: transformers.PreTrainedModel, routers: Routers) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the experts of [rows, layers, top_k] that were really used."""
    chosen: dict[int, torch.Tensor] = {}
    with routers.recording(chosen.__setitem__):
        hidden = forward(model)
    return hidden, torch.stack([chosen[layer] for layer in range(routers.num_layers)], dim=1)


@every_family
def test_replaying_its_own_choice_changes_no_bit(family: str) -> None:
    model, routers = make_moe(family)
    free, own = record(model, routers)
    free.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.model.named_parameters()}
    model.zero_grad()
    with routers.replaying(own.to(torch.int16)) as differs:
        replayed, again = record(model, routers)
        replayed.square().sum().backward()
    assert torch.equal(replayed, free) and torch.equal(again, own) and not differs.any()
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-6, atol=1e-6, msg=name)
    assert torch.equal(forward(model), free)  # and it ends when it is left


@every_family
def test_every_layer_takes_the_recorded_experts_and_weighs_them_by_its_formula(family: str) -> None:
    model, routers = make_moe(family)
    model.get_input_embeddings().requires_grad_(False)
    modules = [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]
    outputs: list[tuple[torch.Tensor, ...]] = []
    for module in modules:
        module.register_forward_hook(lambda module, given, output: outputs.append(output))
    with torch.no_grad():
        own = record(model, routers)[1]
    order = np.random.default_rng(0).permuted(np.tile(np.arange(NUM_EXPERTS), (NUM_TOKENS, routers.num_layers, 1)), axis=-1)
    forced = torch.from_numpy(order[..., :TOP_K]).to(torch.int16)
    forced[5], forced[-1] = -1, -1
    if family == "deepseek_v3_grouped":
        halves = own // 2, forced // 2
        assert torch.equal(halves[0][..., 0], halves[0][..., 1]) and not torch.equal(halves[1][..., 0], halves[1][..., 1])
    outputs.clear()
    with routers.replaying(forced) as differs:
        hidden, used = record(model, routers)
    is_known = forced[..., 0] >= 0
    assert torch.equal(used[is_known], forced[is_known].long())
    assert torch.equal(used[5, 0], own[5, 0])  # the first layer's input is the same, and it routes freely
    assert len(outputs) == routers.num_layers == len(modules)
    for layer, output in enumerate(outputs):
        logits, weights = (output[2], output[1]) if family == "granitemoe" else (output[0], output[1])
        torch.testing.assert_close(weights, weights_by_hand(family, logits, used[:, layer]), rtol=1e-6, atol=1e-6)
    sets = [{tuple(sorted(row)) for row in ids} for ids in (own[:, 0].tolist(), forced[:, 0].tolist())]
    assert sets[0] & sets[1]
    expected = [sorted(one) != sorted(other) for one, other in zip(own[:, 0].tolist(), forced[:, 0].tolist(), strict=True)]
    assert differs[0][is_known[:, 0]].tolist() == [each for each, known in zip(expected, is_known[:, 0], strict=True) if known]
    hidden[3].square().sum().backward()  # of forced experts alone
    for module in modules:
        assert module.weight.grad is not None and float(module.weight.grad.abs().max()) > 0
    with torch.no_grad():
        assert not torch.allclose(forward(model), hidden)


def test_the_gradient_of_a_forced_choice_is_the_slope_of_its_pass() -> None:
    model, routers = make_moe("qwen3_moe")
    model.double().set_experts_implementation("batched_mm")
    forced = torch.from_numpy(np.random.default_rng(1).permuted(np.tile(np.arange(4), (NUM_TOKENS, 4, 1)), axis=-1)[..., :2])
    weight, generator = model.model.layers[1].mlp.gate.weight, torch.Generator().manual_seed(0)
    direction, seen = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (weight.shape, (37, 64)))
    with routers.replaying(forced):
        (forward(model) * seen).sum().backward()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(sign * 1e-3 * direction)
                values.append(float((forward(model) * seen).sum()))
                weight.sub_(sign * 1e-3 * direction)
    slope = float((weight.grad * direction).sum())
    assert abs(slope) > 0.1 and slope == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-2)  # its softmax is in float32


@every_family
def test_scores_follow_the_recorded_routing_in_any_packing(family: str) -> None:
    model, routers = make_moe(family)
    random = np.random.default_rng(2)

    def rollout(index: int, routing: bool = True) -> object:
        length = 9 + 5 * index
        rows = random.permuted(np.tile(np.arange(4, dtype=np.uint8), (6 + length, routers.num_layers, 1)), axis=-1)[..., :2]
        rows[-1] = 255
        return sibling(make_prompt(str(index), 6), [length], group="g", index=index, routing=rows if routing else None)

    rollouts = [rollout(0), rollout(1, False), rollout(2), rollout(3)]
    check_recorded(routers, rollouts)
    head = Head(model)
    alone = [score(model, head, [each], budget=4096, routers=routers)[0] for each in rollouts]
    together = score(model, head, rollouts, budget=60, routers=routers)
    free = score(model, head, rollouts, budget=4096)
    for index, (one, other, freely) in enumerate(zip(alone, together, free, strict=True)):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)
        assert np.allclose(one, freely, atol=1e-3) == (index == 1)


# What cannot be replayed


def with_routing(routing: np.ndarray) -> object:
    return sibling(make_prompt("p", 3), [len(routing) - 3], group="g", index=0, routing=routing)


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (np.zeros((8, 3, 2), np.uint8), "is of 3 layers with 2 experts per token, but the model has 4 layers with 2"),
        (np.zeros((8, 4, 1), np.uint8), "is of 4 layers with 1 experts per token"),
        (np.full((8, 4, 2), 4, np.uint8), "names expert 4, but the model's are 0 to 3"),
        (np.full((8, 4, 2), -2, np.int16), "names expert -2"),
    ],
)
def test_routing_of_another_model_is_refused_by_name(routing: np.ndarray, reason: str) -> None:
    _, routers = make_moe("qwen3_moe")
    check_recorded(routers, [with_routing(np.full((8, 4, 2), 255, np.uint8)), with_routing(np.full((8, 4, 2), 3, np.int16))])
    with pytest.raises(ModelError, match=rf"rollout 'g/0': its expert_routing {reason}"):
        check_recorded(routers, [with_routing(routing)])
    with pytest.raises(ModelError, match="rollout 'g/0': its expert_routing cannot be replayed: the model has no experts"):
        check_recorded(None, [with_routing(routing)])


@every_family
def test_the_probe_accepts_the_family(family: str) -> None:
    model, routers = make_moe(family)
    routers.check_replay(model)


def by_sorting(router: MixtralTopKRouter, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = F.linear(hidden, router.weight)
    chosen = logits.argsort(dim=-1, descending=True)[:, :TOP_K]
    return logits, logits.gather(-1, chosen).softmax(dim=-1), chosen


OWN = MixtralTopKRouter.forward


def noted(router: MixtralTopKRouter, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """It chooses by `topk` and then does something else."""
    logits, weights, chosen = OWN(router, hidden)
    return logits, weights, torch.zeros_like(chosen)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (by_sorting, "MixtralTopKRouter does not choose its experts by one call of `topk`"),
        (noted, "with its own choice of experts forced"),
    ],
)
def test_a_router_that_chooses_otherwise_is_refused(forward: Callable, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, routers = make_moe("mixtral")
    monkeypatch.setattr(MixtralTopKRouter, "forward", forward)
    with pytest.raises(ModelError, match=reason):
        routers.check_replay(model)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_compiled_model_replays_in_one_graph(family: str) -> None:
    model, routers = make_moe(family)
    model.set_experts_implementation("batched_mm")
    model.set_attn_implementation("eager")

    def logits(each: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return each(TOKENS.unsqueeze(0), use_cache=False).logits[0]

    random = np.random.default_rng(3)
    order = np.tile(np.arange(4), (2, NUM_TOKENS, routers.num_layers, 1))
    forced = [torch.from_numpy(each).to(torch.int16) for each in random.permuted(order, axis=-1)[..., :2]]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    free = logits(model)
    for routing in forced:
        with routers.replaying(routing):
            expected = logits(model)
        with routers.replaying(routing) as differs:
            torch.testing.assert_close(logits(compiled), expected)
        assert differs.any() and not torch.allclose(expected, free)
    torch.testing.assert_close(logits(compiled), free)
