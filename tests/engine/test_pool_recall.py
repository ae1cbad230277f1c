"""An engine that is recalled hands everything back, and may join again; one that joins takes work off the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from test_pool import prompt, slow, until

from headrace.launch.lent_engine import LentEngine
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


async def test_a_lost_engines_tokens_that_are_kept_are_counted(bench: Pooled):
    far = await bench.join(slots=1)
    slow(far, 0.005)
    call = asyncio.ensure_future(bench.pool.generate(prompt("r"), Sampling(max_tokens=80, min_tokens=80)))

    def is_known() -> bool:
        far.worker._told_at = 0.0  # the next step's report is due
        return any(request.num_known for request in far.requests)

    await until(is_known)
    bench.pool.lose(far.remote)
    assert bench.pool.num_sampled == {far.name: (await call).num_sampled}


async def test_who_joins_is_given_no_more_calls_than_it_has_slots(bench: Pooled):
    others = [await bench.join(slots=1) for _ in range(3)]
    spare = await bench.join(slots=2)
    await until(lambda: spare.remote.credit == 4)
    asked: dict[str, int] = {}
    for far in others:
        far.data.notices["give_back"] = lambda count, name=far.name: asked.update({name: count})
    others[1].remote.requests.update(dict.fromkeys(range(2)))
    bench.pool.relieve(spare.remote)
    others[1].remote.requests.clear()
    await until(lambda: len(asked) == 2)
    assert asked == {others[1].name: 1, others[0].name: 1}, "the fullest first"


async def test_an_engine_that_cannot_wake_or_sleep_is_let_go_and_says_why(bench: Pooled):
    said: list[str] = []
    bench.pool.delivery.say = said.append

    async def fail(**_: object) -> None:
        raise MemoryError("the device is full")

    for name, lends in (("wake", False), ("sleep", True)):
        lent, far = LentEngine(bench.pool, "spare"), await bench.start(slots=2, context=96)
        await lent.take(far.remote)
        far.control.calls[name] = fail
        assert await lent.lend() is lends
        await lent.recall()
        assert far.remote.is_lost and not bench.pool.engines and "the device is full" in said.pop()
        assert not await lent.lend(), "until it is back"


async def test_an_engine_is_not_lent_before_it_sleeps(bench: Pooled):
    lent, far, may_sleep = LentEngine(bench.pool, "spare"), await bench.start(slots=2, context=96), asyncio.Event()
    sleep = far.control.calls["sleep"]

    async def slow_sleep(**arguments: object) -> None:
        await may_sleep.wait()
        await sleep(**arguments)

    far.control.calls["sleep"] = slow_sleep
    taking = asyncio.ensure_future(lent.take(far.remote))
    await asyncio.sleep(0)
    assert not await lent.lend()
    may_sleep.set()
    await taking
    assert await lent.lend() and bench.pool.engines == [far.remote]
    await lent.recall()
    assert not bench.pool.engines and far.core.is_asleep
