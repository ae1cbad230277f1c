"""The four loops. Everything Headrace does while it trains is one of them.

        tasks ─► feed ─► generate ─► score ─► train ─► weights
                  ▲         ▲                   │
                  │         └── publish ◄───────┤
                  └── room ◄────────────────────┘

Each runs until it is cancelled, but for `train`, whose end is the run's. The first failure in any of them stops them all.
Nothing is passed but through `Run`: its queues, its buffer, its signals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.records import InfraAbort
from headrace.run.publishing import publish
from headrace.run.work import run_episode

if TYPE_CHECKING:
    import asyncio
    from typing import NoReturn

    from headrace.records import Episode
    from headrace.run.state import Run
    from headrace.run.work import Begun, Work


async def feed(run: Run) -> NoReturn:
    """Submits groups of tasks.

    Waits for room: the gate (a version is published, a group was dropped) and the buffer (a batch was taken). Woken by
    `run.room`, which `train` and every group that is complete or dropped raise.
    """
    while True:
        while run.may_submit():
            run.submit(run.tasks.next())
        run.room.clear()
        await run.room.wait()


async def generate(run: Run) -> NoReturn:
    """Starts an episode for each piece of work.

    Waits for work, woken by `feed` and by episodes that are to be tried again; then for a place at the engine, woken by
    an episode that ends.
    """
    while True:
        work = await run.work.get()
        await run.places.acquire()
        if run.is_wanted(work.group):
            run.begin_episode(work, _run_episode(run, work))
        else:
            run.places.release()  # cancelled while it waited


async def _run_episode(run: Run, work: Work) -> None:
    episode = await run_episode(run.environment, work.task, run.client(work))
    run.finish(episode if episode.attempts == work.attempt else episode.replace(attempts=work.attempt))


async def score(run: Run) -> NoReturn:
    """Gives every finished episode an outcome and collects groups.

    Waits for a finished episode, woken by one that ends; takes all that have. Scoring runs as a task of its own, so that
    a reward that awaits holds up neither this loop nor any other.
    """
    while True:
        episodes = await run.finished.take(run.scorer_timeline)
        run.spawn(_score(run, episodes))


async def _score(run: Run, episodes: list[Episode]) -> None:
    episodes = [episode for episode in episodes if run.is_wanted(episode.group)]
    generated = [episode for episode in episodes if episode.outcome is None]
    run.scoring += len(generated)
    with run.scorer_timeline.during("score"):
        judged = await run.scorer.score(generated) if generated else []
    run.scoring -= len(generated)
    for episode in [*(e for e in episodes if e.outcome is not None), *judged]:
        if not run.is_wanted(episode.group):
            continue  # cancelled while it was scored
        if isinstance(episode.outcome, InfraAbort) and run.try_again(episode):
            continue
        group = run.collect(episode)
        if group is not None:
            run.buffer.put(group)
    run.note_progress()


async def train(run: Run) -> None:
    """Trains one version after another until `run.leg_end`, and publishes each.

    Waits for a whole batch, woken by the buffer when `score` puts the group that completes one; then for the trainer, woken
    by its answer. Where that is another process, the next batch is sent to it while it is still at this one.
    """
    ahead: asyncio.Task[Begun | None] | None = None
    try:
        with run.settled_on_failure():
            begun = await _begin(run, run.version)
            while begun is not None:
                ahead = run.spawn(_begin(run, begun.version + 1)) if run.may_run_ahead(begun.version + 1) else None
                seen = [await step for step in begun.steps]
                run.version += 1
                run.settle_trained(begun, seen)
                run.skipped.check()
                await publish(run, begun.publishing)
                await run.go_on()
                run.room.set()
                await run.after_version()
                begun = await ahead if ahead is not None else await _begin(run, run.version)
    finally:
        if ahead is not None:
            ahead.cancel()  # at once: it must not begin what has just been put back


async def _begin(run: Run, version: int) -> Begun | None:
    """The training of `version` begun, or nothing where the leg ends before it."""
    while version < run.leg_end and not run.is_stopping:
        await run.trainer_timeline.wait("wait-batch", run.buffer.ready)
        if run.is_stopping:
            break
        run.reject_stale(version)
        if run.buffer.ready.is_set():
            await run.make_room()
            begun = await run.begin(version)
            await run.leave_unfinished(version)
            return begun
    return None
