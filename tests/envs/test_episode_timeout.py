"""Environments that take too long, and those that do not end when they are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest

from headrace.envs import CallLimit, EngineClient, SingleTurn, run_episode
from headrace.envs.episode_clock import EpisodeClock
from headrace.records import Episode, FinishReason, InfraAbort, Sampling
from headrace.user_code import then_end_tasks

TASK = {"prompt": "1"}


class Engine:
    """Never finishes a call."""

    num_running = 0

    async def generate(self, rollout: object, sampling: Sampling) -> object:
        self.num_running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_running -= 1
        return rollout


class Prompt:
    id = "e"
    calls = ()
    finish_reason = FinishReason.LENGTH

    def __len__(self) -> int:
        return 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def make_client(engine: Engine, **more: Any) -> EngineClient:
    client = EngineClient(engine=engine, encoder=None, episode="e", group="g", index=0, sampling=Sampling(), seed=0, **more)  # type: ignore[arg-type]
    client.prompt = lambda *_: Prompt()  # type: ignore[method-assign, assignment, return-value]
    return client


class Stubborn:
    """Catches every cancellation and goes on."""

    async def run(self, task: dict[str, Any], client: EngineClient) -> Episode:
        while True:
            try:
                await client.generate(client.prompt(task["prompt"]))
            except asyncio.CancelledError:
                continue


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.user_code.END_SECONDS", 0.02)


@pytest.mark.parametrize("environment", [SingleTurn(), Stubborn()])
async def test_an_episode_that_takes_too_long_fails_and_frees_its_slot(
    environment: Any, request: pytest.FixtureRequest
) -> None:
    engine, limit, said = Engine(), CallLimit(1), []
    if isinstance(environment, Stubborn):
        request.getfixturevalue("soon")
    client = make_client(engine, limit=limit, on_stuck=said.append)
    episode = await run_episode(environment, TASK, client, timeout=0.02)
    assert isinstance(episode.outcome, InfraAbort) and "episode.timeout = 0.02 s" in episode.outcome.reason
    if isinstance(environment, SingleTurn):
        assert engine.num_running == 0 and limit.num_free == 1 and not said
    else:
        assert "the environment of e was cancelled" in said[0]
        assert "test_episode_timeout.py:" in said[0]


class Waits:
    """Waits after a call that takes longer than it may idle, and calls again."""

    def __init__(self, seconds: float, *, may_idle: bool = False) -> None:
        self.seconds, self.may_idle = seconds, may_idle

    async def run(self, task: dict[str, Any], client: EngineClient) -> Episode:
        for _ in range(2):
            await asyncio.gather(client.generate(client.prompt(task["prompt"])), asyncio.sleep(0))
            await asyncio.sleep(self.seconds)
        return Episode(id="e", group="g", task=task)


class Slow(Engine):
    def release(self, ids: object) -> None: ...

    async def generate(self, rollout: Any, sampling: Sampling) -> Any:
        await asyncio.sleep(0.3)
        return Prompt()


async def test_an_episode_that_makes_no_call_for_a_quarter_of_the_deadline_fails_and_calls_may_take_longer() -> None:
    hangs, goes_on, waits_for_people = Waits(60), Waits(0), Waits(0.3, may_idle=True)
    for environment, timeout in ((hangs, 0.0), (hangs, 1000.0), (goes_on, 0.0), (waits_for_people, 0.0)):
        episode = await run_episode(environment, TASK, make_client(Slow()), timeout=timeout, deadline=0.8)
        if environment is not hangs:
            assert episode.outcome is None
        else:
            assert isinstance(episode.outcome, InfraAbort)
            assert "environment 'Waits' made no generate call for 0.2 s, a quarter of deadline = 0.8" in episode.outcome.reason
    late = await run_episode(hangs, TASK, make_client(Slow()), timeout=0.1, deadline=0.8)
    assert isinstance(late.outcome, InfraAbort) and "episode.timeout = 0.1 s" in late.outcome.reason


async def test_waiting_for_a_place_at_the_engines_does_not_count() -> None:
    limit, engine = CallLimit(1), Engine()
    await limit.acquire(is_first=True)
    client = make_client(engine, limit=limit)
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(run_episode(SingleTurn(), TASK, client, timeout=1000))
    await settle()
    assert client.clock.ends == math.inf
    limit.release()
    await settle()
    assert engine.num_running
    assert 990 < client.clock.ends - loop.time() <= 1000
    running.cancel()
    await asyncio.wait({running})


async def test_a_clock_that_is_stopped_twice_goes_on_when_both_have_ended() -> None:
    clock, loop = EpisodeClock(timeout=1000), asyncio.get_running_loop()
    async with clock.running():
        with clock.stopped():
            inner = contextlib.ExitStack()
            inner.enter_context(clock.stopped())
        assert clock.ends == math.inf, "the later one has not ended"
        inner.close()
        assert 990 < clock.ends - loop.time() <= 1000


async def test_a_lease_that_the_engine_makes_after_the_episode_has_ended_is_released() -> None:
    """A task that the environment left behind has a call in flight when the episode ends."""

    class Leasing(Slow):
        def __init__(self) -> None:
            self.released: list[str] = []

        def release(self, ids: Any) -> None:
            self.released += ids

    class LeavesBehind:
        async def run(self, task: dict[str, Any], client: EngineClient) -> Episode:
            left.append(asyncio.ensure_future(client.generate(client.prompt(task["prompt"]))))
            await settle()
            return Episode(id="e", group="g", task=task)

    engine, left = Leasing(), list[Any]()
    await run_episode(LeavesBehind(), TASK, make_client(engine, leased=set()))
    assert engine.released == ["e"]
    await asyncio.wait(left)
    assert engine.released == ["e", "e"]


async def test_a_call_that_waits_after_its_episode_has_failed_leaves_its_place_to_others() -> None:
    class Instant(Engine):
        async def generate(self, rollout: object, sampling: Sampling) -> object:
            return rollout

    class BrokenTool:
        """A tool fails while a call beside it waits; `gather` leaves the call running."""

        async def run(self, task: dict[str, Any], client: EngineClient) -> Episode:
            async def tool() -> None:
                await settle()
                raise ValueError("broken")

            await asyncio.gather(client.generate(client.prompt(task["prompt"])), tool())
            raise AssertionError

    limit = CallLimit(1)
    await limit.acquire(is_first=True)
    episode = await run_episode(BrokenTool(), TASK, make_client(Instant(), limit=limit), timeout=1000)
    assert isinstance(episode.outcome, InfraAbort) and "ValueError: broken" in episode.outcome.reason
    limit.release()
    await settle()
    assert limit.num_free == 1


async def test_the_clock_goes_on_when_an_environment_gives_up_its_first_call() -> None:
    class GivesUp:
        async def run(self, task: dict[str, Any], client: EngineClient) -> Episode:
            call = asyncio.ensure_future(client.generate(client.prompt(task["prompt"])))
            await settle()
            assert client.clock.ends == math.inf
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await asyncio.Event().wait()
            raise AssertionError

    limit = CallLimit(1)
    await limit.acquire(is_first=True)
    client = make_client(Engine(), limit=limit)
    running = asyncio.ensure_future(run_episode(GivesUp(), TASK, client, timeout=1000))
    for _ in range(3):
        await settle()
    assert not running.done()
    assert 990 < client.clock.ends - asyncio.get_running_loop().time() <= 1000
    running.cancel()
    await asyncio.wait({running})
    limit.release()
    assert limit.num_free == 1


def test_an_environment_that_does_not_end_is_named_and_left_behind_when_the_run_ends(soon: None) -> None:
    """Nobody waits for it: neither the leg nor `asyncio.run`. And it gets nothing more from the engines."""
    engine, said = Engine(), []

    async def main() -> None:
        running = asyncio.ensure_future(run_episode(Stubborn(), TASK, make_client(engine, on_stuck=said.append)))
        await settle()
        assert engine.num_running
        running.cancel()
        await asyncio.wait({running}, timeout=5)
        assert running.cancelled()

    asyncio.run(main())
    assert len(said) == 1 and "has not ended within 0.02 s" in said[0]


def test_tasks_that_an_environment_started_and_that_do_not_end_are_named_and_left_behind(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    """`asyncio.run` would wait for them."""

    async def stubborn(is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await is_over.wait()

    async def environment(is_over: asyncio.Event) -> str:
        tools = asyncio.gather(stubborn(is_over), stubborn(is_over))
        ends = asyncio.ensure_future(asyncio.Event().wait())
        await settle()
        assert not tools.done() and not ends.done()
        return "done"

    async def main() -> None:
        is_over = asyncio.Event()
        try:
            assert await then_end_tasks(environment(is_over)) == "done"
            assert asyncio.all_tasks() == {asyncio.current_task()}
        finally:
            is_over.set()  # so that a failed test ends too
            await settle()

    asyncio.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "headrace"]  # asyncio may tell of earlier tests'
    assert len(said) == 2 and all("not ended within 0.02 s" in line for line in said)
    assert all("test_episode_timeout.py:" in line for line in said)
