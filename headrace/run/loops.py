"""The four loops. Everything Headrace does while it trains is one of them.

        tasks ─► feed ─► generate ─► score ─► train ─► weights
                  ▲         ▲                   │
                  │         └── publish ◄───────┤
                  └── room ◄────────────────────┘

`feed`, `generate` and `score` serve all policies and run until cancelled; `train` runs once per policy and returns when its
last version is trained. The first failure in any loop stops them all. They share only `Run`: its queues, signals and policies.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from headrace.envs import run_episode
from headrace.run.publishing import publish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import NoReturn

    from headrace.config import Recipe
    from headrace.records import Episode
    from headrace.run.batches import StartedBatch
    from headrace.run.in_flight import EpisodeInFlight
    from headrace.run.policy import PolicyState
    from headrace.run.state import Roles, Run


async def feed(run: Run) -> NoReturn:
    """Submits tasks, each as a group of episodes.

    Waits for room at a policy's gate (made by a newly held version or a dropped group) and in its buffer (made when `train`
    takes a batch). Woken by `run.room`.
    """
    while True:
        for policy in run.policies.values():
            while not run.is_over(policy, policy.version) and policy.has_room():
                if not await policy.read_ahead():  # else there may be no room any more
                    for record in policy.submit(policy.next_task()):
                        run.queued.put_nowait(record)
        run.room.clear()
        run.note_load()
        await run.room.wait()


async def generate(run: Run) -> NoReturn:
    """Starts an asyncio task per episode, whose generate calls are limited by `run.generate_calls`.

    Waits for queued episodes. Woken by `feed`, and by `score` when it retries an episode.
    """
    while True:
        record = await run.queued.get()
        if not record.group.is_cancelled:
            record.running = run.spawn(_run_episode, run, record)


async def _run_episode(run: Run, record: EpisodeInFlight) -> None:
    limits = {"timeout": run.recipe.episode.timeout, "deadline": run.recipe.deadline}
    run.finish(record, await run_episode(run.roles.environment, record.group.task.row, run.client(record), **limits))


async def score(run: Run) -> NoReturn:
    """Scores episodes; each complete group goes to its policy's buffer.

    Waits for finished episodes and takes all of them. Woken by `run.has_finished`, which every ending episode sets. Each round
    is scored in its own task, so that a slow reward does not hold up later episodes.
    """
    while True:
        await run.observer.timeline("scorer").wait("wait", run.has_finished)
        run.has_finished.clear()
        finished, run.finished = run.finished, []
        run.spawn(_score, run, finished)


async def _score(run: Run, finished: list[tuple[EpisodeInFlight, Episode]]) -> None:
    finished = [(record, episode) for record, episode in finished if not record.group.is_cancelled]
    unscored = [episode for _, episode in finished if episode.outcome is None]
    run.num_scoring += len(unscored)
    with run.observer.timeline("scorer").during("score"):
        scored = iter(await run.roles.scorer.score(unscored) if unscored else ())
    run.num_scoring -= len(unscored)
    for record, episode in finished:
        if episode.outcome is None:
            episode = next(scored)
        if record.group.is_cancelled:
            continue
        policy = run.policies[record.group.policy]
        if policy.is_retried(record, episode):
            run.queued.put_nowait(record)
        else:
            policy.collect(record, episode)
    run.note_progress()


async def train(run: Run, policy: PolicyState) -> None:
    """Trains and publishes one version after another until `run.leg_end`.

    Waits for a batch, or for one part of it after the other, then for the trainer's steps. Woken by the policy's buffer when
    `score` completes them, and by the trainer's answer. A trainer in another process gets the next batch while it still trains
    this one.
    """
    ahead: asyncio.Task[StartedBatch | None] | None = None
    try:
        run.lend(policy)
        started = await _start_batch(run, policy, policy.version, policy.recipe)
        while started is not None:
            following = started.version + 1
            may_run_ahead, recipe = run.may_run_ahead(policy, following), policy.recipe  # callbacks may change it meanwhile
            ahead = run.spawn(_start_batch, run, policy, following, recipe) if may_run_ahead else None
            await started.make_steps()
            run.settle_trained(policy, started)
            await policy.skipped.check(started)
            await publish(run, policy, started.publishing)
            await run.resume_engines(policy)
            run.lend(policy)
            run.room.set()
            await run.after_version(policy)
            started = await (ahead or _start_batch(run, policy, policy.version, policy.recipe))
        policy.return_groups()  # parts of a version that no longer becomes whole
    except BaseException as failure:
        policy.return_groups(failure)
        raise
    finally:
        if ahead is not None:
            ahead.cancel()  # now: it must not take groups just returned to the buffer


async def _start_batch(run: Run, policy: PolicyState, version: int, recipe: Recipe) -> StartedBatch | None:
    """Start training `version` as `recipe` says, or return None if the leg ends before it. Returns when all steps are sent."""
    pace = policy.pace
    while not run.is_over(policy, version):
        if pace is not None:
            pace.batch_wanted()
        if policy.unfinished is not None and not policy.buffer.ready.is_set():
            noted = run.spawn(_note_idle, run, policy, policy.unfinished)
            if policy.trainer.is_inline:
                await noted
        await run.observer.timeline("trainer").wait("wait-batch", policy.buffer.ready)
        if run.is_over(policy, version):
            break
        policy.reject_stale(version)
        if policy.buffer.ready.is_set():
            await run.pause_engines()
            started = await policy.start_batch(version, recipe, on_taken=run.on_taken)
            if started is not None:
                await policy.cancel_over_age(version)
                return started
            await run.resume_engines(policy)  # more is needed: a part, or a group in the place of a lost one
    return None


async def _note_idle(run: Run, policy: PolicyState, started: StartedBatch) -> None:
    """Waits until the trainer has trained all parts it has of a batch. A part that is ready before that is sent ahead; if none
    is, the trainer is idle, and its device may be lent."""
    num_left = len(started.left)
    await started.make_steps()
    if policy.unfinished is started and len(started.left) == num_left and not policy.buffer.ready.is_set():
        started.is_waiting = True
        if policy.pace is not None:
            policy.pace.trainer_is_idle()
        run.lend(policy)


class _LegOver(Exception):
    """Ends a leg's task group, which cancels its tasks."""


@contextlib.asynccontextmanager
async def leg(run: Run) -> AsyncIterator[None]:
    """Inside the block the engines hold every policy's newest weights and `run.spawn` works; after it all tasks have ended and
    `run` keeps what was in flight. A run is one leg, or in exact mode one per checkpoint."""
    try:
        async with asyncio.TaskGroup() as tasks:
            run.start_leg(tasks)
            for service in (*run.roles.services, run.watch):
                run.spawn(service)
            for policy in run.policies.values():
                await publish(run, policy)
                await policy.published()
            yield
            await run.save_in_flight()
            raise _LegOver
    except BaseExceptionGroup as failures:
        failure = first_failure(failures)
        if not isinstance(failure, _LegOver):
            raise failure from failure.__cause__
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by a second interrupt, which the task group keeps to itself
            raise asyncio.CancelledError from None


async def run_loops(run: Run) -> None:
    """Run the loops until every policy reaches `run.leg_end`. Generation continues until the `leg` block ends."""
    for loop in (feed, generate, score):
        run.spawn(loop, run)
    for training in [run.spawn(train, run, policy) for policy in run.policies.values()]:
        await training


@contextlib.asynccontextmanager
async def serving(roles: Roles) -> AsyncIterator[None]:
    """Inside the block the roles' services run, without the loops. The first failure, of a service or the block, is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(service()) for service in roles.services]
            yield
            for service in services:
                service.cancel()
    except BaseExceptionGroup as failures:
        failure = first_failure(failures)
        raise failure from failure.__cause__


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure; the others are its consequences."""
    inner = failures.exceptions[0]
    return first_failure(inner) if isinstance(inner, BaseExceptionGroup) else inner
