"""The recipe's `[[tasks]]`, and the error that all sources raise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headrace.settings import check


class TaskError(ValueError):
    """Tasks cannot be used; the message names the source, the row and the fix."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One source of tasks; several are mixed by weight."""

    source: str
    """`builtin:NAME`, `reasoning_gym:NAME`, or a JSONL or parquet file with a `prompt` column (text or chat messages)."""
    weight: float = 1.0
    """Its share of the mix, against the other sources' weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a built-in task, such as max_length, or of a reasoning-gym one: instruction, examples and its generator's own."""

    def __post_init__(self) -> None:
        check(0 < self.weight < math.inf, "weight", self.weight, "a number above 0")
