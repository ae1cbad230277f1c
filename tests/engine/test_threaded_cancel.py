"""A call that is cancelled at the worst moment: when the decode thread has taken it and nobody has heard yet."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.engine.native.releasable_memory import HostMemory
from headrace.model.load import load_model
from headrace.model.weights import WeightError
from headrace.observe import Timeline
from headrace.partial import Interrupt
from headrace.records import Rollout, Sampling, WeightUpdate
from headrace.sync import Lineage, MemoryTransport, WeightSync


def made(model: str) -> NativeEngine:
    core = EngineCore(load_model(model), name="engine-0", slots=1, context=64)
    return NativeEngine(core, sync=WeightSync(Lineage("life"), MemoryTransport()), timeline=Timeline("engine"))


@pytest.mark.parametrize("how", ["generate", "stream"])
async def test_a_call_cancelled_while_it_is_submitted_leaves_nothing(tiny_model: str, how: str) -> None:
    engine = made(tiny_model)
    engine.start()
    loop, submit = asyncio.get_running_loop(), engine.core.submit
    prompt, sampling = Rollout.from_prompt([5], id="r"), Sampling(max_tokens=50)

    async def call() -> None:
        if how == "generate":
            await engine.generate(prompt, sampling)
        async for _ in engine.stream(prompt, sampling):
            pass

    def submit_then_cancel(request: object) -> None:
        submit(request)
        loop.call_soon_threadsafe(task.cancel)

    engine.core.submit = submit_then_cancel
    await engine.pause(Interrupt.KEEP)
    task = asyncio.create_task(call())
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.between_steps(lambda: None)
    state = await engine.state()
    engine.close()
    assert (state.running, state.waiting) == (0, 0)


async def test_a_drain_that_is_cancelled_ends_neither_the_engine_nor_its_work(tiny_model: str) -> None:
    engine = made(tiny_model)
    engine.start()
    calls = [asyncio.create_task(engine.generate(Rollout.from_prompt([5], id="r"), Sampling(max_tokens=40))) for _ in "ab"]
    while not engine.core.num_running:  # noqa: ASYNC110  (it runs in another thread)
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause(Interrupt.DRAIN), 0.001)
    assert [rollout.num_sampled for rollout in await asyncio.wait_for(asyncio.gather(*calls), 60)] == [40, 40]
    engine.close()
    assert not engine.died.done()


async def test_an_engine_drained_for_weights_it_cannot_take_goes_on(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(tiny_model)
    monkeypatch.setattr(engine, "_stage", lambda update: None)  # so that nothing lies ready
    engine.start()
    with pytest.raises(WeightError, match="no weights lie ready"):
        await engine.load(WeightUpdate(policy="policy", lineage="life", version=1), interrupt=Interrupt.DRAIN)
    rollout = await asyncio.wait_for(engine.generate(Rollout.from_prompt([5], id="r"), Sampling(max_tokens=4)), 60)
    engine.close()
    assert rollout.num_sampled == 4 and set(rollout.versions[1:].tolist()) == {0}


async def test_an_engine_whose_weights_sleep_does_not_score(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU there is no memory behind them: it would end the process."""
    engine = made(tiny_model)
    engine.core.weights.memories.append(HostMemory(8))  # as on a GPU, where the weights lie in memory that is given back
    engine.start()
    await engine.sleep(weights=True)
    with pytest.raises(WeightError, match="wake it before it scores"):
        await engine.score([Rollout.from_prompt([5, 6], id="r")])
    await engine.wake()
    (scored,) = await engine.score([Rollout.from_prompt([5, 6], id="r")])
    engine.close()
    assert scored[1] < 0


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_update_is_not_staged_over_another(
    tiny_model: str, is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent the first may have given it up and sent the next: the thread that copies it goes on."""
    engine = made(tiny_model)
    seen: list[tuple[str, int]] = []
    may_go_on = threading.Event()

    def stage(update: WeightUpdate) -> None:
        seen.append(("begins", update.version))
        may_go_on.wait(60)
        seen.append(("is there", update.version))

    monkeypatch.setattr(engine, "_stage", stage)
    monkeypatch.setattr(engine, "_swap", lambda update, _: seen.append(("runs", update.version)))
    engine.start()
    updates = [WeightUpdate(policy="policy", lineage="life", version=version) for version in (1, 2)]
    first, second = (asyncio.create_task(engine.load(update)) for update in updates)
    while not seen:  # noqa: ASYNC110  (it is staged in another thread)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)  # for a second one that does not wait
    if is_cancelled:
        first.cancel()
        await asyncio.sleep(0.05)
    may_go_on.set()
    await asyncio.wait([first, second], timeout=60)
    engine.close()
    phases = ["begins", "is there", "runs"]
    assert first.cancelled() == is_cancelled
    assert seen == [(each, 1) for each in phases[: 2 if is_cancelled else 3]] + [(each, 2) for each in phases]
