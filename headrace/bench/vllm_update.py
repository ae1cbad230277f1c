"""One update of an engine with rollouts on their way: how long it takes, how long nothing is drawn, and what they record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.partial import Interrupt

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.engine import Engine
    from headrace.observe import ProcessTimeline
    from headrace.records import Rollout, WeightUpdate

_LOOK_SECONDS = 0.001
_BEGIN_STEPS, _USUAL_STEPS, _LATER_STEPS = 2, 8, 4
"""Steps until all have surely begun, steps watched before the update, and steps after it."""


class Outlasted(RuntimeError):
    """The rollouts ended before the update did: nothing was seen of it."""


@dataclass(frozen=True)
class UpdateSeen:
    """One update with every slot decoding. Times are in seconds."""

    load: float
    swap: float
    """In the engine's own account."""
    still: float
    """The longest in which nothing was drawn, from before the update to some steps after it."""
    usual: float
    """The same of some steps before it."""
    in_order: float
    """Share of the rollouts whose tokens have the versions that they must have."""


async def update_in_flight(
    engine: Engine, update: WeightUpdate, rolling: asyncio.Future[list[Rollout]], *, timeline: ProcessTimeline
) -> UpdateSeen:
    """`rolling` are rollouts asked for just now, as many as there are slots; they are ended some steps after the update."""
    state = await engine.state()
    slots, old, untold = state.slots, state.version, int(getattr(engine, "most_untold", 0))
    load, between = 0.0, {}
    try:
        await _draw(engine, _BEGIN_STEPS * slots, rolling)
        usual = await _longest_wait(engine, _draw(engine, _USUAL_STEPS * slots, rolling))
        before = await _drawn(engine)
        while len(before) < slots or not all(before.values()):  # a busy machine may bring many tokens of one first
            await _draw(engine, slots, rolling)
            before = await _drawn(engine)
        timeline.report()  # what came before is not the update's

        async def load_and_go_on() -> None:
            nonlocal load, between
            started = time.perf_counter()
            await engine.load(update, interrupt=Interrupt.KEEP)
            load = time.perf_counter() - started
            between = await _drawn(engine)
            await _draw(engine, (_LATER_STEPS + untold) * slots, rolling)

        still = await _longest_wait(engine, load_and_go_on())
        swap = sum(stop - start for name, start, stop in timeline.report()["spans"] if name == "swap")
        await engine.pause(Interrupt.ABORT)
        await engine.resume()
        rollouts = await rolling
    finally:
        rolling.cancel()
    right = [
        rollout.id in between
        and are_in_order(rollout, old=old, new=update.version, before=before[rollout.id], after=between[rollout.id] + untold)
        for rollout in rollouts
    ]
    return UpdateSeen(load, swap, still, usual, sum(right) / len(right))


def are_in_order(rollout: Rollout, *, old: int, new: int, before: int, after: int) -> bool:
    """Versions only rise; the first `before` tokens were drawn before the update, and those from `after` on after it: that many
    may have been drawn by then, heard of or not."""
    versions = rollout.versions[rollout.is_sampled]
    return bool(
        len(versions) > after >= before
        and (np.diff(versions) >= 0).all()
        and (versions[:before] == old).all()
        and (versions[after:] == new).all()
        and np.isin(versions, (old, new)).all()
    )


async def _drawn(engine: Engine) -> dict[str, int]:
    """By rollout: how many tokens of it are known."""
    return {each.rollout.id: each.num_sampled for each in await engine.in_flight()}


async def _draw(engine: Engine, tokens: int, rolling: asyncio.Future[list[Rollout]]) -> None:
    """Until so many more are drawn."""
    until = (await engine.state()).tokens + tokens
    while (await engine.state()).tokens < until:
        if rolling.done():
            rolling.result()  # raises what ended them, if something did
            raise Outlasted("all rollouts ended before the update did: this machine is too slow for it, or too busy")
        await asyncio.sleep(_LOOK_SECONDS)


async def _longest_wait(engine: Engine, work: Awaitable[None]) -> float:
    """The longest time between two looks that found more tokens, while `work` goes on."""
    task = asyncio.ensure_future(work)
    tokens, since, longest = (await engine.state()).tokens, time.perf_counter(), 0.0
    while not task.done():
        await asyncio.sleep(_LOOK_SECONDS)
        found, now = (await engine.state()).tokens, time.perf_counter()
        longest = max(longest, now - since)
        if found != tokens:
            tokens, since = found, now
    task.result()
    return longest
