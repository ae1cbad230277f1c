"""The learning rate as a function of the version: a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.trainer.settings import TrainSettings


def learning_rate(settings: TrainSettings, *, version: int, steps: int) -> float:
    """Return the rate of the step from `version` to the next."""
    rise = min(1.0, (version + 1) / (settings.warmup_steps + 1))
    left = max(0.0, (steps - version) / max(1, steps - settings.warmup_steps)) if version >= settings.warmup_steps else 1.0
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}[settings.schedule]
    fall = (
        shape if settings.schedule == "constant" else settings.final_learning_rate + (1 - settings.final_learning_rate) * shape
    )
    return settings.learning_rate * rise * fall
