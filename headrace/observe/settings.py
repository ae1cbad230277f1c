"""The recipe's `[observe]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.settings import check, check_least


@dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """What a run shows and leaves behind."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides metrics.jsonl, which is always written."""
    keep_rollouts_every: int = 10
    """Versions between two whose rollouts are kept for `headrace inspect`, tabled and printed; 0: none are."""
    table_rows: int = 16
    """Rollouts of such a version in a table of each of the sinks: prompt, completion, rewards, advantage; 0: no table."""
    print_rollouts: int = 0
    """Rollouts of such a version shown on the screen."""
    trace: bool = True
    """Write trace.json."""
    max_gb: float = 2.0
    """GB of disk that the trace may take, and again the kept rollouts; their oldest parts are removed first."""

    def __post_init__(self) -> None:
        check_least(0, self, "keep_rollouts_every", "table_rows", "print_rollouts")
        check(0.001 <= self.max_gb < math.inf, "max_gb", self.max_gb, "a number ≥ 0.001")
