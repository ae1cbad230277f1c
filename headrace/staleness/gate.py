"""Bounds staleness by counting: no group is submitted before the engines hold a version that is new enough for it. What is
too old nevertheless when a batch is made is rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.buffer import buffer_policy

if TYPE_CHECKING:
    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.sync import Lineage


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Counts groups. Groups that will never be trained (rejected, failed, filtered) make room for others.

    With depth d, B groups a batch and E extra ones, a group may be submitted while the engines hold version v only if

        submitted − dropped < (v + 1 + d) · B + E

    The extra groups (`partial.oversample`) are a constant, not a share of each batch: at version v, v·B groups have been
    trained, and unfinished ones still count as submitted. So while trainer and engines hold the same version, at most
    (1 + d)·B + E groups are submitted and untrained, however long an extra one takes. In submission order, group n is trained
    at version ⌊n/B⌋ and was submitted at v ≥ ⌊(n − E)/B⌋ − d: the gate bounds its lag by d + ⌈E/B⌉; only `reject` makes it d.
    """

    depth: int | None
    """None: only the run's steps bound submission."""
    groups_per_batch: int
    steps: int
    extra: int = 0

    def is_open(self, *, version: int, submitted: int, dropped: int) -> bool:
        """Whether one more group may be submitted while the engines hold `version`."""
        horizon = self.steps if self.depth is None else min(version + 1 + self.depth, self.steps)
        return submitted - dropped < horizon * self.groups_per_batch + self.extra


def make_gate(recipe: Recipe) -> Gate:
    groups = recipe.train.groups_per_batch
    extra = recipe.partial.extra_groups(groups)
    return Gate(depth=gate_depth(recipe), groups_per_batch=groups, steps=recipe.steps, extra=extra)


def gate_depth(recipe: Recipe) -> int | None:
    """Versions that submission may run ahead of training; None if it is not gated."""
    if buffer_policy(recipe).takes_turns:
        return 0
    return recipe.staleness.max_lag if recipe.staleness.gate else None


def max_untrained_groups(recipe: Recipe) -> int | None:
    """The most groups that the gate lets be submitted and untrained; None if there is no gate."""
    depth, groups = gate_depth(recipe), recipe.train.groups_per_batch
    return None if depth is None else (depth + 1) * groups + recipe.partial.extra_groups(groups)


def describe_gate(recipe: Recipe) -> str:
    """How far submission may run ahead, for the summary of a recipe."""
    depth, groups = gate_depth(recipe), recipe.train.groups_per_batch
    if depth is None:
        return "gate       none: submission runs ahead as far as the buffer lets it (staleness.gate = false)"
    extra = recipe.partial.extra_groups(groups)
    sizes = f"({depth} + 1) × {groups}{f' + {extra}' if extra else ''} = {max_untrained_groups(recipe)}"
    why = f"staleness.max_lag = {recipe.staleness.max_lag}{', partial.oversample' if extra else ''}"
    return f"gate       at most {sizes} tasks submitted and untrained ({why})"


def too_old(group: Group, *, version: int, max_lag: int | None, lineage: Lineage) -> str | None:
    """Why this group cannot be trained at `version`, or None. Tokens of weights that a restart discarded never can be."""
    for sampled_by, (oldest, newest) in group.versions.items():
        if not lineage.contains(sampled_by, newest):
            return "lineage"
        if max_lag is not None and version - oldest > max_lag:
            return "lag"
    return None
