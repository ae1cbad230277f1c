"""The kernels of packed attention, interpreted where there is no GPU, against one softmax over everything a row may see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.model.attention import AttentionSpec, Layout

tree_attention = pytest.importorskip("headrace.model.tree_attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lay_out(*documents: tuple[int, list[int]]) -> Layout:
    """From (length of the prefix, lengths of the branches)."""
    lengths, continues = [], []
    for prefix, branches in documents:
        segment = len(lengths) if prefix else -1
        lengths += [*([prefix] if prefix else []), *branches]
        continues += [*([-1] if prefix else []), *([segment] * len(branches))]
    return Layout(lengths, continues)


def visible(layout: Layout, window: int | None) -> torch.Tensor:
    """[rows, rows] bool, row by row."""
    num_rows = sum(layout.lengths)
    sees = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    segments = [rows.tolist() for rows in torch.arange(num_rows).split(layout.lengths)]
    for rows, prefix in zip(segments, layout.continues, strict=True):
        before = segments[prefix] if prefix >= 0 else []
        chain = [*before, *rows]
        for place, row in enumerate(chain[len(before) :], start=len(before)):
            first = 0 if window is None else max(0, place - window + 1)
            sees[row, chain[first : place + 1]] = True
    return sees


def naive(query, key, value, spec: AttentionSpec, sees: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query, key) * spec.scaling
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~sees, float("-inf"))
    if spec.sinks is not None:
        logits = torch.cat([logits, spec.sinks.double()[:, None, None].expand(-1, len(query), 1)], dim=-1)
    shares = torch.softmax(logits, dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", shares, value)


LAYOUTS = {
    "sequences": lay_out((0, [21]), (0, [1]), (0, [40])),
    "tree": lay_out((19, [7, 33, 1]), (0, [9]), (32, [16, 17])),
}
SPECS = {
    "plain": {},
    "window": {"sliding_window": 11},
    "softcap and window": {"softcap": 1.5, "sliding_window": 11},
    "sinks and window": {"sinks": True, "sliding_window": 18},
}


@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("tree", "sinks and window"),
        ("tree", "softcap and window"),
        ("sequences", "plain"),
        *(pytest.param("tree", spec, marks=pytest.mark.long) for spec in SPECS if " and " not in spec),
        *(pytest.param("sequences", spec, marks=pytest.mark.long) for spec in SPECS if spec != "plain"),
    ],
)
def test_result_and_gradients_are_those_of_one_softmax(layout: str, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tree_attention._Blocks(16, 16, 4, 1)
    monkeypatch.setattr(tree_attention, "_WIDEST", (small, small, small))
    monkeypatch.setattr(tree_attention, "_NARROW_HEAD", 0)
    monkeypatch.setattr(tree_attention, "TILE", 32)  # of which programs hold half
    chosen, heads, kv_heads, width, value_width = LAYOUTS[layout], 4, 2, 24, 20
    torch.manual_seed(0)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    inputs = [torch.randn(sum(chosen.lengths), *shape).to(DEVICE).requires_grad_() for shape in shapes]
    sinks = torch.randn(heads).to(DEVICE).requires_grad_() if "sinks" in SPECS[spec] else None
    asked = AttentionSpec(scaling=0.3, **{**SPECS[spec], "sinks": sinks})
    gradient = torch.randn(sum(chosen.lengths), heads, value_width).to(DEVICE)
    sees = visible(chosen, asked.sliding_window).to(DEVICE)
    leaves = [*inputs, *([] if sinks is None else [sinks])]
    context = tree_attention.KernelContext(chosen, device=torch.device(DEVICE))
    found = []
    for out in (context.attend(torch.nn.Identity(), *inputs, asked), naive(*inputs, asked, sees)):
        found.append([out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), atol=2e-5, rtol=2e-5)


def test_tables_cover_every_row_once() -> None:
    layout = lay_out((300, [5, 129, 400]), (0, [128]), (0, [1]), (1, [1, 1]))
    rows, keys, positions = tree_attention.make_tables(layout)
    for table in (rows, keys):
        covered = np.concatenate([np.arange(first, first + count) for first, count, *_ in table])
        assert covered.tolist() == list(range(sum(layout.lengths))) and table[:, 1].max() <= tree_attention.TILE
    expected = [*range(300), *range(300, 305), *range(300, 429), *range(300, 700), *range(128), 0, 0, 1, 1]
    assert positions.tolist() == expected
