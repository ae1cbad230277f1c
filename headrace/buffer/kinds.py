"""The table of buffer kinds, and functions that apply the recipe's choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.bounded import Bounded
from headrace.buffer.one_ahead import OneAhead
from headrace.buffer.stream import Stream
from headrace.buffer.synchronous import Synchronous
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.buffer.groups import GroupBuffer
    from headrace.buffer.policy import BufferPolicy
    from headrace.config import Recipe
    from headrace.staleness import StalenessSettings

POLICIES: dict[str, type[BufferPolicy]] = {kind.name: kind for kind in (Synchronous, OneAhead, Bounded, Stream)}


def buffer_policy(recipe: Recipe) -> BufferPolicy:
    """The kind of buffer that `buffer.kind` names, with `auto` resolved."""
    settings = recipe.buffer
    if settings.kind == "auto":
        return _automatic(recipe.staleness)(depth=recipe.staleness.max_lag)
    return POLICIES[settings.kind](depth=settings.depth)


def _automatic(staleness: StalenessSettings) -> type[BufferPolicy]:
    if not staleness.is_bounded:
        return Stream
    return {0: Synchronous, 1: OneAhead}.get(staleness.max_lag, Bounded)


def check_buffer(recipe: Recipe) -> None:
    """Refuse a `[buffer]` that conflicts with `[staleness]`."""
    settings, with_depth = recipe.buffer, [name for name, policy in POLICIES.items() if policy.has_depth]
    if settings.depth and settings.kind not in with_depth:
        kinds = " or ".join(f"'{name}'" for name in with_depth)
        raise ConfigError(f"buffer.depth = {settings.depth}: only buffer.kind = {kinds} has a depth, not '{settings.kind}'")
    buffer_policy(recipe).check(recipe.staleness)


def is_in_submission_order(recipe: Recipe) -> bool:
    """Whether groups are trained in the order they were submitted, whichever finishes first; exact mode needs that."""
    return recipe.exact or recipe.buffer.order == "submission"


def make_buffer(recipe: Recipe) -> GroupBuffer:
    """An empty buffer of the recipe's kind."""
    from headrace.buffer.groups import GroupBuffer

    batches, groups = buffer_policy(recipe).max_batches, recipe.train.groups_per_batch
    capacity = None if batches is None else batches * groups
    return GroupBuffer(batch=groups, capacity=capacity, in_order=is_in_submission_order(recipe))


def describe_buffer(recipe: Recipe) -> str:
    """How much may wait, for the summary of a recipe."""
    policy, groups = buffer_policy(recipe), recipe.train.groups_per_batch
    most = policy.max_batches
    held = "no bound" if most is None else f"{most} × {groups} = {most * groups} groups wait at most"
    order = "submission" if is_in_submission_order(recipe) else "completion"
    return f"buffer     {policy.name}: {held}, trained in {order} order"
