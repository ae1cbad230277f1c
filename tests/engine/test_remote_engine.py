"""What the launcher keeps of an engine's calls: the tokens reported, compactly and apart from the messages they came in."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.engine import EnginePool, RemoteEngine, SampledSince, pack_sampled
from headrace.engine.request import CallEnd
from headrace.records import FinishReason, Rollout, Sampling, SamplingMask, WireError, decode, encode

NAMES = ("token_ids", "logprobs", "versions")


class Asked:
    """A pool with one engine, and calls that it was sent."""

    def __init__(self, pool: EnginePool, calls: int) -> None:
        self.pool = pool
        self.engine = RemoteEngine("engine-0", pool, control=None, on_report=lambda *_: None)
        self.engine.data = SimpleNamespace(stream=SimpleNamespace(backlog=0), notify=lambda *_: None)
        self.tasks = [asyncio.ensure_future(self.call(f"r{number}")) for number in range(calls)]

    async def call(self, id: str) -> Rollout:
        return await self.pool.generate(Rollout.from_prompt([1, 2], id=id), Sampling(max_tokens=100_000, top_k=5))

    def tell(self, name: str, value: object) -> object:
        value = decode(encode(value))
        self.engine.notices()[name](value)
        return value

    def report(self, tokens: int, *, version: int = 0, masks: dict | None = None):
        news, rest = [], (np.full(tokens, -0.5), np.full(tokens, version))
        for place, request in enumerate(self.engine.requests.values()):
            ids = np.arange(place * tokens, (place + 1) * tokens)
            news.append(SampledSince(request, ids, *rest, (masks or {}).get(str(place), ()), "life"))
        return self.tell("sampled", pack_sampled(news, policy="policy"))


@contextlib.asynccontextmanager
async def asking(*, calls: int):
    """A pool with so many calls at one engine."""
    asked = Asked(EnginePool(), calls)
    await asked.pool.join(asked.engine)
    asked.tell("pull", calls)
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(asked.engine.requests) == calls
    yield asked
    for task in asked.tasks:
        task.cancel()
    await asyncio.gather(*asked.tasks, return_exceptions=True)


async def test_a_token_in_flight_takes_at_most_16_bytes_however_often_it_is_reported() -> None:
    async with asking(calls=20) as asked:
        asked.report(1)
        tracemalloc.start()
        for second in range(400):
            asked.report(5, version=second // 100)
            found = await asked.pool.in_flight()
        total = sum(call.num_sampled for call in found)
        del found
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total == 20 * 2001 and held <= 16 * total
        partial = (await asked.pool.in_flight())[3].partial()
        assert partial.token_ids[2:4].tolist() == [3, 15] and partial.token_ids[-5:].tolist() == [15, 16, 17, 18, 19]
        assert np.bincount(partial.versions[2:]).tolist() == [501, 500, 500, 500] and partial.logprobs[-1] == -0.5
        assert (partial.finish_reason, partial.lineage, partial.calls[0].stop) == (FinishReason.ABORT, "life", 2003)


async def test_no_report_is_kept() -> None:
    async with asking(calls=2) as asked:
        mask = SamplingMask.from_rows([np.array([4, 5]), np.array([], int), np.array([6])])
        messages = [asked.report(3, masks={"0": mask}), asked.report(3), asked.report(3, masks={"0": mask, "1": mask})]
        for request in asked.engine.requests.values():
            for message in messages:
                kept = [request.known, request.mask.ids, request.mask.offsets]
                given = [message["tokens"]] + [each for m in message["masks"].values() for each in (m.offsets, m.ids)]
                assert not any(np.shares_memory(mine, theirs) for mine in kept for theirs in given)
        first, second = [call.partial().sampling_mask for call in await asked.pool.in_flight()]
        rows = [[4, 5], [], [6]]
        assert [first.row(2 + place).tolist() for place in range(9)] == [*rows, [], [], [], *rows]
        assert [second.row(2 + place).tolist() for place in range(9)] == [*[[]] * 6, *rows]
        assert first.row(0).tolist() == first.row(1).tolist() == []


async def test_asking_what_is_in_flight_copies_no_tokens() -> None:
    async with asking(calls=50) as asked:
        asked.report(20_000)
        tracemalloc.start()
        found = await asked.pool.in_flight()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(found) == 50 and peak < 50 * 1000
        asked.report(7)
        assert [(call.num_sampled, call.oldest, len(call.partial())) for call in found] == [(20_000, 0, 20_002)] * 50, (
            "as it was"
        )


async def test_the_oldest_version_of_a_resumed_call_is_that_of_its_earlier_calls() -> None:
    async with asking(calls=1) as asked:
        asked.report(3, version=4)
        partial = (await asked.pool.in_flight())[0].partial()
        resumed = asyncio.ensure_future(asked.pool.generate(partial, Sampling()))
        asked.tasks.append(resumed)
        asked.tell("pull", 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked.report(2, version=6)
        found = await asked.pool.in_flight()
        assert [(call.oldest, call.num_sampled, call.partial().num_sampled) for call in found] == [(4, 5, 5), (4, 2, 5)]


@pytest.mark.parametrize("num_before", [0, 400])
async def test_an_ended_call_is_what_was_reported_and_the_rest_and_keeps_no_message(num_before: int) -> None:
    async with asking(calls=3) as asked:
        asked.report(400)
        reported = [call.partial() for call in await asked.pool.in_flight()]
        requests = list(asked.engine.requests.values())
        asked.report(7, version=1)
        whole = [call.partial() for call in await asked.pool.in_flight()]
        for request in requests:  # as if the second report had not come
            request.num_known = 400
        rests = [SampledSince.rest(*each, num_before=num_before) for each in zip(requests, whole, strict=True)]
        message = asked.tell("sampled", pack_sampled(rests, policy="policy"))
        assert len(message["tokens"]) == 3 * (407 - num_before)
        for rollout, expected, before in zip(await asyncio.gather(*asked.tasks), whole, reported, strict=True):
            assert rollout == expected and np.array_equal(rollout.token_ids[:402], before.token_ids)
            assert not any(np.shares_memory(getattr(rollout, name), message["tokens"]) for name in NAMES)


async def test_an_end_that_does_not_follow_what_was_reported_is_refused() -> None:
    async with asking(calls=1) as asked:
        asked.report(5)
        (request,), whole = asked.engine.requests.values(), (await asked.pool.in_flight())[0].partial()
        rest = SampledSince.rest(request, whole, num_before=4)
        with pytest.raises(WireError, match="goes on from token 4, but 5 were reported"):
            asked.tell("sampled", pack_sampled([rest], policy="policy"))
        assert asked.engine.requests


def since(request, token_ids: list[int], *, entropy: float | None = None, end: CallEnd | None = None) -> SampledSince:
    num = len(token_ids)
    entropies = None if entropy is None else np.full(num, entropy, np.float32)
    return SampledSince(request, np.array(token_ids), np.full(num, -0.5), np.zeros(num), (), "life", entropies, end)


async def test_what_cannot_be_is_refused_and_calls_go_on_from_what_came_before() -> None:
    async with asking(calls=2) as asked:
        good, bad = asked.engine.requests.values()
        asked.tell("sampled", pack_sampled([since(good, [3] * 5), since(bad, [4] * 5)], policy="policy"))
        ended = [since(good, [5]), since(bad, [6, -6], end=CallEnd(5, "stop", 1.0, None))]
        with pytest.raises(WireError, match=f"engine-0 reported: rollout 'of call {bad.key}': token_ids holds a negative id"):
            asked.tell("sampled", pack_sampled(ended, policy="policy"))
        for mask, entropies in [(SamplingMask.unrestricted(2), None), ((), np.zeros(2, np.float32))]:
            odd = since(bad, [7])._replace(masks=mask, entropies=entropies)
            with pytest.raises(WireError, match="engine-0 reported 1 tokens, and masks or entropies of another number"):
                asked.tell("sampled", pack_sampled([odd], policy="policy"))
        end = CallEnd(5, "stop", 1.0, None)
        with pytest.raises(WireError, match="it goes on from token 6, but 5 were reported"):
            asked.tell(
                "sampled",
                pack_sampled([since(good, [5], end=end), since(bad, [7], end=end._replace(num_before=6))], policy="policy"),
            )
        asked.pool.lose(asked.engine)
        found = [await task for task in asked.tasks]
        assert [each.completion_ids for each in found] == [[3] * 5 + [5], [4] * 5]
        assert [each.finish_reason for each in found] == [FinishReason.STOP, FinishReason.ABORT]


async def test_entropies_are_those_of_the_calls_that_record_them() -> None:
    """Training calls may, and calls of an evaluation beside them do not."""
    async with asking(calls=2) as asked:
        records, does_not = asked.engine.requests.values()
        asked.tell("sampled", pack_sampled([since(records, [3, 4], entropy=0.5), since(does_not, [5, 6])], policy="policy"))
        stop = CallEnd(2, "stop", 1.0, None)
        asked.tell("sampled", pack_sampled([since(does_not, [7], end=stop)], policy="policy"))
        asked.tell("sampled", pack_sampled([since(records, [8], entropy=0.25, end=stop)], policy="policy"))
        with_them, without = [await task for task in asked.tasks]
        assert with_them.columns["sampled_entropy"].tolist() == [0, 0, 0.5, 0.5, 0.25]
        assert without.completion_ids == [5, 6, 7] and not without.columns


async def test_calls_that_end_together_are_right_each_and_one_that_is_odd_is_named() -> None:
    async with asking(calls=4) as asked:
        asked.report(3)
        requests = list(asked.engine.requests.values())
        mask = SamplingMask.from_rows([np.array([4, 5])] * 1030)
        added = {1: (np.arange(1030), ()), 2: (np.arange(1030), mask)}  # one is long, one has a mask
        news = [SampledSince(each, *_drawn(np.arange(at)), (), "life") for at, each in enumerate(requests)]
        for at, (ids, rows) in added.items():
            news[at] = SampledSince(requests[at], *_drawn(ids), rows, "life")
        ends = [each._replace(end=(3, "stop", 1.5, None)) for each in news]
        asked.tell("sampled", pack_sampled(ends, policy="policy"))
        found = await asyncio.gather(*asked.tasks)
        lengths = [len(each.token_ids) for each in news]
        assert [rollout.num_sampled for rollout in found] == [3 + length for length in lengths] == [3, 1033, 1033, 6]
        assert asked.pool.num_sampled == {"engine-0": sum(lengths) + 12} and not asked.engine.requests
        for at, rollout in enumerate(found):
            assert rollout.token_ids[:5].tolist() == [1, 2, 3 * at, 3 * at + 1, 3 * at + 2]
            assert rollout.token_ids[5:].tolist() == news[at].token_ids.tolist()
            call = rollout.calls[0]
            assert (call.finish_reason, call.finished, call.engine) == (FinishReason.STOP, 1.5, "engine-0")
        assert found[2].sampling_mask.row(7).tolist() == [4, 5] and found[1].sampling_mask is None
        assert not np.shares_memory(found[1].token_ids, found[3].token_ids)


async def test_an_ended_call_with_a_wrong_token_is_named_and_stays_in_flight() -> None:
    async with asking(calls=3) as asked:
        news = [SampledSince(each, *_drawn(np.arange(4)), (), "life") for each in asked.engine.requests.values()]
        ends = [each._replace(end=(0, "stop", 1.5, None)) for each in news]
        ends[1] = ends[1]._replace(token_ids=np.array([1, -1, 2, 3]))
        with pytest.raises(
            WireError, match=f"engine-0 reported: rollout 'of call {ends[1].request.key}': token_ids holds a negative id"
        ):
            asked.tell("sampled", pack_sampled(ends, policy="policy"))
        assert len(asked.engine.requests) == 3


async def test_one_that_ended_in_a_way_that_cannot_be_stays_in_flight_alone() -> None:
    async with asking(calls=3) as asked:
        news = [SampledSince(each, *_drawn(np.arange(4)), (), "life") for each in asked.engine.requests.values()]
        ends = [each._replace(end=(0, "stop", 1.5, None)) for each in news]
        ends[1] = ends[1]._replace(end=(0, "stop", 1.5, np.zeros((3, 1, 1), np.uint8)))  # the rollout has 6 tokens
        with pytest.raises(WireError, match=r"engine-0 ended 'r1'"):
            asked.tell("sampled", pack_sampled(ends, policy="policy"))
        assert [request.rollout.id for request in asked.engine.requests.values()] == ["r1"]
        first, third = await asked.tasks[0], await asked.tasks[2]
        assert (first.finish_reason, third.finish_reason) == (FinishReason.STOP, FinishReason.STOP)


async def test_calls_that_end_together_are_answered_in_the_engines_order() -> None:
    async with asking(calls=3) as asked:
        order, news = [], []
        for request in asked.engine.requests.values():
            request.on_done = lambda rollout: order.append(rollout.id)
            news.append(SampledSince(request, *_drawn(np.arange(2 if news else 1030)), (), "life"))  # the first is long
        asked.tell("sampled", pack_sampled([each._replace(end=(0, "abort", 1.5, None)) for each in news], policy="policy"))
        assert order == ["r0", "r1", "r2"]


async def test_short_answers_to_long_prompts_share_no_memory() -> None:
    async with asking(calls=2) as asked:
        requests = list(asked.engine.requests.values())
        for at, request in enumerate(requests):
            request.rollout = Rollout.from_prompt([1] * 1024, id=f"r{at}")
        news = [SampledSince(each, *_drawn(np.arange(2)), (), "life") for each in requests]
        asked.tell("sampled", pack_sampled([each._replace(end=(0, "stop", 1.5, None)) for each in news], policy="policy"))
        first, second = await asyncio.gather(*asked.tasks)
        assert first.token_ids.base is None or first.token_ids.base is not second.token_ids.base


async def test_an_on_tokens_that_raises_fails_its_call_alone() -> None:
    def odd(_: object) -> None:
        raise KeyError("mine")

    async with asking(calls=1) as asked:
        asked.tell("pull", 1)
        odd_call = asyncio.ensure_future(
            asked.pool.generate(Rollout.from_prompt([1, 2], id="odd"), Sampling(max_tokens=9), on_tokens=odd)
        )
        for _ in range(4):
            await asyncio.sleep(0)
        news = [SampledSince(each, *_drawn(np.arange(4)), (), "life") for each in asked.engine.requests.values()]
        asked.tell("sampled", pack_sampled([each._replace(end=(0, "stop", 1.5, None)) for each in news], policy="policy"))
        with pytest.raises(KeyError, match="mine"):
            await odd_call
        assert (await asked.tasks[0]).num_sampled == 4 and not asked.engine.requests


def _drawn(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return ids, np.full(len(ids), -0.5), np.full(len(ids), 2)


async def test_an_engine_of_many_slots_is_sent_what_a_quarter_of_them_takes_and_a_new_turn_at_once() -> None:
    async with asking(calls=64) as asked:  # of 32 slots
        sent, first = [], list(asked.engine.requests.values())
        asked.engine.data.notify = lambda name, value: sent.append(len(value["keys"])) if name == "work" else None

        async def end(count: int) -> None:
            news = [SampledSince(first.pop(0), *_drawn(np.arange(4)), (), "life") for _ in range(count)]
            asked.tell("sampled", pack_sampled([each._replace(end=(0, "stop", 1.5, None)) for each in news], policy="policy"))
            asked.tell("pull", count)
            for _ in range(4):
                await asyncio.sleep(0)

        asked.tasks += [asyncio.ensure_future(asked.call(f"s{number}")) for number in range(20)]
        await end(5)
        assert sent == [] and asked.pool.num_waiting == 20
        await end(3)
        assert sent == [8]
        await end(1)
        asked.tasks.append(asyncio.ensure_future(asked.pool.generate(asked.tasks[0].result().append([7]), Sampling())))
        for _ in range(4):
            await asyncio.sleep(0)
        assert sent[1:] == [1], "its KV cache may be there still, and tools are not to wait longer"
        assert asked.pool.num_waiting == 12


async def test_an_engine_of_few_slots_is_sent_a_call_whenever_one_ends() -> None:
    async with asking(calls=14) as asked:
        request = next(iter(asked.engine.requests.values()))
        asked.tasks.append(asyncio.ensure_future(asked.call("more")))
        news = [SampledSince(request, *_drawn(np.arange(4)), (), "life", end=(0, "stop", 1.5, None))]
        asked.tell("sampled", pack_sampled(news, policy="policy"))
        asked.tell("pull", 1)
        for _ in range(4):
            await asyncio.sleep(0)
        assert not asked.pool.num_waiting
