"""One update of an engine with rollouts in flight: its time, the time without a token, and the versions recorded."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from headrace.partial import Interrupt
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.engine import Engine
    from headrace.observe import ProcessTimeline
    from headrace.records import Rollout, WeightUpdate

LOAD = "update with all slots decoding: load"
SWAP = "update: of that, the exchange of weights"
STILL = "update: longest time without a token"
USUAL = "without an update: longest time without a token"
IN_ORDER = "rollouts with versions in order"
_POLL_SECONDS = 0.001
_START_STEPS, _USUAL_STEPS, _LATER_STEPS = 2, 8, 4
"""Steps until all rollouts have started, steps watched before the update, and steps after it."""


class RolloutsEndedEarly(RuntimeError):
    """A rollout reached its full length before the update was in: what was seen says nothing about updates."""

    def __init__(self) -> None:
        super().__init__("rollouts ended before the update did: this machine is too slow for it, or too busy")


async def update_in_flight(
    engine: Engine, update: WeightUpdate, rolling: asyncio.Future[list[Rollout]], *, timeline: ProcessTimeline
) -> dict[str, float]:
    """Load `update` while `rolling`, rollouts just submitted to all slots, is in flight; abort them some steps later.

    Returns seconds, and the share of rollouts whose tokens have the right versions. The exchange is what the engine reports.
    Raises `RolloutsEndedEarly` if they were too short for that.
    """
    state = await engine.state()
    slots, old, untold = state.slots, state.version, int(getattr(engine, "max_unreported", 0))
    load, between = 0.0, {}
    try:
        await _sample(engine, _START_STEPS * slots, rolling)
        usual = await _longest_wait(engine, _sample(engine, _USUAL_STEPS * slots, rolling))
        before = await _counts(engine)
        while len(before) < slots or not all(before.values()):  # on a busy machine one may be far ahead
            await _sample(engine, slots, rolling)
            before = await _counts(engine)
        swap = -timeline.report()["totals"]["swap"]

        async def load_and_continue() -> None:
            nonlocal load, between
            started = time.perf_counter()
            await engine.load(update, interrupt=Interrupt.KEEP)
            load = time.perf_counter() - started
            between = await _counts(engine)
            await _sample(engine, (_LATER_STEPS + untold) * slots, rolling)

        still = await _longest_wait(engine, load_and_continue())
        swap += timeline.report()["totals"]["swap"]
        await engine.pause(Interrupt.ABORT)
        await engine.resume()
        rollouts = await rolling
    finally:
        rolling.cancel()
    if any(ended_early(rollout, after=between.get(rollout.id, rollout.num_sampled) + untold) for rollout in rollouts):
        raise RolloutsEndedEarly
    right = [
        rollout.id in between
        and are_in_order(rollout, old=old, new=update.version, before=before[rollout.id], after=between[rollout.id] + untold)
        for rollout in rollouts
    ]
    return {LOAD: load, SWAP: swap, STILL: still, USUAL: usual, IN_ORDER: sum(right) / len(right)}


def are_in_order(rollout: Rollout, *, old: int, new: int, before: int, after: int) -> bool:
    """Whether versions never fall, the first `before` tokens have the old one and those from `after` on the new one."""
    versions = rollout.versions[rollout.is_sampled]
    return bool(
        len(versions) > after >= before
        and (np.diff(versions) >= 0).all()
        and (versions[:before] == old).all()
        and (versions[after:] == new).all()
        and np.isin(versions, (old, new)).all()
    )


def ended_early(rollout: Rollout, *, after: int) -> bool:
    """Whether it has all the tokens it was to have, and none from `after` on."""
    return rollout.finish_reason is FinishReason.LENGTH and rollout.num_sampled <= after


async def _counts(engine: Engine) -> dict[str, int]:
    """Sampled tokens that the engine has reported, by rollout."""
    return {each.rollout.id: each.num_sampled for each in await engine.in_flight()}


async def _sample(engine: Engine, tokens: int, rolling: asyncio.Future[list[Rollout]]) -> None:
    """Wait until this many more tokens are sampled."""
    until = (await engine.state()).tokens + tokens
    while (await engine.state()).tokens < until:
        if rolling.done():
            rolling.result()  # raises their error
            raise RolloutsEndedEarly
        await asyncio.sleep(_POLL_SECONDS)


async def _longest_wait(engine: Engine, work: Awaitable[None]) -> float:
    """The longest time without a new token while `work` runs."""
    task = asyncio.ensure_future(work)
    tokens, since, longest = (await engine.state()).tokens, time.perf_counter(), 0.0
    while not task.done():
        await asyncio.sleep(_POLL_SECONDS)
        found, now = (await engine.state()).tokens, time.perf_counter()
        longest = max(longest, now - since)
        if found != tokens:
            tokens, since = found, now
    task.result()
    return longest
