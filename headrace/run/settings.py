"""The recipe's `[warmup]`, `[evaluate]` and `[checkpoint]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.settings import ELASTIC, OPERATIONAL, check
from headrace.tasks import TaskSettings  # noqa: TC001  (`settings.build` reads the hints while it runs)


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Supervised steps before RL on tasks that have an `answer` column; the result is cached."""

    steps: int = 0
    """At most this many; 0 leaves the model as it is."""
    batch: int = 64
    """Examples a step."""
    learning_rate: float = 1e-3
    """Of AdamW, constant after a short rise."""
    until_success: float = 1.0
    """Stop once this share of the run's tasks is solved at temperature 1. Judged on training tasks, never held-out ones."""
    check_every: int = 20
    """Steps between two such checks."""
    tasks: tuple[TaskSettings, ...] = ()
    """What the demonstrations are of; empty takes the run's own tasks."""

    def __post_init__(self) -> None:
        check(self.steps >= 0, "steps", self.steps, "≥ 0")
        check(self.batch >= 1, "batch", self.batch, "≥ 1")
        check(self.check_every >= 1, "check_every", self.check_every, "≥ 1")
        check(0 < self.until_success <= 1, "until_success", self.until_success, "a share above 0, at most 1")
        check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out evaluation, counted apart from training."""

    every: int = field(default=0, metadata=ELASTIC)
    """Versions between evaluations; the first and last are always made if there are tasks. 0: only those two."""
    tasks: tuple[TaskSettings, ...] = ()
    """Held-out sources; built-in and reasoning-gym tasks keep held-out rows of their own."""
    limit: int = 256
    """Tasks per evaluation, the same ones each time: of each source's rows, shuffled by the seed, an equal share."""
    success_at: float = 1.0
    """A rollout whose reward reaches this is a success."""

    def __post_init__(self) -> None:
        check(self.every >= 0, "every", self.every, "≥ 0")
        check(self.limit >= 0, "limit", self.limit, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Hugging Face folders from which the same command resumes."""

    every: int = field(default=50, metadata=ELASTIC)
    """Versions between checkpoints; the last version is always saved."""
    keep: int = field(default=2, metadata=OPERATIONAL)
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "≥ 1")
        check(self.keep >= 1, "keep", self.keep, "≥ 1")
