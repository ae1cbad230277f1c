"""Bound staleness by counting: no group is submitted before the engines hold the version it may be sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer import buffer_policy

if TYPE_CHECKING:
    from headrace.config import Recipe


class Gate:
    """Counts groups. Groups that will never be trained (rejected, failed, filtered) make room for others.

    With depth d, B groups a batch and E extra ones, a group may be submitted while version v is held only if

        submitted − dropped < (v + 1 + d) · B + E

    The extra ones (`partial.oversample`) are a constant, not a share of each batch: of those submitted (v + 1)·B are trained
    once version v + 1 is, and the unfinished rest still counts as submitted. So there are never more than (1 + d)·B + E
    submitted and untrained while the trainer's version is the engines', however long an extra one takes. Trained in the order
    they were submitted, group n comes at version ⌊n/B⌋ and was submitted at v ≥ ⌊(n − E)/B⌋ − d: the depth bounds its lag by
    d + ⌈E/B⌉, and only `reject` makes it d.
    """

    def __init__(self, *, depth: int | None, groups_per_batch: int, steps: int, extra: int = 0) -> None:
        self._depth = depth
        self._groups_per_batch = groups_per_batch
        self._steps = steps
        self._extra = extra

    @property
    def has_depth(self) -> bool:
        """Whether the depth bounds what is in flight, or only the run's length does."""
        return self._depth is not None

    def is_open(self, *, version: int, submitted: int, dropped: int) -> bool:
        """Whether one more group may be submitted while the engines hold `version`."""
        horizon = self._steps if self._depth is None else min(version + 1 + self._depth, self._steps)
        return submitted - dropped < horizon * self._groups_per_batch + self._extra


def make_gate(recipe: Recipe) -> Gate:
    """The recipe's gate; one without a depth bounds a run by its steps alone."""
    return Gate(
        depth=gate_depth(recipe),
        groups_per_batch=recipe.train.groups_per_batch,
        steps=recipe.steps,
        extra=recipe.partial.extra_groups(recipe.train.groups_per_batch),
    )


def gate_depth(recipe: Recipe) -> int | None:
    """Versions that submission may run ahead of training; None where it is not gated."""
    if buffer_policy(recipe).takes_turns:
        return 0
    return recipe.staleness.max_lag if recipe.staleness.gate else None


def max_untrained_groups(recipe: Recipe) -> int | None:
    """Groups that the gate lets be submitted and untrained at once; None where it is not gated."""
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
