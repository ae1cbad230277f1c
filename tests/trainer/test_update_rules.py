"""Muon against torch's own, and AdamW with 8-bit moments against AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.model.arena import Arena
from headrace.trainer import TrainSettings
from headrace.trainer.optimizer import FlatOptimizer
from headrace.trainer.update_rules import Codes, Muon, _dynamic_table, orthogonalised


class Layers(nn.Module):
    """An embedding, two matrices of one shape, a tall one, three experts, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"embed": (13, 8), "up": (8, 12), "gate": (8, 12), "down": (12, 8), "experts": (3, 6, 10), "norm": (8,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(shape, generator=generator)))

    def learn(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in self.parameters():
            parameter.backward(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def optimizer(model: nn.Module, name: str, **changes) -> FlatOptimizer:
    chosen = TrainSettings(optimizer=name, **{"weight_decay": 0.1, "max_grad_norm": 0.0, **changes})
    return FlatOptimizer([(Arena.adopt(model), dict(model.named_parameters()))], chosen, outer=["embed"])


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are one matrix each. Torch's orthogonalises in bfloat16, which some CPUs lack: here in float32, like ours."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    ours, theirs = Layers(), Layers()
    flat = optimizer(ours, "muon", beta2=0.95)
    experts = [nn.Parameter(expert.clone()) for expert in theirs.experts.detach()]
    muon = torch.optim.Muon(
        [theirs.up, theirs.gate, theirs.down, *experts], weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [{"params": [theirs.embed], "weight_decay": 0.1}, {"params": [theirs.norm], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(4):
        ours.learn(step)
        theirs.zero_grad()
        theirs.learn(step)
        for index, expert in enumerate(experts):
            expert.grad = theirs.experts.grad[index]
        flat.step(0.02)
        for each in (muon, adamw):
            for group in each.param_groups:
                group["lr"] = 0.02
            each.step()
    theirs.experts.data = torch.stack(list(experts))
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(theirs.named_parameters())[name], atol=2e-6, rtol=1e-5)


def test_muons_update_is_as_large_as_adamws() -> None:
    """So that one learning rate fits both: its root mean square is about 0.2 for any shape."""
    for shape in ((1, 64, 64), (1, 32, 128), (1, 128, 32)):
        update = orthogonalised(torch.randn(shape, generator=torch.Generator().manual_seed(0))) * 0.2 * max(shape) ** 0.5
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_shapes_that_are_equal_go_together_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "headrace.trainer.update_rules.orthogonalised", lambda x: calls.append(tuple(x.shape)) or orthogonalised(x)
    )
    found = {}
    for most in (1 << 24, 100):
        monkeypatch.setattr("headrace.trainer.update_rules.AT_ONCE", most)
        model = Layers()
        flat = optimizer(model, "muon")
        calls.clear()
        model.learn(0)
        flat.step(0.02)
        found[most] = sorted(calls), {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert found[1 << 24][0] == [(1, 12, 8), (2, 8, 12), (3, 6, 10)]
    assert found[100][0] == [*[(1, 6, 10)] * 3, (1, 8, 12), (1, 8, 12), (1, 12, 8)]
    for name, parameter in found[100][1].items():
        torch.testing.assert_close(parameter, found[1 << 24][1][name])


def test_the_table_of_codes_is_the_papers() -> None:
    signed, unsigned = _dynamic_table(is_signed=True), _dynamic_table(is_signed=False)
    assert len(signed) == len(unsigned) == 256
    assert float(signed.max()) == 1 and float(signed.min()) == pytest.approx(-0.99297, abs=1e-4)
    assert float(unsigned[0]) == 0 and float(unsigned[1]) == pytest.approx(3.25e-7)
    assert (signed.diff() > 0).all() and (unsigned.diff() > 0).all()


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_are_nearest_and_a_block_that_is_zero_stays_zero(is_signed: bool) -> None:
    table = _dynamic_table(is_signed=is_signed)
    rows = torch.randn(50, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-7, 0, 512)
    rows = (rows if is_signed else rows.abs()) * torch.logspace(-9, 3, 50).unsqueeze(1)
    rows[7] = 0
    codes, scales = Codes(table).encode(rows)
    decoded = Codes(table).decode(codes, scales)
    assert codes.dtype == torch.uint8 and not decoded[7].any()
    relative = rows / scales.clamp_min(1e-30).unsqueeze(1)
    middles = (table[:-1] + table[1:]) / 2
    assert torch.equal(codes.long(), torch.bucketize(relative, middles))
    assert float((table[codes.int()] - relative).abs().max()) < 0.008


def test_eight_bits_step_like_float32_with_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 60 steps of noisy gradients with a direction, whose sizes differ a thousandfold within a tensor."""
    monkeypatch.setattr("headrace.trainer.update_rules.CACHED", 1 << 9)  # in pieces, the last of them smaller
    generator = torch.Generator().manual_seed(3)
    directions = torch.randn(40, 50, generator=generator) * torch.logspace(-3, 0, 50)
    moved, held = {}, {}
    for name in ("adamw", "adamw_8bit"):
        model = nn.Linear(50, 40, bias=False)
        nn.init.zeros_(model.weight)
        flat = optimizer(model, name, weight_decay=0.0)
        noise = torch.Generator().manual_seed(4)
        for _ in range(60):
            model.weight.backward(directions * (1 + 2 * torch.randn(40, 50, generator=noise)))
            flat.step(0.01)
        moved[name] = model.weight.detach().clone()
        held[name] = sum(tensor.nbytes for segments in flat._arenas for s in segments for tensor in s.state.values())
    error = (moved["adamw_8bit"] - moved["adamw"]).norm() / moved["adamw"].norm()
    assert float(error) < 0.1
    assert held["adamw"] == 8 * 2000 and held["adamw_8bit"] / 2000 == pytest.approx(2.125, rel=0.03)


def test_a_number_far_below_its_blocks_largest_takes_no_huge_step() -> None:
    """Its second moment would round to 0, and the step be its first moment ÷ eps: 1,000 times the learning rate here."""
    model = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(model.weight)
    flat = optimizer(model, "adamw_8bit", weight_decay=0.0)
    gradient = torch.full((1, 64), 1e-5)
    gradient[0, 0] = 1.0
    for _ in range(3):
        model.weight.backward(gradient)
        flat.step(0.01)
    assert float(model.weight.detach().abs().max()) < 0.05


def test_what_muon_leaves_out_has_adamws_state() -> None:
    model = Layers()
    flat = optimizer(model, "muon")
    model.learn(0)
    flat.step(0.1)
    kinds = {name: type(flat.homes[name]).__name__ for name in flat.names}
    assert kinds == {**dict.fromkeys(("up", "gate", "down", "experts"), Muon.__name__), "embed": "AdamW", "norm": "AdamW"}
    assert {key.partition(".")[2] for key in flat.state() if key.startswith("up.")} == {"momentum_buffer", "step"}
