"""The learning rate over a run: a function of the version alone, so that a resumed run needs no state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.imports import import_name
from headrace.settings import ConfigError, check

if TYPE_CHECKING:
    from headrace.trainer.settings import TrainSettings

FALLING = ("linear", "cosine", "wsd")
SCHEDULES = ("constant", *FALLING)
_DECAYING_SHARE = 10  # of the steps, for `wsd` if `train.decay_steps` is 0: the last tenth, as in MiniCPM


def check_schedule(settings: TrainSettings) -> None:
    """Raise unless the settings of the schedule go together; a schedule of the user's is not imported yet."""
    name, is_own = settings.schedule, ":" in settings.schedule
    choices = ", ".join(repr(each) for each in SCHEDULES)
    check(is_own or name in SCHEDULES, "schedule", name, f"one of {choices}, or your own as module:name or file.py:name")
    check(0 <= settings.final_learning_rate <= 1, "final_learning_rate", settings.final_learning_rate, "in [0, 1]")
    if settings.final_learning_rate and name not in FALLING:
        given = f"final_learning_rate = {settings.final_learning_rate:g}: schedule = {name!r}"
        raise ConfigError(f"{given} does not fall to it; set schedule to one of {', '.join(FALLING)}, or leave it out")
    if settings.decay_steps and name != "wsd":
        raise ConfigError(f"decay_steps = {settings.decay_steps}: only schedule = 'wsd' has them; set it, or leave this out")


def learning_rate(settings: TrainSettings, *, version: int, steps: int, section: str = "train") -> float:
    """The rate of the step from `version` to the next; `section` is named in errors."""
    rise = min(1.0, (version + 1) / (settings.warmup_steps + 1))
    return settings.learning_rate * rise * _factor(settings, version=version, steps=steps, section=section)


def _factor(settings: TrainSettings, *, version: int, steps: int, section: str) -> float:
    name, left = settings.schedule, 1.0
    if ":" in name:
        return _own_factor(name, version=version, steps=steps, section=section)
    if name == "constant":
        return 1.0
    falling = steps - settings.warmup_steps if name != "wsd" else settings.decay_steps or math.ceil(steps / _DECAYING_SHARE)
    if version >= settings.warmup_steps:
        left = min(1.0, max(0.0, (steps - version) / max(1, falling)))
    shape = 0.5 - 0.5 * math.cos(math.pi * left) if name == "cosine" else left
    return settings.final_learning_rate + (1 - settings.final_learning_rate) * shape


def _own_factor(name: str, *, version: int, steps: int, section: str) -> float:
    given, function = f"{section}.schedule = {name!r}: it", import_name(name, setting=f"{section}.schedule")
    if not callable(function):
        raise ConfigError(f"{given} is no function; it must take (version, steps) and return a factor")
    try:
        factor = function(version, steps)
    except Exception as error:
        raise ConfigError(f"{given} raised {error!r} for version {version} of {steps}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        found = f"{given} returned {factor!r} for version {version} of {steps}"
        raise ConfigError(f"{found}; return the factor of {section}.learning_rate, a number ≥ 0")
    return float(factor)
