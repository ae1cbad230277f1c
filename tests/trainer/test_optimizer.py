"""The optimizer over arenas: AdamW against torch's own, tensor by tensor, and what holds for every choice."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import SMALL, make
from torch import nn

from headrace.model.arena import Arena
from headrace.trainer import ParameterSettings, TrainSettings
from headrace.trainer.loss_scale import LossScale
from headrace.trainer.optimizer import FlatOptimizer

OPTIMIZERS = ["adamw", "adamw_8bit", "muon"]


class Small(nn.Module):
    """Matrices, vectors, a frozen matrix between two trained ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.frozen = nn.Parameter(torch.randn(3, 3, generator=generator), requires_grad=False)
        self.second = nn.Parameter(torch.randn(5, 11, generator=generator))
        self.norm = nn.Parameter(torch.randn(11, generator=generator))
        self.register_buffer("table", torch.ones(4))

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{"weight_decay": 0.1, "max_grad_norm": 0.7, "beta2": 0.95, **changes})


def torchs(model: Small, chosen: TrainSettings) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.trained().values() if p.ndim >= 2], "weight_decay": chosen.weight_decay},
        {"params": [p for p in model.trained().values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in Small().trained().items()}


@pytest.mark.parametrize("limit", [0.7, 1000.0, 0.0], ids=["above the limit", "below the limit", "no limit"])
@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_torch(limit: float, offload: bool) -> None:
    chosen = settings(max_grad_norm=limit, eps=1e-3)
    ours, theirs = Small(), Small()
    flat = FlatOptimizer([(Arena.adopt(ours), ours.trained())], chosen, offload=offload)
    reference = torchs(theirs, chosen)
    for step in range(4):
        for name, gradient in gradients(step).items():
            theirs.trained()[name].grad = gradient.clone()
            ours.trained()[name].backward(0.25 * gradient)
            ours.trained()[name].backward(0.75 * gradient)  # added up over two passes
        norm = torch.nn.utils.clip_grad_norm_(theirs.trained().values(), limit or float("inf"))
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        assert float(flat.step(0.01 * (step + 1))) == pytest.approx(float(norm), rel=1e-5)
        assert not flat.gradient("first").any()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(theirs.named_parameters())[name], atol=1e-6, rtol=1e-5)


def test_each_arena_has_its_own_rate_and_its_gradient_is_clipped_apart() -> None:
    """As two optimizers would, but for a gradient that is not finite: then neither moves."""
    policy, value = Small(), nn.ModuleDict({"head": nn.Linear(5, 1)})
    head = dict(value.named_parameters())
    alone = [Small(), nn.ModuleDict({"head": nn.Linear(5, 1)})]
    alone[1].load_state_dict(value.state_dict())
    both = FlatOptimizer([(Arena.adopt(policy), policy.trained()), (Arena.adopt(value), head)], settings())
    apart = [FlatOptimizer([(Arena.adopt(each), {n: p for n, p in each.named_parameters() if p.requires_grad})], settings())
             for each in alone]  # fmt: skip
    for step in range(3):
        for name, gradient in gradients(step).items():
            policy.trained()[name].backward(gradient)
            dict(alone[0].named_parameters())[name].backward(gradient)
        for parameter, other in zip(value.parameters(), alone[1].parameters(), strict=True):
            parameter.backward(torch.full_like(parameter, 1e3))  # would leave the policy nothing under a common limit
            other.backward(torch.full_like(other, 1e3))
        norms = both.step(0.01, 0.1)
        assert norms.tolist() == [float(each.step(rate)) for each, rate in zip(apart, (0.01, 0.1), strict=True)]
    for ours, theirs in ((policy, alone[0]), (value, alone[1])):
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, dict(theirs.named_parameters())[name]), name
    before = [parameter.clone() for parameter in (*policy.parameters(), *value.parameters())]
    policy.first.backward(torch.ones_like(policy.first))
    head["head.weight"].backward(torch.full_like(head["head.weight"], float("nan")))
    both.step(0.01, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, (*policy.parameters(), *value.parameters()), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing_and_does_not_count(optimizer: str) -> None:
    model = Small()
    flat = FlatOptimizer([(Arena.adopt(model), model.trained())], settings(optimizer=optimizer))
    model.first.backward(torch.ones_like(model.first))
    flat.step(0.1)
    before, state = {n: p.clone() for n, p in model.named_parameters()}, flat.state()
    for odd in (float("nan"), float("inf")):
        model.second.backward(torch.full_like(model.second, odd))
        assert not torch.isfinite(flat.step(0.1))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert all(torch.equal(value, state[name]) for name, value in flat.state().items())
        assert not flat.gradient("second").any()  # the next step begins anew


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_follow_float32_masters(dtype: torch.dtype) -> None:
    model = Small()
    exact = {name: p.detach().clone() for name, p in model.trained().items()}
    model.first.data, model.second.data = model.first.data.to(dtype), model.second.data.to(dtype)
    flat = FlatOptimizer([(Arena.adopt(model), model.trained())], settings(weight_decay=0.0))
    flat.load_weights(exact)
    for _ in range(20):  # each far below what such a weight can hold
        for name, parameter in model.trained().items():
            parameter.backward(torch.ones_like(exact[name]).to(parameter.dtype))
        flat.step(1e-5)
    for name, parameter in model.trained().items():
        moved = exact[name] - flat.master(name)
        torch.testing.assert_close(moved, torch.full_like(moved, 2e-4), atol=2e-6, rtol=0.02)
        assert torch.equal(parameter, flat.master(name).to(parameter.dtype))
        assert flat.gradient(name).dtype == torch.float32


class Unheard(torch.autograd.Function):
    """Uses a weight whose gradient autograd is told nothing of."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().sum()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> None:
        return None


def test_a_gradient_that_was_gathered_elsewhere_stays() -> None:
    """As the head's, which adds its own where the optimizer holds it."""
    model = Small()
    model.first.data = model.first.data.bfloat16()
    flat = FlatOptimizer([(Arena.adopt(model), model.trained())], settings())
    gathered = flat.gradient_of(model.first)
    assert gathered is not None and flat.gradient_of(model.frozen) is None
    gathered.fill_(2.0)
    Unheard.apply(model.first).backward()
    assert float(flat.gradient("first").min()) == 2.0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restart_goes_on_bitwise(optimizer: str) -> None:
    models, chosen = [Small(), Small()], settings(optimizer=optimizer)
    first, second = (FlatOptimizer([(Arena.adopt(model), model.trained())], chosen) for model in models)
    for step in range(3):
        for name, gradient in gradients(step).items():
            models[0].trained()[name].backward(gradient)
        first.step(0.01)
    second.load_weights({name: first.master(name).clone() for name in first.names})
    second.load_state(first.state())
    for model, flat in zip(models, (first, second), strict=True):
        for name, gradient in gradients(9).items():
            model.trained()[name].backward(gradient)
        flat.step(0.01)
    for name in first.names:
        assert torch.equal(first.master(name), second.master(name)), name


def test_neither_biases_nor_norms_are_decayed_whatever_their_shape() -> None:
    """GPT-OSS has a row of biases for each expert, Cohere a row of its norms for each head."""
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, use_qk_norm=True))
    for model in (make("gpt_oss"), cohere):
        parameters = dict(model.named_parameters())
        before = {name: parameter.detach().clone().fill_(1.0) for name, parameter in parameters.items()}
        flat = FlatOptimizer([(Arena.adopt(model), parameters)], settings())
        flat.load_weights(before)
        flat.step(0.1)
        kept = {name for name, parameter in parameters.items() if torch.equal(parameter, before[name])}
        assert kept == {name for name in parameters if "bias" in name or "norm" in name or "sinks" in name}
        assert any(parameters[name].ndim == 2 for name in kept)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_state_is_updated_alike(optimizer: str, dtype: torch.dtype) -> None:
    """In pieces here: what a segment has more of than is updated at a time."""
    models = [Small(), Small()]
    for model in models:
        model.first.data, model.second.data = model.first.data.to(dtype), model.second.data.to(dtype)
    kept, away = (
        FlatOptimizer([(Arena.adopt(model), model.trained())], settings(optimizer=optimizer), offload=is_away)
        for model, is_away in zip(models, (False, True), strict=True)
    )
    for step in range(3):
        for model, flat in zip(models, (kept, away), strict=True):
            for name, gradient in gradients(step).items():
                model.trained()[name].backward(gradient.to(model.trained()[name].dtype))
            flat.step(0.01)
    for name in kept.names:
        assert torch.equal(kept.master(name), away.master(name)), name
        assert torch.equal(models[0].trained()[name], models[1].trained()[name]), name


def test_a_scaled_loss_takes_the_same_steps() -> None:
    """The scale is a power of two: no bit of norm, clipping or update differs, unless a number is too small for float32."""
    models = [Small(), Small()]
    plain, scaled = (
        FlatOptimizer([(Arena.adopt(model), model.trained())], settings(), loss_scale=scale)
        for model, scale in zip(models, (None, LossScale()), strict=True)
    )
    for step in range(3):
        for name, gradient in gradients(step).items():
            models[0].trained()[name].backward(gradient)
            models[1].trained()[name].backward(2.0**16 * gradient)
        assert torch.equal(plain.step(0.01), scaled.step(0.01))
    for name in plain.names:
        torch.testing.assert_close(plain.master(name), scaled.master(name), rtol=1e-6, atol=1e-7)


def test_groups_of_parameters_have_their_own_rate_and_decay() -> None:
    """As one optimizer for each would; the norm that clips is that of all."""
    groups = {
        "first": ParameterSettings(match="first", learning_rate=0.5, weight_decay=0.3),
        "norm": ParameterSettings(match="norm", learning_rate=3.0, weight_decay=0.3),
    }
    ours, theirs, chosen = Small(), Small(), settings()
    flat = FlatOptimizer([(Arena.adopt(ours), ours.trained())], chosen, groups=groups)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs.first], "lr": 0.005, "weight_decay": 0.3},
            {"params": [theirs.second], "lr": 0.01, "weight_decay": 0.1},
            {"params": [theirs.norm], "lr": 0.03, "weight_decay": 0.0},  # norms are spared here too
        ],
        betas=(chosen.beta1, chosen.beta2),
    )
    for step in range(3):
        for name, gradient in gradients(step).items():
            theirs.trained()[name].grad = gradient.clone()
            ours.trained()[name].backward(gradient)
        torch.nn.utils.clip_grad_norm_(theirs.trained().values(), 0.7)
        reference.step()
        flat.step(0.01)
    for name, parameter in ours.trained().items():
        torch.testing.assert_close(parameter, theirs.trained()[name], atol=1e-6, rtol=1e-5)
