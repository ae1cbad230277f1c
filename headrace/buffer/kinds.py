"""The kinds of buffer, and functions that apply the recipe's choice."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.buffer.groups import GroupBuffer
    from headrace.buffer.journal import Journal
    from headrace.config import Recipe

    Count = Callable[[], int | None]

JOURNAL = "journal"
"""The journal's folder in the run's."""


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
    follows_gate: bool = False
    """As many batches may wait as the gate lets submission run ahead, which the lag controller may change."""
    reserves: bool = False
    """Groups in flight count as if they waited: each has its place from when it is submitted."""
    overwrites: bool = False
    """Beyond its bound the oldest waiting group is dropped, and submission does not stop."""


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
        # Engines never wait for the trainer, which gets the newest `buffer.depth` batches: tokens are young, and many wasted.
        BufferPolicy("ring", has_depth=True, least_lag=1, overwrites=True),
        # Reserve and commit: what is in flight has its place already, so the launcher never holds more than `buffer.depth`.
        BufferPolicy("reserved", has_depth=True, reserves=True),
        # As `bounded`, by as many batches as submission may run ahead at the moment.
        BufferPolicy("resizable", least_lag=1, max_batches=None, follows_gate=True),
    )
}


def buffer_policy(recipe: Recipe) -> BufferPolicy:
    """The kind of buffer that `buffer.kind` names, with `auto` and `buffer.depth` resolved."""
    kind, depth, staleness = recipe.buffer.kind, recipe.buffer.depth, recipe.staleness
    if kind == "auto":
        depth = math.ceil(recipe.max_lag)
        kind = {0: "synchronous", 1: "one_ahead"}.get(depth, "bounded") if staleness.is_bounded else "stream"
        if staleness.is_auto and staleness.is_gated and not recipe.is_inline:
            kind = "resizable"
    policy = POLICIES[kind]
    return dataclasses.replace(policy, max_batches=depth) if policy.has_depth else policy


def check_buffer(recipe: Recipe) -> None:
    """Refuse a `[buffer]` that conflicts with itself or with other sections."""
    settings, policy = recipe.buffer, buffer_policy(recipe)
    with_depth = [name for name, each in POLICIES.items() if each.has_depth]
    if settings.depth and settings.kind not in with_depth:
        kinds = " or ".join(f"'{name}'" for name in with_depth)
        raise ConfigError(f"buffer.depth = {settings.depth}: only buffer.kind = {kinds} has a depth, not '{settings.kind}'")
    if settings.window and settings.order != "window":
        raise ConfigError(f"buffer.window = {settings.window:g}: only buffer.order = 'window' has one, not '{settings.order}'")
    if settings.is_by_episode and recipe.train.fewest_siblings > 1:
        what = (
            "normalize_each_reward = true" if recipe.train.normalize_each_reward else f"advantage = '{recipe.train.advantage}'"
        )
        raise ConfigError(
            f"buffer.unit = '{settings.unit}': train.{what} compares siblings, which then are trained apart; set unit = "
            f"'group', or an advantage that compares none, such as 'global'"
        )
    if policy.overwrites and settings.order != "completion":
        raise ConfigError(
            f"buffer.order = '{settings.order}': a {policy.name} drops the oldest, for which that order waits; set it to "
            f"'completion'"
        )
    if recipe.exact and (policy.overwrites or settings.order == "window"):
        given = f"kind = '{policy.name}'" if policy.overwrites else f"order = '{settings.order}'"
        raise ConfigError(f"buffer.{given}: which groups are trained depends on timing, which exact = true does not allow")
    if recipe.exact and settings.journal_gb:
        raise ConfigError(
            f"buffer.journal_gb = {settings.journal_gb:g}: a group taken from it is not scored again, so the resumed run "
            f"might draw other random numbers than the uninterrupted one, which exact = true promises; leave it 0"
        )
    _check_depth(recipe, policy)


def _check_depth(recipe: Recipe, policy: BufferPolicy) -> None:
    depth, lag = policy.max_batches, math.ceil(recipe.max_lag) if recipe.staleness.is_bounded else None
    if policy.has_depth and (depth or 0) < 1:
        raise ConfigError(f"buffer.depth = {depth}: a {policy.name} buffer holds at least 1 batch")
    if lag is None:
        return
    if lag < policy.least_lag:
        problem = f"nothing can run ahead with {recipe.staleness.bounded_by}"
        raise ConfigError(f"buffer.kind = '{policy.name}': {problem}; set it to {policy.least_lag}")
    most = lag + 1 if policy.reserves else max(lag, 1)
    if policy.has_depth and depth is not None and depth > most:
        problem = f"a batch that waits so long lags more than {recipe.staleness.bounded_by}"
        fix = f"raise it to {depth - 1 if policy.reserves else depth} or lower the depth"
        raise ConfigError(f"buffer.depth = {depth}: {problem}; {fix}")


def needs_gate(recipe: Recipe) -> str:
    """The setting that counts in the gate's slots, if there is one."""
    if recipe.buffer.order == "window":
        return f"buffer.order = '{recipe.buffer.order}'"
    policy = buffer_policy(recipe)
    return f"buffer.kind = '{policy.name}'" if policy.follows_gate else ""


def is_in_submission_order(recipe: Recipe) -> bool:
    """Whether groups are trained in the order they were submitted, whichever finishes first; exact mode needs that."""
    return recipe.exact or recipe.buffer.order == "submission"


def is_ordered(recipe: Recipe) -> bool:
    """Whether the order of submission, strict or in a window, says which groups have to wait for those in flight."""
    return recipe.buffer.order == "window" or is_in_submission_order(recipe)


def units_per_group(recipe: Recipe) -> int:
    """Into how many parts, each with a number of its own, a group is split when it enters the buffer."""
    return recipe.train.group_size if recipe.buffer.is_by_episode else 1


def buffer_capacity(recipe: Recipe, *, slots: Count) -> int | Count | None:
    """Groups (of `units_per_group`) that may wait before submission stops; None: any number. `slots` asks the gate how many
    groups may be submitted and untrained."""
    policy, groups, units = buffer_policy(recipe), recipe.train.groups_per_batch, units_per_group(recipe)

    def follow() -> int | None:
        now = slots()
        return None if now is None else units * max(groups, now - groups)

    if policy.follows_gate:
        return follow
    return None if policy.max_batches is None else policy.max_batches * groups * units


def make_buffer(
    recipe: Recipe,
    *,
    waits_for: Count,
    num_in_flight: Callable[[], int],
    slots: Count,
    journal: Journal | None = None,
    on_room: Callable[[], None] = lambda: None,
) -> GroupBuffer:
    """An empty buffer of the recipe's kind. `waits_for` tells the number of the oldest group in flight or, with
    `staleness.rejected = "wait"`, of the first that the next batch has to wait for; `num_in_flight` how many are; `slots` as
    for `buffer_capacity`, and the others as for `GroupBuffer`."""
    from headrace.buffer.groups import GroupBuffer

    policy, units, settings = buffer_policy(recipe), units_per_group(recipe), recipe.buffer
    is_windowed = settings.order == "window"
    return GroupBuffer(
        batch=recipe.train.groups_per_batch * units,
        capacity=buffer_capacity(recipe, slots=slots),
        max_bytes=int(settings.max_gb * 1e9),
        waits_for=waits_for if is_ordered(recipe) or recipe.staleness.waits else None,
        window=(lambda: settings.window_of(units * (slots() or 0))) if is_windowed else lambda: 1,
        num_reserved=num_in_flight if policy.reserves else int,
        overwrites=policy.overwrites,
        journal=journal,
        on_room=on_room,
    )


def open_journal(recipe: Recipe, folder: Path | None, *, say: Callable[[str], None]) -> Journal | None:
    """The journal in a run's folder, if the recipe has one."""
    from headrace.buffer.journal import Journal

    if not recipe.buffer.journal_gb or folder is None:
        return None
    return Journal(folder / JOURNAL, max_bytes=int(recipe.buffer.journal_gb * 1e9), in_thread=not recipe.is_inline, say=say)


def describe_buffer(recipe: Recipe) -> str:
    """How much may wait, for the summary of a recipe."""
    policy, groups = buffer_policy(recipe), recipe.train.groups_per_batch
    most = policy.max_batches
    held = "" if most is None else f"{most} × {groups} = {most * groups} groups or "
    held = "as many groups as the gate lets run ahead or " if policy.follows_gate else held
    what = "wait or are in flight" if policy.reserves else "wait"
    order = "submission" if is_in_submission_order(recipe) else recipe.buffer.order
    beyond = ", then the oldest is dropped" if policy.overwrites else ""
    unit = ", each episode by itself" if recipe.buffer.is_by_episode else ""
    disk = recipe.buffer.journal_gb
    size = f"{recipe.buffer.max_gb:g} GB{f' in memory and {disk:g} GB on disk' if disk else ''}"
    return f"buffer     {policy.name}: {held}{size} {what} at most{beyond}, trained in {order} order{unit}"
