"""Chooses the attention of a packed pass, and holds the plain torch version that the GPU kernels are checked against.

A layout is cut into pieces: the rows of a prefix, of a branch, or of a sequence that shares nothing. Each row sees its piece up
to itself, and in a branch also the prefix. Pieces of similar shape go through one call; no mask is as large as the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.model.attention import PackedContext, attend, causal, similar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from headrace.model.attention import AttentionContext, AttentionSpec
    from headrace.model.layout import Layout


def make_context(layout: Layout, device: torch.device, exact: bool) -> AttentionContext:
    """For one pass: kernels on a GPU, else plain torch. Exact mode shares no prefixes."""
    if device.type == "cuda" and not exact:
        from headrace.model.tree_attention import KernelContext

        return KernelContext(layout, device=device)
    if layout.is_shared:
        assert not exact
        return TreeContext(layout, device=device)
    return PackedContext(layout.lengths, device=device, exact=exact)


@dataclass(frozen=True)
class _Piece:
    start: int
    length: int
    num_before: int = 0  # prefix rows that all of its rows see
    end_before: int = 0  # where those rows end

    def within(self, window: int) -> _Piece:
        return replace(self, num_before=min(self.num_before, window - 1))


@dataclass(frozen=True)
class _Gather:
    """Pieces that go through one call: `num_before` columns for their prefix, then `width` for their own rows."""

    rows: Tensor  # [count × width]: a shorter piece repeats its last row, whose results are dropped
    columns: Tensor
    """[count × (num_before + width)]: the prefix is aligned right, against the piece's own rows, so that distances between
    columns are distances between positions; columns in front of a shorter prefix are masked."""
    allowed: Tensor | None  # [count or 1, width, num_before + width]; None is causal
    count: int


class TreeContext:
    """Documents whose branches share a prefix: a tree-shaped mask, by pieces of similar shape."""

    def __init__(self, layout: Layout, *, device: torch.device | str = "cpu") -> None:
        self._pieces = _pieces(layout)
        self._num_rows = layout.num_rows
        self._device = device
        self._gathers: dict[int | None, tuple[list[_Gather], Tensor]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.sliding_window not in self._gathers:
            self._gathers[spec.sliding_window] = self._gathered(spec.sliding_window)
        gathers, inverse = self._gathers[spec.sliding_window]
        results = []
        for each in gathers:
            q = query.index_select(0, each.rows).reshape(each.count, -1, *query.shape[1:])
            k, v = (t.index_select(0, each.columns).reshape(each.count, -1, *t.shape[1:]) for t in (key, value))
            result = attend(q, k, v, spec, allowed=each.allowed)
            results.append(result.reshape(-1, *result.shape[2:]))
        return torch.cat(results).index_select(0, inverse)

    def _gathered(self, window: int | None) -> tuple[list[_Gather], Tensor]:
        """Gathers for one window, and where each row's result is. A branch gets only the prefix rows its first row sees."""
        pieces = self._pieces if window is None else [piece.within(window) for piece in self._pieces]
        gathers: list[_Gather] = []
        inverse = torch.empty(self._num_rows, dtype=torch.long)
        offset = 0
        for members, width in similar([piece.length for piece in pieces]):
            for places, num_before in similar([pieces[member].num_before for member in members]):
                chosen = [pieces[members[place]] for place in places]
                gathers.append(_gather(chosen, width=width, num_before=num_before, window=window, device=self._device))
                for place, piece in enumerate(chosen):
                    inverse[piece.start : piece.start + piece.length] = offset + place * width + torch.arange(piece.length)
                offset += len(chosen) * width
        return gathers, inverse.to(self._device)


def _pieces(layout: Layout) -> list[_Piece]:
    pieces = []
    for document in layout.documents:
        start, length = document.prefix
        if length:
            pieces.append(_Piece(start, length))
        pieces.extend(_Piece(*branch, num_before=length, end_before=start + length) for branch in document.branches)
    return pieces


def _gather(
    pieces: Sequence[_Piece], *, width: int, num_before: int, window: int | None, device: torch.device | str
) -> _Gather:
    start, length, seen, end = (
        torch.tensor([getattr(piece, name) for piece in pieces]).unsqueeze(1)
        for name in ("start", "length", "num_before", "end_before")
    )
    rows = start + torch.minimum(torch.arange(width), length - 1)
    before = torch.arange(-num_before, 0)
    is_seen = -before <= seen
    columns = torch.cat([torch.where(is_seen, end + before, start), rows], dim=1)
    allowed = None
    if num_before:
        positions = torch.arange(num_before + width)
        allowed = causal(positions[num_before:], positions, window=window).unsqueeze(0)
        if not bool(is_seen.all()):
            own = torch.ones(len(pieces), width, dtype=torch.bool)
            allowed = allowed & torch.cat([is_seen, own], dim=1).unsqueeze(1)
        allowed = allowed.to(device)
    return _Gather(rows.reshape(-1).to(device), columns.reshape(-1).to(device), allowed, count=len(pieces))
