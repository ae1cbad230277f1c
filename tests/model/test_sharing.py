"""Siblings that share their prompt's rows: the same logprobs and gradients as one after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import FAMILIES, make
from siblings import mixed

from headrace.model.head import Head
from headrace.model.load import prepare
from headrace.model.packing import pack, packed_logprobs
from headrace.model.pass_planning import Unit, members_of, num_rows, plan_passes


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.long) if each == "deepseek_v3" else each for each in FAMILIES]
)
def test_gradient_is_that_of_rollouts_apart(family: str) -> None:
    """Windows of 8 are shorter than most prompts and completions here."""
    model = prepare(make(family), name=family)
    rollouts, head = mixed(), Head(model)
    (units,) = plan_passes(rollouts, budget=4096)
    assert sorted((len(unit.members), unit.prefix) for unit in units) == [
        (1, 0), (1, 0), (1, 0), (2, 1), (2, 23), (3, 12), (5, 21)
    ]  # fmt: skip
    masks = [rollout.loss_mask for rollout in rollouts]
    order = members_of(units)
    apart, shared = pack(rollouts, masks, units=[Unit((member,)) for member in order]), pack(rollouts, masks, units=units)
    assert len(shared.token_ids) == len(apart.token_ids) - 4 * 21 - 1 - 23 - 2 * 12
    assert torch.equal(shared.wanted, apart.wanted) and torch.equal(shared.temperatures, apart.temperatures)
    weights = torch.randn(len(apart.wanted), generator=torch.Generator().manual_seed(1))
    found = []
    for packed in (apart, shared):
        model.zero_grad()
        logprobs, entropy = packed_logprobs(model, head, packed)
        (logprobs * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((gradient, logprobs.detach(), entropy))
    for one, other in zip(*found, strict=True):
        assert float(one.norm()) > 1
        assert float((one - other).norm() / one.norm()) < 1e-5


def test_every_token_has_its_row() -> None:
    rollouts = mixed()
    lengths = list(map(len, rollouts))
    for units in plan_passes(rollouts, budget=90):
        members = members_of(units)
        packed = pack(rollouts, [np.ones(length, dtype=bool) for length in lengths], units=units)
        assert sum(packed.layout.lengths) == len(packed.token_ids) == sum(num_rows(unit, lengths) for unit in units)
        tokens = [(place, at) for place, member in enumerate(members) for at in range(lengths[member])]
        places, positions = (torch.tensor(column) for column in zip(*tokens, strict=True))
        token_ids = torch.from_numpy(np.concatenate([rollouts[member].token_ids for member in members])).long()
        columns = [np.arange(lengths[member]) + 1000 * member for member in members]
        pairs = [
            (packed.index, torch.nonzero(positions).squeeze(1)),
            (packed.wanted, token_ids[packed.index]),
            (packed.sequence, places[packed.index]),
            (packed.token_ids[packed.rows], token_ids[packed.index - 1]),
            (packed.positions[packed.rows], positions[packed.index] - 1),
            (packed.gather(columns), torch.tensor(members)[packed.sequence] * 1000 + positions[packed.index]),
        ]
        assert all(torch.equal(found, wanted) for found, wanted in pairs)


def test_rows_of_a_branch_come_directly_after_its_prefix() -> None:
    rollouts = mixed()
    (units,) = plan_passes(rollouts, budget=4096)
    layout = pack(rollouts, [rollout.loss_mask for rollout in rollouts], units=units).layout
    segments = list(zip(layout.lengths, layout.continues, strict=True))
    for unit in units:
        prefix = -1
        if unit.prefix:
            prefix = len(layout.lengths) - len(segments)
            assert segments.pop(0) == (unit.prefix, -1)
        for member in unit.members:
            assert segments.pop(0) == (len(rollouts[member]) - unit.prefix, prefix)
    assert not segments
