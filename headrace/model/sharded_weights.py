"""One rank's share of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from headrace.model.arena import Slot


@dataclass(frozen=True, eq=False)
class ShardedWeights:
    """What a rank publishes: ranges of the model's tensors, in the engine's dtypes. The ranges of all ranks of a trainer are
    disjoint and cover every tensor; a replica of other ranks may have none. Each range starts at a multiple of 8 bytes within
    its tensor, so that checksums add up."""

    slots: Mapping[str, Slot]
    """Every tensor of the whole model, in the order of `named_tensors`; equal on all ranks, and in all versions."""
    ranges: Sequence[tuple[str, int, int, Tensor]]
    """(tensor, first element, one past the last, these elements in one dimension); each tensor at most once."""

    def __iter__(self) -> Iterator[tuple[str, int, int, Tensor]]:
        return iter(self.ranges)
