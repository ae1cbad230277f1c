"""Places are held by generate calls, not by episodes."""

from __future__ import annotations

import asyncio
import math

import pytest

from headrace.envs import CallLimit, EngineClient
from headrace.envs.episode_clock import EpisodeClock
from headrace.records import FinishReason, Rollout, Sampling


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_later_calls_of_an_episode_go_before_the_first_calls_of_others():
    limit, order = CallLimit(1), []

    async def call(name: str, *, is_first: bool) -> None:
        await limit.acquire(is_first=is_first)
        order.append(name)

    await limit.acquire(is_first=True)
    calls = [asyncio.ensure_future(call(name, is_first=name.islower())) for name in ("a", "b", "C", "d", "E")]
    await settle()
    assert not order
    for _ in calls:
        limit.release()
        await settle()
    assert order == ["C", "E", "a", "b", "d"] and limit.num_free == 0
    limit.release()
    assert limit.num_free == 1


async def test_places_come_and_go_with_engines():
    limit = CallLimit(1)
    calls = [asyncio.ensure_future(limit.acquire(is_first=True)) for _ in range(4)]
    await settle()
    limit.resize(3)
    await settle()
    assert [call.done() for call in calls] == [True, True, True, False] and limit.num_calls == 4
    limit.resize(1)
    for _ in range(2):
        limit.release()
        await settle()
    assert not calls[3].done(), "two calls were too many"
    limit.release()
    await settle()
    assert calls[3].done() and limit.num_calls == 1
    limit.release()
    assert limit.num_free == 1


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_a_cancelled_call_leaves_its_place_to_the_next(is_handed_over):
    limit = CallLimit(1)
    await limit.acquire(is_first=True)
    gives_up, waits = (asyncio.ensure_future(limit.acquire(is_first=True)) for _ in range(2))
    await settle()
    if is_handed_over:
        limit.release()  # to the one that is cancelled before it runs
    gives_up.cancel()
    await settle()
    if not is_handed_over:
        limit.release()
    await asyncio.wait_for(waits, 30)
    limit.release()
    assert gives_up.cancelled() and limit.num_free == 1


async def test_an_episode_that_waits_for_a_tool_holds_no_place():
    class Engine:
        num_running = most = 0

        async def generate(self, rollout, sampling):
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            await settle()
            self.num_running -= 1
            return rollout

    class Prompt:
        def __init__(self, id: str) -> None:
            self.id, self.finish_reason = id, FinishReason.STOP

        def __len__(self) -> int:
            return 1

    engine, limit, tool = Engine(), CallLimit(2), asyncio.Event()
    waiting = []

    async def episode(name: str) -> None:
        client = EngineClient(
            engine=engine, encoder=None, episode=name, group=name, index=0, sampling=Sampling(), seed=0, limit=limit
        )  # type: ignore[arg-type]
        await client.generate(Prompt(name))
        waiting.append(name)
        await tool.wait()
        await client.generate(Prompt(name))

    episodes = [asyncio.ensure_future(episode(f"e{number}")) for number in range(6)]
    for _ in range(6):
        await settle()
        await settle()
    assert len(waiting) == 6
    assert limit.num_free == 2 and engine.most == 2, "all wait for the tool at once, and none holds a place"
    tool.set()
    await asyncio.gather(*episodes)
    assert limit.num_free == 2 and engine.most == 2


async def test_an_episode_that_begins_again_waits_for_its_first_call_like_any_other():
    """Behind later calls, and its clock stands still."""

    class Engine:
        def release(self, ids: list[str]) -> None: ...

        async def generate(self, rollout, sampling):
            return rollout

    limit, prompt = CallLimit(1), Rollout.from_prompt([1], id="e")
    names = {"episode": "e", "group": "e", "index": 0, "encoder": None}
    client = EngineClient(engine=Engine(), **names, sampling=Sampling(), seed=0, limit=limit, clock=EpisodeClock(60))
    async with client.clock.running():
        await client.generate(prompt)
        client.begin_again()
        await limit.acquire(is_first=True)
        first = asyncio.ensure_future(client.generate(prompt))
        await settle()
        later = asyncio.ensure_future(limit.acquire(is_first=False))
        await settle()
        limit.release()
        await asyncio.wait({first, later}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert later.done() and not first.done() and client.clock.ends == math.inf
        limit.release()
        await first
