"""The recipe's `[lora]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.settings import check

if TYPE_CHECKING:
    from headrace.records import Plain

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Train a low-rank adapter instead of the weights."""

    rank: int = 0
    """Of the adapter's matrices; 0 trains all weights."""
    alpha: float = 32.0
    """The adapter's output is multiplied by alpha ÷ rank."""
    targets: tuple[str, ...] = (ALL,)
    """The linear layers that get an adapter, by the last parts of their names, such as `q_proj` or `mlp.up_proj`; `all`: every
    one but the head."""
    rslora: bool = False
    """Multiply by alpha ÷ √rank instead, so that higher ranks learn as fast (rank-stabilised LoRA)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        check(self.rank >= 0, "rank", self.rank, "≥ 0")
        check(0 < self.alpha < math.inf, "alpha", self.alpha, "a number above 0")
        is_named = bool(self.targets) and all(self.targets) and (ALL not in self.targets or len(self.targets) == 1)
        check(is_named, "targets", list(self.targets), "names of layers, or 'all' alone")

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    def to_plain(self) -> dict[str, Plain] | None:
        """What a weight update says besides the tensors, whose names are the targets; None if it is off."""
        return {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora} if self.is_on else None

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
