"""What the launcher keeps of an engine's calls: the tokens reported, compactly and apart from the messages they came in."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from types import SimpleNamespace

import numpy as np

from headrace.engine import EnginePool, RemoteEngine, pack_tokens
from headrace.records import FinishReason, Rollout, Sampling, SamplingMask, decode, encode, pack_rollouts

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
        keys, total = list(self.engine.requests), tokens * len(self.engine.requests)
        return self.tell(
            "sampled",
            {
                "calls": [[key, tokens, 0.0, "life"] for key in keys],
                "tokens": pack_tokens(np.arange(total), np.full(total, -0.5), np.full(total, version)),
                "entropies": None,
                "masks": masks or {},
                "policy": "policy",
            },
        )


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


async def test_long_rollouts_that_ended_together_do_not_keep_each_other_in_memory() -> None:
    async with asking(calls=3) as asked:
        asked.report(400)
        partials = [call.partial() for call in await asked.pool.in_flight()]
        keys = np.array(list(asked.engine.requests))
        message = asked.tell("done", {"keys": keys, "starts": np.zeros_like(keys), "rollouts": pack_rollouts(partials)})
        for rollout, partial in zip(await asyncio.gather(*asked.tasks), partials, strict=True):
            assert rollout == partial
            assert not any(np.shares_memory(getattr(rollout, name), message["rollouts"][name]) for name in NAMES)
