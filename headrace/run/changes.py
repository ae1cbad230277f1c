"""Settings that change while a run goes on: which ones may, and how a resumed run gets them back."""

from __future__ import annotations

import fnmatch
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.algorithms import check_loss
from headrace.buffer import buffer_policy
from headrace.run.checkpoint import MANIFEST
from headrace.settings import ConfigError, apply_overrides, build, flatten, to_dict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace.config import Recipe

CHANGEABLE = (
    "steps", "train.learning_rate", "train.kl", "train.entropy", "train.constants.*", "staleness.max_lag", "staleness.cap",
    "staleness.floor", "staleness.limit", "sampling.temperature", "evaluate.every", "checkpoint.every",
    "observe.keep_rollouts_every", "observe.table_rows", "observe.print_rollouts",
)  # fmt: skip
"""Settings that the run reads anew for each version. What engines and trainer are built from is not among them."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """An event of the run, saved in its checkpoints."""

    key: str
    value: Any
    by: str
    """Who asked for it: `EarlyStop.on_step`, or `handle.change`."""
    version: int = 0
    """The newest trained when it was made: it holds for every batch not started by then."""
    was: Any = None
    at: float = field(default_factory=time.time)
    """Seconds since 1970; tells apart changes that are otherwise the same."""

    def __str__(self) -> str:
        return f"{self.key} {self.was} -> {self.value} at version {self.version}, by {self.by}"


def changed(recipe: Recipe, key: str, value: object, *, version: int) -> Recipe:
    """The recipe with another value, which must be one that can change, once `version` is trained."""
    given = f"{key} = {value!r}"
    if not any(fnmatch.fnmatchcase(key, each) for each in CHANGEABLE):
        raise ConfigError(f"{given}: it cannot change while the run goes on; these can: {', '.join(CHANGEABLE)}")
    result = build(type(recipe), apply_overrides(to_dict(recipe), {key: value}))
    check_loss(result.train.loss, result.train.constants)
    if result.steps <= version and result.steps != recipe.steps:
        raise ConfigError(f"{given}: version {version} is trained already; to end the run now, call stop()")
    if bool(result.train.kl) != bool(recipe.train.kl):
        raise ConfigError(f"{given}: kl = 0 is a run without a reference model; between 0 and another weight it cannot change")
    adapts = {"train.kl": recipe.train.kl_target, "train.entropy": recipe.train.entropy_target}
    if adapts.get(key):
        raise ConfigError(f"{given}: it adapts by itself to {key}_target = {adapts[key]:g}")
    if recipe.exact and (result.sampling != recipe.sampling or key == "staleness.max_lag"):
        raise ConfigError(f"{given}: with exact = true it cannot change, because rollouts are sampled ahead of training")
    if buffer_policy(result).takes_turns != buffer_policy(recipe).takes_turns:
        raise ConfigError(f"{given}: with 0 engines and trainer take turns; between 0 and another lag it cannot change")
    return result


def value_of(recipe: Recipe, key: str) -> Any:  # noqa: ANN401
    """A setting's value by its dotted key; None if it has none."""
    return flatten(to_dict(recipe)).get(key)


def replay(recipe: Recipe, changes: Iterable[Change]) -> Recipe:
    """The recipe with all changes that were made to it. A setting that the user has edited since keeps the user's value."""
    for change in changes:
        if value_of(recipe, change.key) == change.was:
            recipe = changed(recipe, change.key, change.value, version=change.version)
    return recipe


def changes_in(folder: Path) -> list[Change]:
    """Those in a checkpoint's manifest; none if it cannot be read, which the store reports when it looks for the newest."""
    try:
        return [Change(**each) for each in json.loads((folder / MANIFEST).read_bytes()).get("changes", [])]
    except (OSError, ValueError):
        return []
