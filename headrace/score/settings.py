"""The recipe's `[reward]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check, check_least


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """The reward functions, and what happens when one fails."""

    functions: tuple[str, ...] = ()
    """`module:name` or `file.py:name` of each reward function; empty uses the one that comes with the task."""
    weights: tuple[float, ...] = ()
    """One per function; empty gives each the weight 1."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By a function's name: values of its parameters."""
    overlong_buffer: float = 0.0
    """Tokens before `sampling.max_tokens`, or below 1 a share of it, in which DAPO's soft punishment of long completions grows
    from 0 to -1; 0: none."""
    overlong_penalty: float = 1.0
    """Its weight."""
    timeout: float = field(default=300.0, metadata=OPERATIONAL)
    """Seconds one call of a reward may take before it counts as failed. `inline` cannot interrupt a plain function."""
    workers: int = field(default=1, metadata=OPERATIONAL)
    """Threads that call plain rewards. With more than one, rewards must be thread-safe; `inline` has none."""
    processes: int = field(default=0, metadata=OPERATIONAL)
    """Processes that call plain rewards, for those that need much CPU or signals; 0: threads call them. `inline` has none."""
    max_concurrent: int = field(default=256, metadata=OPERATIONAL)
    """Calls of async rewards in flight at once; the others wait, and their timeout has not started."""
    attempts: int = field(default=2, metadata=ELASTIC)
    """How often a reward that raises is called before its rollouts count as failed."""
    max_failures: int = field(default=64, metadata=OPERATIONAL)
    """Failed rewards in a row after which the run stops and shows the error."""

    def __post_init__(self) -> None:
        if self.weights and self.functions and len(self.weights) != len(self.functions):
            raise ConfigError(f"weights = {list(self.weights)}: {len(self.functions)} functions need as many weights")
        check_least(1, self, "attempts", "workers", "max_concurrent")
        check(0 < self.timeout < math.inf, "timeout", self.timeout, "a number above 0")
        check(self.processes >= 0, "processes", self.processes, "≥ 0")
        check(self.overlong_buffer >= 0, "overlong_buffer", self.overlong_buffer, "≥ 0 tokens, or a share below 1")
        check(0 <= self.overlong_penalty < math.inf, "overlong_penalty", self.overlong_penalty, "≥ 0: it is subtracted")
