"""What the GPU knows of each slot, so that one decode step can follow another without asking the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SlotState:
    """One line per slot; the last line belongs to nobody and serves rows without a rollout."""

    tokens: Tensor
    """[slots + 1] int32: the last token, which the next step is fed."""
    lengths: Tensor
    """[slots + 1] int32: tokens so far, that one included."""
    limits: Tensor
    """[slots + 1] int32: the length at which it ends."""
    floors: Tensor
    """[slots + 1] int32: the length before which no stop token is drawn."""
    alive: Tensor
    """[slots + 1] int32: 1 while it goes on."""
    seeds: Tensor
    """[slots + 1] int64."""
    sampling: Tensor
    """[slots + 1, 4] float32: temperature, top-k, top-p, min-p."""
    stops: Tensor
    """[slots + 1, n] int32: stop tokens, -1 where there are fewer."""
    table: Tensor
    """[slots + 1, blocks] int32: the KV blocks of each."""

    @classmethod
    def make(cls, *, slots: int, blocks: int, stops: int, device: torch.device | str) -> SlotState:
        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((slots + 1, *shape), fill, dtype=dtype, device=device)

        return cls(
            tokens=ints(),
            lengths=ints(fill=1),
            limits=ints(),
            floors=ints(),
            alive=ints(),
            seeds=ints(dtype=torch.int64),
            sampling=torch.zeros((slots + 1, 4), device=device),  # nobody is greedy, which costs no search
            stops=ints(stops, fill=-1),
            table=ints(blocks),
        )
