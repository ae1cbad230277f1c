"""The recipe's `[[train.parameters]]`: parameters that are frozen, or have a learning rate or weight decay of their own."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from headrace.settings import ConfigError, check

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Of the policy's parameters whose names match. If several tables match one, the last alone applies to it."""

    match: str
    """A pattern of names as in `model.named_parameters()`, such as `*.mlp.*` or `model.layers.[0-5].*`: `*` stands for
    anything, `?` for one character, `[…]` for one of those listed. The last table that matches a parameter applies."""
    freeze: bool = False
    """Never trained: needs no memory for gradients or optimizer, and a delta does not send it."""
    learning_rate: float = 1.0
    """As a factor of the run's."""
    weight_decay: float | None = None
    """Instead of train.weight_decay; biases and norms are spared here too."""

    def __post_init__(self) -> None:
        check(bool(self.match), "match", self.match, "a pattern of names, such as '*.mlp.*'")
        rate, wanted = self.learning_rate, "a factor above 0; to train nothing, set freeze = true"
        check(0 < rate < math.inf, "learning_rate", rate, wanted)
        decay = self.weight_decay
        check(decay is None or 0 <= decay < math.inf, "weight_decay", decay, "a number ≥ 0")
        if self.freeze and (rate != 1 or decay is not None):
            raise ConfigError("freeze = true: what is frozen has neither learning_rate nor weight_decay; leave them out")


def match_parameters(groups: Sequence[ParameterSettings], names: Collection[str]) -> dict[str, ParameterSettings]:
    """The table that applies to each of these parameters; others are not listed. Raises if a pattern matches none, or if all
    are frozen."""
    found: dict[str, ParameterSettings] = {}
    for index, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.match)]
        if not matched:
            near = difflib.get_close_matches(group.match, names, n=3, cutoff=0.0)
            given = f"train.parameters.{index}.match = {group.match!r}: the model has no such parameter"
            raise ConfigError(f"{given}; * stands for anything, and the nearest names are {', '.join(near)}")
        found |= dict.fromkeys(matched, group)
    if found and all(name in found and found[name].freeze for name in names):
        raise ConfigError("train.parameters: they freeze the whole model, so there is nothing to train; let a later one match")
    return found
