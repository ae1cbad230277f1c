"""The recipe's `[train.parallel]`: over how many processes the trainer is spread, and how."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings import check


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The trainer's ranks, one process and one device each: `replicate` groups of `shard` ranks."""

    replicate: int = 1
    """Groups of ranks that each hold the model once and train other rollouts; gradients are added up once a step. They are on
    the launcher's host, or on hosts that join (`cluster.trainer_joins`)."""
    shard: int = 1
    """Ranks that share one copy of weights, gradients and optimizer state: each keeps an equal part of every layer, and a layer
    is gathered only while it computes."""

    def __post_init__(self) -> None:
        for name in ("replicate", "shard"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def is_on(self) -> bool:
        return self.ranks > 1
