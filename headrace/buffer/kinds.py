"""The kinds of buffer, and functions that apply the recipe's choice."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer.groups import GroupBuffer
    from headrace.config import Recipe


@dataclass(frozen=True)
class BufferPolicy:
    """One kind of buffer: a line in `POLICIES`."""

    name: str
    takes_turns: bool = False
    """Generation and training take turns: nothing is submitted for the next batch until the previous one has been trained."""
    has_depth: bool = False
    """Whether `buffer.depth` says how many batches may wait."""
    least_lag: int = 0
    """The smallest staleness.max_lag, if lag is bounded, that this kind works with."""
    max_batches: int | None = 1
    """Batches that may wait before submission stops; None: as many as fit into `buffer.max_gb`."""


POLICIES: dict[str, BufferPolicy] = {
    policy.name: policy
    for policy in (
        # Generate a batch, train it, then generate the next: no token lags unless `partial.oversample` carries rollouts over.
        BufferPolicy("synchronous", takes_turns=True),
        # The usual choice: one batch may wait, so generating the next overlaps with training this one.
        BufferPolicy("one_ahead", least_lag=1),
        # Up to `buffer.depth` batches wait: evens out batches that take unequally long to generate, but tokens get older.
        BufferPolicy("bounded", has_depth=True),
        # Only `buffer.max_gb` makes engines wait: with neither gate nor rejection, it fills while they outpace the trainer.
        BufferPolicy("stream", least_lag=1, max_batches=None),
    )
}


def buffer_policy(recipe: Recipe) -> BufferPolicy:
    """The kind of buffer that `buffer.kind` names, with `auto` and `buffer.depth` resolved."""
    kind, depth, staleness = recipe.buffer.kind, recipe.buffer.depth, recipe.staleness
    if kind == "auto":
        depth = math.ceil(recipe.max_lag)
        kind = {0: "synchronous", 1: "one_ahead"}.get(depth, "bounded") if staleness.is_bounded else "stream"
    policy = POLICIES[kind]
    return dataclasses.replace(policy, max_batches=depth) if policy.has_depth else policy


def check_buffer(recipe: Recipe) -> None:
    """Refuse a `[buffer]` that conflicts with itself or with `[staleness]`."""
    settings, policy = recipe.buffer, buffer_policy(recipe)
    with_depth = [name for name, each in POLICIES.items() if each.has_depth]
    if settings.depth and settings.kind not in with_depth:
        kinds = " or ".join(f"'{name}'" for name in with_depth)
        raise ConfigError(f"buffer.depth = {settings.depth}: only buffer.kind = {kinds} has a depth, not '{settings.kind}'")
    depth, lag = policy.max_batches, math.ceil(recipe.max_lag) if recipe.staleness.is_bounded else None
    if policy.has_depth and (depth or 0) < 1:
        raise ConfigError(f"buffer.depth = {depth}: a {policy.name} buffer holds at least 1 batch")
    if lag is None:
        return
    if lag < policy.least_lag:
        problem = f"nothing can run ahead with {recipe.staleness.bounded_by}"
        raise ConfigError(f"buffer.kind = '{policy.name}': {problem}; set it to {policy.least_lag}")
    if policy.has_depth and depth is not None and depth > max(lag, 1):
        problem = f"a batch that waits so long lags more than {recipe.staleness.bounded_by}"
        raise ConfigError(f"buffer.depth = {depth}: {problem}; raise it to {depth} or lower the depth")


def is_in_submission_order(recipe: Recipe) -> bool:
    """Whether groups are trained in the order they were submitted, whichever finishes first; exact mode needs that."""
    return recipe.exact or recipe.buffer.order == "submission"


def buffer_capacity(recipe: Recipe) -> int | None:
    """Groups that may wait before submission stops; None: any number."""
    batches = buffer_policy(recipe).max_batches
    return None if batches is None else batches * recipe.train.groups_per_batch


def make_buffer(recipe: Recipe, *, oldest_in_flight: Callable[[], int | None]) -> GroupBuffer:
    """An empty buffer of the recipe's kind; `oldest_in_flight` tells the number of the oldest group in flight."""
    from headrace.buffer.groups import GroupBuffer

    capacity, groups = buffer_capacity(recipe), recipe.train.groups_per_batch
    waits_for = oldest_in_flight if is_in_submission_order(recipe) else None
    return GroupBuffer(batch=groups, capacity=capacity, max_bytes=int(recipe.buffer.max_gb * 1e9), waits_for=waits_for)


def describe_buffer(recipe: Recipe) -> str:
    """How much may wait, for the summary of a recipe."""
    policy, groups = buffer_policy(recipe), recipe.train.groups_per_batch
    most = policy.max_batches
    held = "" if most is None else f"{most} × {groups} = {most * groups} groups or "
    order = "submission" if is_in_submission_order(recipe) else "completion"
    return f"buffer     {policy.name}: {held}{recipe.buffer.max_gb:g} GB wait at most, trained in {order} order"
