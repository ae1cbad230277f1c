"""The recipe's `[reward]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The reward functions, and what happens when one fails."""

    functions: tuple[str, ...] = ()
    """`module:name` or `file.py:name` of each reward function; empty uses the one that comes with the task."""
    weights: tuple[float, ...] = ()
    """One per function; empty gives each the weight 1."""
    timeout: float = field(default=300.0, metadata=OPERATIONAL)
    """Seconds one call of a reward may take before it counts as failed. `inline` cannot interrupt a plain function."""
    workers: int = field(default=1, metadata=OPERATIONAL)
    """Threads that call plain rewards. With more than one, rewards must be thread-safe; `inline` has none."""
    max_concurrent: int = field(default=256, metadata=OPERATIONAL)
    """Calls of async rewards in flight at once; the others wait, and their timeout has not started."""
    attempts: int = field(default=2, metadata=ELASTIC)
    """How often a reward that raises is called before its rollouts count as failed."""
    max_failures: int = field(default=64, metadata=OPERATIONAL)
    """Failed rewards in a row after which the run stops and shows the error."""

    def __post_init__(self) -> None:
        if self.weights and self.functions and len(self.weights) != len(self.functions):
            raise ConfigError(f"weights = {list(self.weights)}: {len(self.functions)} functions need as many weights")
        check(self.attempts >= 1, "attempts", self.attempts, "≥ 1")
        check(0 < self.timeout < math.inf, "timeout", self.timeout, "a number above 0")
        check(self.workers >= 1, "workers", self.workers, "≥ 1")
        check(self.max_concurrent >= 1, "max_concurrent", self.max_concurrent, "≥ 1")
