"""The attention of a packed pass, chosen by its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.model.attention import PackedContext

if TYPE_CHECKING:
    import torch

    from headrace.model.attention import AttentionContext
    from headrace.model.layout import Layout


def make_context(layout: Layout, device: torch.device, exact: bool) -> AttentionContext:
    """For one pass; nothing is shared in exact mode."""
    return PackedContext(layout.lengths, device=device, exact=exact)
