"""The recipe's `[[tasks]]` and `[sampler]`, and the error that all sources raise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headrace.settings import ConfigError, check

SAMPLERS = ("shuffle", "learnable")


class TaskError(ValueError):
    """Tasks cannot be used; the message names the source, the row and the fix."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One source of tasks; several are mixed by weight."""

    source: str
    """`builtin:NAME`, `reasoning_gym:NAME`, a JSONL, JSON, CSV or parquet file, a folder of them, or a dataset of the Hugging
    Face hub, `owner/name` or `hub:owner/name`. Rows have a `prompt` column (text or chat messages)."""
    weight: float = 1.0
    """Its share of the mix, against the other sources' weights."""
    split: str = ""
    """Of a dataset of the hub or a folder, also a slice such as `train[:1000]`; empty is `train`."""
    config: str = ""
    """Of a dataset of the hub or a folder that has several."""
    revision: str = ""
    """Of a dataset of the hub: a commit, tag or branch; empty is its newest."""
    limit: int = 0
    """Read only the first this many rows; 0 reads all. Turns generated tasks into a finite list."""
    columns: dict[str, str] = field(default_factory=dict)
    """Renames columns: `{ prompt = "question", answer = "solution" }`. The others stay."""
    map: str = ""
    """`module:function` or `file.py:function`, called with each row after `columns`; it returns the row to use, or None to drop
    it. In Python also the function itself."""
    system_prompt: str = ""
    """Put before chats that have no system message; a text prompt becomes the user's message of such a chat."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a built-in task, such as max_length, or of a reasoning-gym one: instruction, examples and its generator's own."""

    def __post_init__(self) -> None:
        check(0 < self.weight < math.inf, "weight", self.weight, "a number above 0")
        check(self.limit >= 0, "limit", self.limit, "≥ 0")
        check(all(self.columns.values()) and "" not in self.columns, "columns", self.columns, "our name = the column's name")
        twice = len(set(self.columns.values())) < len(self.columns)
        check(not twice, "columns", self.columns, "a different column for each name")
        is_name = not self.map or all(self.map.rpartition(":")[::2])
        check(is_name, "map", self.map, "module:function or file.py:function")


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Which task is next."""

    kind: str = "shuffle"
    """`shuffle`: every row once an epoch, sources mixed by weight. `learnable`: new tasks as `shuffle` has them, mixed with
    earlier ones whose siblings' rewards differed. Or a class of your own as `module:Class` or `file.py:Class`."""
    explore: float = 0.5
    """`learnable`: the share of new tasks."""
    skip_solved: int = 0
    """Skip tasks that all siblings solved (`evaluate.success_at`) this many times in a row; 0 skips none."""
    retry_failed: float = 0.0
    """Share of draws that bring back a task which no sibling solved, the one unseen for longest first."""
    remember: int = 10_000
    """Tasks whose results are remembered, the newest."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own class."""

    def __post_init__(self) -> None:
        is_own = ":" in self.kind
        known = ", ".join(f"'{name}'" for name in SAMPLERS)
        check(is_own or self.kind in SAMPLERS, "kind", self.kind, f"{known}, module:Class or file.py:Class")
        check(0 <= self.explore <= 1, "explore", self.explore, "a share from 0 to 1")
        check(0 <= self.retry_failed < 1, "retry_failed", self.retry_failed, "a share from 0 to below 1")
        check(self.skip_solved >= 0, "skip_solved", self.skip_solved, "≥ 0")
        check(self.remember >= 1, "remember", self.remember, "≥ 1")
        if is_own and (self.skip_solved or self.retry_failed):
            name = "skip_solved" if self.skip_solved else "retry_failed"
            raise ConfigError(f"{name} = {getattr(self, name)}: is for {known}; a class of your own decides for itself")
        if self.options and not is_own:
            raise ConfigError(f"options = {self.options}: only a class of your own has options, not kind = '{self.kind}'")

    @property
    def is_learnable(self) -> bool:
        return self.kind == "learnable"

    @property
    def remembers(self) -> bool:
        """Whether earlier results decide what is next."""
        return self.is_learnable or self.skip_solved > 0 or self.retry_failed > 0
