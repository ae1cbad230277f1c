"""An engine that is recalled hands everything back, and may join again; one that joins takes work off the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from test_pool import prompt, slow, until

from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from pooled import Pooled

SAMPLING = Sampling(max_tokens=40, min_tokens=40)


async def to_the_end(bench: Pooled, name: str) -> Rollout:
    """As a run's client: what is aborted is generated again."""
    rollout = await bench.pool.generate(prompt(name), SAMPLING)
    while rollout.finish_reason is FinishReason.ABORT:
        rest = Sampling(max_tokens=46 - len(rollout), min_tokens=46 - len(rollout))
        rollout = await bench.pool.generate(rollout, rest)
    return rollout


async def test_a_recalled_engine_hands_back_what_it_has_started_and_what_it_has_not(bench: Pooled):
    first, spare = [await bench.join(slots=2) for _ in range(2)]
    await until(lambda: first.remote.credit == spare.remote.credit == 4)
    for far in (first, spare):
        slow(far, 0.05)
    calls = [asyncio.ensure_future(to_the_end(bench, f"r{i}")) for i in range(8)]
    await until(lambda: spare.core.num_running == 2 and spare.core.num_sampled > 10)
    await bench.pool.recall(spare.remote)
    assert bench.pool.engines == [first.remote] and not spare.remote.requests and not spare.worker._requests
    assert not any(call.done() for call in calls)
    for far in (first, spare):
        del far.core.step  # fast again
    await until(lambda: spare.remote.credit == 4)
    await bench.pool.join(spare.remote)
    more = [asyncio.ensure_future(to_the_end(bench, f"s{i}")) for i in range(8)]
    done = await asyncio.gather(*calls, *more)
    assert all(rollout.num_sampled == 40 and rollout.finish_reason is FinishReason.LENGTH for rollout in done)
    cut = [rollout for rollout in done if len(rollout.calls) > 1]
    assert 1 <= len(cut) <= 2 and all(rollout.calls[0].engine == spare.name for rollout in cut), "those it had started"
    assert any(rollout.calls[-1].engine == spare.name for rollout in done[8:]), "it works again"
    sampled = Counter[str]()
    for call in (call for rollout in done for call in rollout.calls):
        sampled[call.engine] += call.stop - call.start
    assert bench.pool.num_sampled == sampled, "each token is counted once, where it was sampled"


async def test_who_joins_gets_calls_that_the_others_have_not_started(bench: Pooled):
    first, spare = await bench.join(slots=2), await bench.start(slots=2, context=96)
    await until(lambda: first.remote.credit == spare.remote.credit == 4)
    slow(first, 0.02)
    calls = [asyncio.ensure_future(to_the_end(bench, f"r{i}")) for i in range(4)]
    await until(lambda: first.core.num_running == 2 and len(first.worker._requests) == 4)
    await bench.pool.join(spare.remote)
    bench.pool.relieve(spare.remote)
    done = await asyncio.gather(*calls)
    assert Counter(rollout.calls[0].engine for rollout in done) == {first.name: 2, spare.name: 2}
    assert all(len(rollout.calls) == 1 for rollout in done), "what had started stays"


async def test_an_engine_lost_while_it_is_recalled_keeps_nobody_waiting(bench: Pooled):
    first, spare = [await bench.join(slots=2) for _ in range(2)]
    await until(lambda: first.remote.credit == spare.remote.credit == 4)
    calls = [asyncio.ensure_future(to_the_end(bench, f"r{i}")) for i in range(8)]
    await until(lambda: bool(spare.remote.requests))
    spare.data.notices["recall"] = lambda _: spare.kill()
    await bench.pool.recall(spare.remote)
    assert bench.pool.engines == [first.remote]
    assert all(rollout.num_sampled == 40 for rollout in await asyncio.gather(*calls))


async def test_what_an_engine_misses_when_it_is_recalled_goes_to_another(bench: Pooled):
    """It is not sent to the one that leaves again: that would sleep with it."""
    spare = await bench.join(slots=2)
    begun = await bench.pool.generate(prompt(), SAMPLING)
    first = await bench.join(slots=2)
    await until(lambda: first.remote.credit == spare.remote.credit == 4)
    spare.worker._held.clear()
    take, recalls = spare.remote._take_missing, list[asyncio.Task[None]]()

    def recall_first(keys: list[int]) -> None:
        recalls.append(asyncio.ensure_future(bench.pool.recall(spare.remote)))
        asyncio.get_running_loop().call_soon(take, keys)

    spare.remote.data.notices["missing"] = recall_first
    call = asyncio.ensure_future(bench.pool.generate(begun.append([7]), SAMPLING))
    await until(lambda: bool(recalls))
    await recalls[0]
    assert not spare.remote.requests and spare.remote.credit == 4
    assert [each.engine for each in (await call).calls] == [spare.name, first.name]


async def test_none_is_given_back_if_none_is_asked_for(bench: Pooled):
    far = await bench.join(slots=2)
    await far.engine.pause(Interrupt.KEEP)
    calls = [asyncio.ensure_future(to_the_end(bench, f"r{i}")) for i in range(4)]
    await until(lambda: far.core.scheduler.num_waiting == 4)
    assert await far.engine.take_back(0) == []
    await far.engine.resume()
    assert all(rollout.num_sampled == 40 for rollout in await asyncio.gather(*calls))
