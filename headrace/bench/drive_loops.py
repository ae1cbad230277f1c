"""Runs the four loops by hand: the one place where benchmarks build a `Run` themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from headrace.run import POLICY, Roles, Run, fewer_gc_pauses, leg, run_loops

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.config import Recipe
    from headrace.observe import Observer
    from headrace.run import PolicyState, StartedBatch
    from headrace.sync import Lineage

    AnyRun = TypeVar("AnyRun", bound=Run)
T = TypeVar("T")


def make_run(
    kind: type[AnyRun],
    recipe: Recipe,
    roles: Roles,
    lineage: Lineage,
    observer: Observer,
    *,
    versions: int,
    after_version: Callable[[PolicyState], Awaitable[None]],
    on_trained: Callable[[PolicyState, StartedBatch], None] = lambda *_: None,
    first_version: int = 0,
) -> AnyRun:
    """A run of `versions` versions after `first_version`."""
    run = kind(recipe, roles, lineage=lineage, observer=observer, on_trained=on_trained, after_version=after_version)
    policy = run.policies[POLICY]
    policy.version = policy.held_version = first_version
    policy.submitted_groups = first_version * recipe.train.groups_per_batch
    run.leg_end = first_version + versions
    return run


async def drive(run: Run, *, on_end: Callable[[], Awaitable[T]]) -> T:
    """Run the loops to the run's last version; returns the result of `on_end`, called while everything still runs."""
    with fewer_gc_pauses():
        async with leg(run):
            await run_loops(run)
            found = await on_end()
            await run.policies[POLICY].published()
    return found
