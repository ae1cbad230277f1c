"""Drops groups that are too old to be trained: when a batch is made, and with `partial.cancel` while they are in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer import Group, Versions
    from headrace.config import Recipe
    from headrace.sync import Lineage

    Rule = Callable[[Versions, int], int]

RULES: dict[str, Rule | None] = {
    # The oldest token that is trained; time in the queue counts.
    "oldest": lambda versions, at: at - versions.trained,
    # The first token sampled for the group, trained or not; time in the queue counts.
    "first": lambda versions, at: at - versions.first,
    # Versions that passed while the group was generated; time in the queue does not count.
    "in_flight": lambda versions, at: versions.newest - versions.first,
    "never": None,
}
"""How the lag of a group is counted, from the versions that sampled it and the version it is to be trained at; None: no group
is too old. It never falls while the group waits or grows, so that what is too old now is too old for every later batch."""


@dataclass(frozen=True)
class Rejection:
    """The recipe's rule and its bound."""

    lag: Rule | None = RULES["oldest"]
    max_lag: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> Rejection:
        return cls(RULES[recipe.staleness.reject], math.ceil(recipe.max_lag))

    def is_over_age(self, versions: Versions, *, at: int) -> bool:
        """Whether a group sampled by `versions` is too old to be trained at version `at`, and so at every later one. Of a group
        in flight, `at` is the first version for which no batch has been taken."""
        return self.lag is not None and self.lag(versions, at) > self.max_lag

    def older_than(self, version: int) -> int | None:
        """Only groups with tokens from before this can have grown too old for `version` in the queue; None: none can."""
        return None if self.lag is None else version - self.max_lag

    def reason(self, group: Group, *, version: int, lineage: Lineage) -> str | None:
        """Why this group cannot be trained at `version`, or None. Tokens of weights that a restart discarded never can be."""
        for sampled_by, versions in group.versions.items():
            if not lineage.contains(sampled_by, versions.newest):
                return "lineage"
        every = group.span
        return "lag" if every is not None and self.is_over_age(every, at=version) else None
