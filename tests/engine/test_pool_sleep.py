"""Engines of a pool that give their memory back together, and those that come or catch up meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from test_pool import Gate, Policy, prompt, until

from headrace.partial import Interrupt
from headrace.records import Sampling

if TYPE_CHECKING:
    from pooled import Far, Pooled


def held(far: Far) -> int:
    """Bytes of an engine's cache."""
    return far.core.cache.memory.tensor.untyped_storage().size()


async def test_all_give_their_memory_back_and_who_comes_meanwhile_is_awake_and_right(bench: Pooled):
    pool, policy = bench.pool, Policy(bench)
    first, second = await bench.join(), await bench.join()
    await policy.publish(1)
    whole = held(first)
    call = asyncio.ensure_future(pool.generate(prompt(), Sampling(max_tokens=60, seed=1)))
    await until(lambda: first.core.num_sampled + second.core.num_sampled > 5)
    await pool.pause(Interrupt.RETRACT)
    await pool.sleep(weights=True)
    assert held(first) == held(second) == 0 and not call.done()
    second.kill()
    await until(lambda: second.remote not in pool.engines)
    third = await bench.join()
    assert held(third) == whole and not third.core.is_asleep
    assert third.engine._is_paused and third.core.version == 1, "it stands still with the others, on what they hold"
    await pool.wake()
    assert held(first) == held(third) == whole and not first.core.is_asleep
    await policy.publish(2)
    await pool.resume()
    rollout = await call
    assert rollout.num_sampled == 60 and set(rollout.versions[rollout.is_sampled].tolist()) == {1, 2}
    again = await asyncio.gather(*(pool.generate(prompt(f"r{i}", seed=i), Sampling(max_tokens=4)) for i in range(12)))
    assert {each.calls[0].engine for each in again} == {"engine-0", "engine-2"}
    assert all((each.versions[each.is_sampled] == 2).all() for each in again)


async def test_who_was_left_behind_catches_up_before_the_pool_sleeps(bench: Pooled):
    """Without its weights it could not."""
    pool, policy = bench.pool, Policy(bench)
    pool.delivery.patience = 0.05
    fast, late = await bench.join(), await bench.join()
    gate = Gate(late, "_stage")
    await policy.publish(1)
    assert (fast.core.version, late.core.version) == (1, 0)
    sleeping = asyncio.ensure_future(pool.sleep(weights=True))
    await asyncio.sleep(0.05)
    assert not sleeping.done() and not fast.core.is_asleep
    gate.open()
    await sleeping
    assert fast.core.is_asleep and late.core.is_asleep and late.core.version == 1
    await pool.wake()
