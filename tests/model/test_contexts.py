"""Attention over shared prefixes against one mask over all rows: slow, and obviously right."""

from __future__ import annotations

import pytest
import torch

from headrace.model.attention import AttentionSpec, Layout, attend, make_context

SHAPES = [(21, (9, 1, 30, 12)), (0, (17,)), (1, (5, 14)), (20, (11, 10)), (13, (40,)), (0, (3,))]
"""(prefix, branches) of each document."""


def lay_out(shapes: list[tuple[int, tuple[int, ...]]]) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """With [rows] positions, and [rows, rows] whether a row comes after another in some sequence, or is it."""
    lengths, continues, positions, row = [], [], [], 0
    num_rows = sum(prefix + sum(branches) for prefix, branches in shapes)
    follows = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    for prefix, branches in shapes:
        start, segment = row, len(lengths) if prefix else -1
        if prefix:
            lengths.append(prefix)
            continues.append(-1)
        row += prefix
        positions += range(prefix)
        for length in branches:
            lengths.append(length)
            continues.append(segment)
            sequence = [*range(start, start + prefix), *range(row, row + length)]
            for at, each in enumerate(sequence):
                follows[each, sequence[: at + 1]] = True
            positions += range(prefix, prefix + length)
            row += length
    return Layout(lengths, continues), torch.tensor(positions), follows


SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, sliding_window=8),
    "window of one": AttentionSpec(0.3, sliding_window=1),
    "wide window": AttentionSpec(0.3, sliding_window=25),
    "soft cap": AttentionSpec(0.3, softcap=2.0, sliding_window=14),
    "sinks": AttentionSpec(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), sliding_window=10),
}


@pytest.mark.parametrize("name", SPECS)
def test_tree_attention_is_that_of_one_large_mask(name: str) -> None:
    layout, positions, follows = lay_out(SHAPES)
    num_rows = len(positions)
    torch.manual_seed(0)
    inputs = [torch.randn(num_rows, heads, dim, requires_grad=True) for heads, dim in ((4, 6), (2, 6), (2, 5))]
    weight, spec = torch.randn(num_rows, 4, 5), SPECS[name]
    window = spec.sliding_window or num_rows
    allowed = follows & (positions.unsqueeze(1) - positions < window)
    context = make_context(layout, torch.device("cpu"), False)
    expected = attend(*(tensor.unsqueeze(0) for tensor in inputs), spec, allowed=allowed.unsqueeze(0))[0]
    results = [expected, context.attend(torch.nn.Module(), *inputs, spec)]
    gradients = [torch.autograd.grad((result * weight).sum(), inputs) for result in results]
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_no_mask_is_as_large_as_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, positions, _ = lay_out([(40 + number % 7, (10, 12, 9, 11)) for number in range(50)])
    calls = []

    def watched(query, key, value, spec, **given):
        calls.append((query.shape[0] * query.shape[1], key.shape[1]))
        return attend(query, key, value, spec, **given)

    monkeypatch.setattr("headrace.model.attention.attend", watched)
    inputs = [torch.randn(len(positions), 1, 4) for _ in range(3)]
    make_context(layout, torch.device("cpu"), False).attend(torch.nn.Module(), *inputs, AttentionSpec(0.5))
    assert len(calls) <= 4
    assert sum(rows for rows, _ in calls) < 1.2 * len(positions)
    assert max(keys for _, keys in calls) <= 46 + 12
