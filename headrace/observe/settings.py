"""The recipe's `[observe]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """What a run shows and leaves behind."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides metrics.jsonl, which is always written."""
    keep_rollouts_every: int = 10
    """Versions between two whose rollouts are kept for `headrace inspect`; 0 keeps none."""
    trace: bool = True
    """Write trace.json."""
