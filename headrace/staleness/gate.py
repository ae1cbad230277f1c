"""Paces submission by counting: when one more group may be submitted. What is too old nevertheless, `reject.py` drops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from headrace.buffer import buffer_policy

if TYPE_CHECKING:
    from headrace.config import Recipe

START_DEPTH = 2.0
"""Of the gate when `staleness.max_lag = "auto"` begins: one batch in flight while one waits."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Asked by the feed loop before each group."""

    bounds_lag: ClassVar[bool] = False
    """Whether it bounds the lag of groups that are trained in the order of submission."""
    bounds_in_flight: ClassVar[bool] = True
    """Whether it bounds what is in flight by the batch; where it does not, the engines' slots do."""
    counts_episodes: ClassVar[bool] = True
    """Whether it may open when an episode has ended."""

    depth: float | None = None
    """Versions that submission may run ahead of training now; None if it does not count them."""
    groups_per_batch: int
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, *, num_engines: int) -> Gate:
        raise NotImplementedError

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        """Whether one more group may be submitted while the engines hold `version`, `unfinished` episodes are in flight, and of
        the groups `submitted` so far `dropped` will never be trained (rejected, failed, filtered), which makes room."""
        raise NotImplementedError

    def describe(self, recipe: Recipe) -> str:
        """How far submission may run ahead, for the summary of a recipe."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DepthGate(Gate):
    """With depth d, B groups a batch and E extra ones, a group may be submitted while the engines hold version v only if

        submitted − dropped < ⌊(v + 1 + d) · B⌋ + E

    The extra groups (`partial.oversample`) are a constant, not a share of each batch: at version v, v·B groups have been
    trained, and unfinished ones still count as submitted. So while trainer and engines hold the same version, at most
    (1 + d)·B + E groups are submitted and untrained, however long an extra one takes. In submission order, group n is trained
    at version ⌊n/B⌋ and was submitted at v ≥ ⌊(n − E)/B⌋ − ⌈d⌉: the gate bounds its lag by ⌈d⌉ + ⌈E/B⌉; only `reject` makes it
    ⌈d⌉.
    """

    bounds_lag = True
    counts_episodes = False

    depth: float
    extra: int = 0

    @classmethod
    def of(cls, recipe: Recipe, *, num_engines: int) -> DepthGate:
        groups, depth = recipe.train.groups_per_batch, gate_depth(recipe) or 0
        depth = min(depth, START_DEPTH) if is_automatic(recipe) else depth
        return cls(depth=depth, groups_per_batch=groups, steps=recipe.steps, extra=recipe.partial.extra_groups(groups))

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        ahead = (version + 1) * self.groups_per_batch + groups_ahead(self.depth, self.groups_per_batch)
        return submitted - dropped < min(ahead, self.steps * self.groups_per_batch) + self.extra

    def describe(self, recipe: Recipe) -> str:
        staleness, depth = recipe.staleness, gate_depth(recipe) or 0
        extra = f" + {self.extra}" if self.extra else ""
        sizes = f"({depth:g} + 1) × {self.groups_per_batch}{extra} = {max_untrained_groups(recipe)}"
        why = f"staleness.max_lag = {staleness.max_lag}"
        if is_automatic(recipe):
            why = f"staleness.max_lag = 'auto' moves the {depth:g}, from {self.depth:g}; at most max_lag_limit"
        elif staleness.is_auto and recipe.is_inline:
            why = "staleness.max_lag = 'auto' is 1 with orchestrate = 'inline', which must not depend on timing"
        elif staleness.is_auto:
            why = f"buffer.kind = '{recipe.buffer.kind}' takes turns"
        return f"gate       at most {sizes} tasks submitted and untrained ({why}{', partial.oversample' if extra else ''})"


@dataclass(frozen=True, kw_only=True)
class SlotsGate(Gate):
    """Counts unfinished episodes instead of versions: a group of size G is submitted while

        unfinished + G ≤ slots · B · G

    so that a finished sample makes room at once, whatever its siblings do. It bounds no lag: rejection does that alone."""

    episodes: int
    """That may be unfinished at once."""
    group_size: int

    @classmethod
    def of(cls, recipe: Recipe, *, num_engines: int) -> SlotsGate:
        train = recipe.train
        episodes = math.floor(round(recipe.staleness.slots * train.groups_per_batch * train.group_size, 6))
        size = train.group_size
        return cls(episodes=episodes, group_size=size, groups_per_batch=train.groups_per_batch, steps=recipe.steps)

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        has_room = unfinished + self.group_size <= self.episodes
        return has_room and submitted - dropped < self.steps * self.groups_per_batch

    def describe(self, recipe: Recipe) -> str:
        slots = recipe.staleness.slots
        return f"gate       at most {self.episodes} episodes unfinished (staleness.slots = {slots:g} batches)"


@dataclass(frozen=True, kw_only=True)
class NoGate(SlotsGate):
    """Only the run's steps bound submission, and the engines' slots: a group is submitted while fewer episodes are unfinished
    than twice the slots, so that the next call is waiting when a slot frees up, or than a batch has."""

    bounds_in_flight = False

    group_size: int = 1
    """Whatever a group's size, there need only be room for one of its episodes."""

    @classmethod
    def of(cls, recipe: Recipe, *, num_engines: int) -> NoGate:
        episodes = max(recipe.train.batch, 2 * recipe.engine.slots * num_engines)
        return cls(episodes=episodes, groups_per_batch=recipe.train.groups_per_batch, steps=recipe.steps)

    def describe(self, recipe: Recipe) -> str:
        return f"gate       none: submits while fewer than {self.episodes} episodes are unfinished (staleness.gate = 'none')"


GATES: dict[str, type[Gate]] = {"depth": DepthGate, "slots": SlotsGate, "none": NoGate}


def groups_ahead(depth: float, groups_per_batch: int) -> int:
    """Groups in `depth` versions; a share of a group is none."""
    return math.floor(round(depth * groups_per_batch, 6))


def make_gate(recipe: Recipe, *, depth: float | None = None, num_engines: int = 0) -> Gate:
    """The recipe's gate, with the depth that a controller has chosen if one has. Where engines and trainer take turns it has
    depth 0, whatever `staleness.gate` says. `num_engines`: by default the recipe's."""
    kind = DepthGate if buffer_policy(recipe).takes_turns else GATES[recipe.staleness.gate]
    gate = kind.of(recipe, num_engines=num_engines or recipe.engine.num_engines)
    return gate if depth is None or gate.depth is None else replace(gate, depth=depth)


def is_automatic(recipe: Recipe) -> bool:
    """Whether the gate's depth follows the measured rates."""
    has_depth = GATES[recipe.staleness.gate].bounds_lag and not buffer_policy(recipe).takes_turns
    return recipe.staleness.is_auto and has_depth and not recipe.is_inline


def gate_depth(recipe: Recipe) -> float | None:
    """The most versions that submission may run ahead of training; None if the gate does not count them."""
    if buffer_policy(recipe).takes_turns:
        return 0
    return recipe.max_lag if GATES[recipe.staleness.gate].bounds_lag else None


def max_untrained_groups(recipe: Recipe) -> int | None:
    """The most groups that the gate lets be submitted and untrained; None if it does not bound them."""
    depth, groups = gate_depth(recipe), recipe.train.groups_per_batch
    return None if depth is None else groups + groups_ahead(depth, groups) + recipe.partial.extra_groups(groups)
