"""New weights to the engines, between two decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import SyncError
from headrace.partial import Interrupt, interrupt_of
from headrace.records import Batch, Call, FinishReason, Rollout, Sampling, Source
from headrace.trainer import Superseded

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.records import Array, WeightUpdate
    from headrace.run.state import Run

_CANARY_TOKENS = 32
_ATTEMPTS = 3
"""To bring one version to the engines."""


class CanaryError(RuntimeError):
    """Engine and trainer hold the same weights and do not agree on them."""


@dataclass(frozen=True)
class Published:
    """What a trainer made ready."""

    update: WeightUpdate
    canary: Array
    """Its own logprobs of the canary, under these weights."""


async def publish(run: Run, publishing: Awaitable[Published] | None = None) -> None:
    """Have the engines hold the trainer's weights as `run.version`; `publishing` where the trainer was asked already.

    Where the trainer is another process this only begins: it overlaps the next step. The trainer makes one update after
    another, each once the one before is held, so they arrive in order. `run.published` waits for the last.
    """
    interrupt = interrupt_of(run.recipe.partial.interrupt, kv=run.recipe.partial.kv)
    if not run.trainer.is_here:
        run.publication = run.spawn(_deliver(run, publishing or run.trainer.publish(run.version), interrupt))
        return
    with run.trainer_timeline.during("wait-batch"):  # a draining engine is waited for, not worked with
        await run.engine.pause(interrupt)
    with run.trainer_timeline.during("publish"):
        try:
            await _deliver(run, run.trainer.publish(run.version), Interrupt.KEEP)
        finally:
            await run.engine.resume()


async def _deliver(run: Run, publishing: Awaitable[Published], interrupt: Interrupt) -> None:
    """A version counts as held when engines have hashed what they run and found it to be what was sent. One that refuses stays
    on its old version, and the version is sent again, whole; unless the trainer has moved on, and the next is on its way."""
    published = await publishing
    await run.wake_engines()
    for attempt in range(1, _ATTEMPTS + 1):
        update = published.update
        try:
            await run.engine.load(update, interrupt=interrupt)
            run.canary_difference = await _try_canary(run, published)
        except BaseException as error:
            await run.trainer.abort(update)
            if not isinstance(error, SyncError) or attempt == _ATTEMPTS:
                raise
            run.failed_syncs += 1
            run.observer.screen.say(f"version {update.version} did not reach every engine: {error}\n  it is sent again, whole")
        else:
            break
        try:
            published = await run.trainer.publish(update.version, whole=True)
        except Superseded:
            return
    await run.trainer.release(update)
    run.last_sync = update
    run.held_version = update.version
    run.room.set()


async def _try_canary(run: Run, published: Published) -> float:
    """Mean |Δ logprob| of engine and trainer on the canary."""
    canary = run.canary.rollouts[0]
    engine = (await run.engine.score([canary]))[0]
    difference = float(np.abs(engine - published.canary)[canary.loss_mask].mean())
    limit = run.recipe.canary_limit
    if not difference <= limit:
        raise CanaryError(
            f"version {published.update.version}: engine and trainer differ by {difference:.3g} per token on the canary, more "
            f"than {limit:g} (sync.canary_limit): what is sampled is not what is trained"
        )
    return difference


def make_canary(token_ids: Array) -> Batch:
    """A prompt as a batch whose every token but the first is scored."""
    repeats = -(-_CANARY_TOKENS // max(len(token_ids), 1))
    ids = np.tile(np.asarray(token_ids, dtype=np.int32), repeats)[:_CANARY_TOKENS]
    is_scored = np.arange(len(ids)) > 0
    call = Call(
        start=1,
        stop=len(ids),
        engine="canary",
        sampling=Sampling(max_tokens=len(ids)),
        finish_reason=FinishReason.LENGTH,
        started=0.0,
        finished=0.0,
    )
    rollout = Rollout(
        id="canary",
        episode="canary",
        group="canary",
        index=0,
        token_ids=ids,
        source=np.where(is_scored, Source.SAMPLED, Source.PROMPT).astype(np.int8),
        loss_mask=is_scored,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.where(is_scored, 0, -1).astype(np.int32),
        calls=(call,),
        finish_reason=FinishReason.LENGTH,
    )
    nothing = (np.zeros(len(ids), dtype=np.float32),)
    return Batch(rollouts=(rollout,), advantages=nothing, weights=nothing, loss="reinforce", version=0)
