"""Delivers new weights to the engines, which load them between two decode steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import SyncError
from headrace.partial import Interrupt
from headrace.records import Batch, Rollout
from headrace.trainer import Superseded

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.records import Array
    from headrace.run.policy import PolicyState
    from headrace.run.state import Run
    from headrace.trainer import Published

_CANARY_TOKENS = 32
_PAUSES = (1.0, 4.0)
"""Seconds before a version is sent to the engines again; after the last time the run fails."""


class CanaryError(RuntimeError):
    """Engine and trainer compute different logprobs with the same weights."""


async def publish(run: Run, policy: PolicyState, publishing: Awaitable[Published] | None = None) -> None:
    """Deliver the trainer's weights to the engines as `policy.version`; pass `publishing` if they are already requested.
    With a trainer in another process this returns at once: delivery overlaps the next step, and `policy.published` waits for
    it. The trainer makes an update only when the engines hold the previous one, so updates arrive in order."""
    trainer, timeline = policy.trainer, run.observer.timeline("trainer")
    if not trainer.is_inline:
        publishing = publishing or trainer.publish(policy.version, canary=policy.canary)
        policy.publication = run.spawn(_deliver, run, policy, publishing, policy.recipe.partial.pausing)
        return
    with timeline.during("wait-batch"):  # while the engine drains, the trainer idles
        await run.roles.engine.pause(policy.recipe.partial.pausing)
    with timeline.during("publish"):
        try:
            interrupt = Interrupt.LEASE if policy.recipe.partial.leases else Interrupt.KEEP  # the pause has done all else
            await _deliver(run, policy, trainer.publish(policy.version, canary=policy.canary), interrupt)
        finally:
            await run.roles.engine.resume()


async def _deliver(run: Run, policy: PolicyState, publishing: Awaitable[Published], interrupt: Interrupt) -> None:
    """Have the engines load the update and verify its hashes, then check the canary. If every engine rejects an update, they
    stay on their old version; it is sent again in full, unless the trainer has moved on and the next one is coming."""
    trainer, published = policy.trainer, await publishing
    await run.wake_engines()
    for pause in (*_PAUSES, None):
        update = published.update
        try:
            await run.roles.engine.load(update, interrupt=interrupt)
            policy.sync_metrics["canary"] = await _score_canary(run, policy, published)
        except BaseException as error:
            await trainer.abort(update)
            if not isinstance(error, SyncError) or pause is None:
                raise
            policy.sync_metrics["failed_syncs"] += 1
            run.observer.screen.say(f"version {update.version} was refused by every engine: {error}\n  it is sent again, whole")
            await asyncio.sleep(pause)
        else:
            break
        try:
            published = await trainer.publish(update.version, canary=policy.canary, whole=True)
        except Superseded:
            return
    await trainer.release(update)
    policy.held_version = update.version
    if update.parts:
        policy.sync_metrics |= {"sync_bytes": update.num_bytes, "sync_full_bytes": update.manifest.total_bytes}
    run.room.set()


async def _score_canary(run: Run, policy: PolicyState, published: Published) -> float:
    """Mean |Δ logprob| per token between engine and trainer on the canary; raises above `sync.canary_limit`."""
    canary = policy.canary.rollouts[0]
    engine = (await run.roles.engine.score([canary]))[0]
    difference = float(np.abs(engine - published.canary)[canary.loss_mask].mean())
    limit = policy.recipe.sync.canary_limit_for(policy.recipe.model.dtype)
    if not difference <= limit:
        raise CanaryError(
            f"version {published.update.version}: engine and trainer differ by {difference:.3g} per token on the canary, more "
            f"than {limit:g} (sync.canary_limit): what is sampled is not what is trained"
        )
    return difference


def make_canary(token_ids: Array) -> Batch:
    """A one-rollout batch from a prompt, with every token but the first scored."""
    repeats = -(-_CANARY_TOKENS // max(len(token_ids), 1))
    ids = np.tile(np.asarray(token_ids, dtype=np.int32), repeats)[:_CANARY_TOKENS]
    rollout = Rollout.from_prompt(ids[:1], id="canary").demonstrate(ids[1:], engine="canary")
    nothing = (np.zeros(len(ids), dtype=np.float32),)
    return Batch(rollouts=(rollout,), advantages=nothing, weights=nothing, loss="reinforce", version=0)
