"""Paces submission by counting: when one more group may be submitted. What is too old nevertheless, `reject.py` drops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from headrace.buffer import buffer_policy

if TYPE_CHECKING:
    from headrace.config import Recipe

START_DEPTH = 2.0
"""Of the gate when `staleness.max_lag = "auto"` begins: one batch in flight while one waits."""


class Gate(Protocol):
    """Asked by the feed loop before each group."""

    bounds_lag: ClassVar[bool]
    """Whether it bounds the lag of groups that are trained in the order of submission."""
    bounds_in_flight: ClassVar[bool]
    """Whether it bounds what is in flight by the batch; where it does not, the engines' slots do."""
    counts_episodes: ClassVar[bool]
    """Whether it may open when an episode has ended."""

    @property
    def depth(self) -> float | None:
        """Versions that submission may run ahead of training now; None if it does not count them."""

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        """Whether one more group may be submitted while the engines hold `version`, `unfinished` episodes are in flight, and of
        the groups `submitted` so far `dropped` will never be trained (rejected, failed, filtered), which makes room."""


@dataclass(frozen=True, kw_only=True)
class DepthGate:
    """With depth d, B groups a batch and E extra ones, a group may be submitted while the engines hold version v only if

        submitted − dropped < ⌊(v + 1 + d) · B⌋ + E

    The extra groups (`partial.oversample`) are a constant, not a share of each batch: at version v, v·B groups have been
    trained, and unfinished ones still count as submitted. So while trainer and engines hold the same version, at most
    (1 + d)·B + E groups are submitted and untrained, however long an extra one takes. In submission order, group n is trained
    at version ⌊n/B⌋ and was submitted at v ≥ ⌊(n − E)/B⌋ − ⌈d⌉: the gate bounds its lag by ⌈d⌉ + ⌈E/B⌉; only `reject` makes it
    ⌈d⌉.
    """

    bounds_lag: ClassVar[bool] = True
    bounds_in_flight: ClassVar[bool] = True
    counts_episodes: ClassVar[bool] = False

    depth: float
    groups_per_batch: int
    steps: int
    extra: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> DepthGate:
        groups, depth = recipe.train.groups_per_batch, gate_depth(recipe) or 0
        depth = min(depth, START_DEPTH) if is_automatic(recipe) else depth
        return cls(depth=depth, groups_per_batch=groups, steps=recipe.steps, extra=recipe.partial.extra_groups(groups))

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        ahead = (version + 1) * self.groups_per_batch + groups_ahead(self.depth, self.groups_per_batch)
        return submitted - dropped < min(ahead, self.steps * self.groups_per_batch) + self.extra


@dataclass(frozen=True, kw_only=True)
class SlotsGate:
    """Counts unfinished episodes instead of versions: a group of size G is submitted while

        unfinished + G ≤ slots · B · G

    so that a finished sample makes room at once, whatever its siblings do. It bounds no lag: rejection does that alone."""

    bounds_lag: ClassVar[bool] = False
    bounds_in_flight: ClassVar[bool] = True
    counts_episodes: ClassVar[bool] = True

    slots: float
    groups_per_batch: int
    group_size: int
    steps: int
    depth: None = None

    @classmethod
    def of(cls, recipe: Recipe) -> SlotsGate:
        train = recipe.train
        return cls(
            slots=recipe.staleness.slots,
            groups_per_batch=train.groups_per_batch,
            group_size=train.group_size,
            steps=recipe.steps,
        )

    @property
    def episodes(self) -> int:
        """That may be unfinished at once."""
        return math.floor(round(self.slots * self.groups_per_batch * self.group_size, 6))

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        has_slots = unfinished + self.group_size <= self.episodes
        return has_slots and submitted - dropped < self.steps * self.groups_per_batch


@dataclass(frozen=True, kw_only=True)
class NoGate:
    """Only the run's steps bound submission, and the engines' slots: a group is submitted while fewer episodes are unfinished
    than twice the slots, so that the next call is waiting when a slot frees up, or than a batch has."""

    bounds_lag: ClassVar[bool] = False
    bounds_in_flight: ClassVar[bool] = False
    counts_episodes: ClassVar[bool] = True

    groups_per_batch: int
    episodes: int
    """A group is submitted while fewer than these are unfinished."""
    steps: int
    depth: None = None

    @classmethod
    def of(cls, recipe: Recipe, num_engines: int = 0) -> NoGate:
        episodes = max(recipe.train.batch, 2 * recipe.engine.slots * (num_engines or recipe.engine.num_engines))
        return cls(groups_per_batch=recipe.train.groups_per_batch, episodes=episodes, steps=recipe.steps)

    def is_open(self, *, version: int, submitted: int, dropped: int, unfinished: int = 0) -> bool:
        return unfinished < self.episodes and submitted - dropped < self.steps * self.groups_per_batch


GATES: dict[str, type[DepthGate | SlotsGate | NoGate]] = {"depth": DepthGate, "slots": SlotsGate, "none": NoGate}


def groups_ahead(depth: float, groups_per_batch: int) -> int:
    """Groups in `depth` versions; a share of a group is none."""
    return math.floor(round(depth * groups_per_batch, 6))


def make_gate(recipe: Recipe, *, depth: float | None = None, num_engines: int = 0) -> DepthGate | SlotsGate | NoGate:
    """The recipe's gate, with the depth that a controller has chosen if one has. Where engines and trainer take turns it has
    depth 0, whatever `staleness.gate` says. `num_engines`: by default the recipe's."""
    gate = (DepthGate if buffer_policy(recipe).takes_turns else GATES[recipe.staleness.gate]).of(recipe)
    if isinstance(gate, NoGate):
        return NoGate.of(recipe, num_engines)
    return gate if depth is None or not isinstance(gate, DepthGate) else replace(gate, depth=depth)


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


def describe_gate(recipe: Recipe) -> str:
    """How far submission may run ahead, for the summary of a recipe."""
    staleness, depth, groups = recipe.staleness, gate_depth(recipe), recipe.train.groups_per_batch
    gate = make_gate(recipe)
    if isinstance(gate, SlotsGate):
        return f"gate       at most {gate.episodes} episodes unfinished (staleness.slots = {gate.slots:g} batches)"
    if isinstance(gate, NoGate):
        return f"gate       none: submits while fewer than {gate.episodes} episodes are unfinished (staleness.gate = 'none')"
    extra = recipe.partial.extra_groups(groups)
    sizes = f"({depth:g} + 1) × {groups}{f' + {extra}' if extra else ''} = {max_untrained_groups(recipe)}"
    why = f"staleness.max_lag = {staleness.max_lag}"
    if is_automatic(recipe):
        why = f"staleness.max_lag = 'auto' moves the {depth:g}, from {gate.depth:g}; at most max_lag_limit"
    elif staleness.is_auto and recipe.is_inline:
        why = "staleness.max_lag = 'auto' is 1 with orchestrate = 'inline', which must not depend on timing"
    elif staleness.is_auto:
        why = f"buffer.kind = '{recipe.buffer.kind}' takes turns"
    return f"gate       at most {sizes} tasks submitted and untrained ({why}{', partial.oversample' if extra else ''})"
