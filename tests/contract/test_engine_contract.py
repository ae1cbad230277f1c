"""What every engine promises, whichever it is. A new engine is one more entry in `ENGINES`; nothing here changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pooled import pooled

from headrace.engine import Engine, EngineState, PromptTooLong, UnusablePrompt
from headrace.engine.native import NativeEngine
from headrace.engine.native.core import EngineCore
from headrace.engine.native.threaded import ThreadedEngine
from headrace.model.load import load_model
from headrace.model.weights import make_manifest, named_tensors
from headrace.observe import ProcessTimeline, Timeline
from headrace.partial import Interrupt
from headrace.sync import Lineage, MemorySync, SharedMemorySync, SyncError, WeightSync
from headrace.sync import shared as segments
from headrace.types import FinishReason, Rollout, Sampling, Source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from headrace.types import WeightUpdate

CONTEXT = 96
END = 1


@dataclasses.dataclass
class Bench:
    """An engine, and the weights of a policy that can be changed and published to it."""

    engine: Engine
    model: torch.nn.Module
    sync: WeightSync

    async def publish(self, version: int, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        update = self.sync.offer(version, make_manifest(named_tensors(self.model)))
        await self.sync.send(update, named_tensors(self.model))
        await self.engine.pause(interrupt)
        await self.engine.load(update)
        await self.engine.resume()
        self.sync.release(update)

    def nudge(self) -> None:
        with torch.no_grad():
            for _, tensor in named_tensors(self.model):
                if tensor.ndim >= 2:
                    tensor.add_(0.05 * torch.randn_like(tensor))


def make_core(model_path: str, slots: int) -> EngineCore:
    return EngineCore(load_model(model_path), name="engine-0", slots=slots, context=CONTEXT)


@contextlib.asynccontextmanager
async def native(model_path: str, slots: int) -> AsyncIterator[Bench]:
    """In this thread, beside whoever calls it."""
    sync = MemorySync(Lineage("life"))
    engine = NativeEngine(make_core(model_path, slots), sync=sync, timeline=Timeline("engine"))
    serving = asyncio.ensure_future(engine.serve())
    try:
        yield Bench(engine, load_model(model_path), sync)
    finally:
        serving.cancel()
        if serving.done() and not serving.cancelled():
            serving.result()


@contextlib.asynccontextmanager
async def threaded(model_path: str, slots: int) -> AsyncIterator[Bench]:
    """In a thread of its own."""
    sync = MemorySync(Lineage("life"))
    engine = ThreadedEngine(make_core(model_path, slots), sync=sync, timeline=ProcessTimeline("engine"))
    engine.start()
    try:
        yield Bench(engine, load_model(model_path), sync)
    finally:
        engine.close()
        assert not engine.died.done(), engine.died.exception()


class AsGiven(SharedMemorySync):
    """Writes what it is given into the places there are, in order; what has no place of its own is left out."""

    def _write(self, update: WeightUpdate, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        segment = self._segment(self._path(update), segments._size(update))
        segment.version = update.version
        names = {info.name for info in update.manifest}
        for (info, start), (name, tensor) in zip(segments._places(update), tensors, strict=False):
            if name in names:
                count = min(tensor.numel(), info.num_bytes // tensor.element_size())
                segments._view(segment.mapped, info, start).reshape(-1)[:count].copy_(tensor.reshape(-1)[:count])


@contextlib.asynccontextmanager
async def pool(model_path: str, slots: int) -> AsyncIterator[Bench]:
    """In a pool of one, over sockets and shared memory."""
    async with pooled(model_path, sync=AsGiven) as bench:
        await bench.join(slots=slots, context=CONTEXT)
        yield Bench(bench.pool, load_model(model_path), bench.sync)


ENGINES: dict[str, Callable[[str, int], AbstractAsyncContextManager[Bench]]] = {
    "native": native,
    "threaded": threaded,
    "pool": pool,
}


@pytest.fixture(params=ENGINES)
def run(request: pytest.FixtureRequest, tiny_model: str) -> Callable[..., Any]:
    """Runs a coroutine function with a served engine that holds version 0."""
    make = ENGINES[request.param]

    def runner(test: Callable[[Bench], Awaitable[Any]], *, slots: int = 4) -> Any:
        async def main() -> Any:
            torch.manual_seed(0)
            async with make(tiny_model, slots) as bench:
                await bench.publish(0)
                return await asyncio.wait_for(test(bench), timeout=60)

        return asyncio.run(main())

    return runner


def prompt(name: str = "r", *, length: int = 6, seed: int = 0) -> Rollout:
    ids = np.random.default_rng(seed).integers(6, 90, size=length)
    return Rollout.from_prompt(ids, id=name)


async def until(bench: Bench, holds: Callable[[EngineState], bool]) -> EngineState:
    """The engine's state once it is as it should be; the test's own deadline ends a wait in vain."""
    while not holds(state := await bench.engine.state()):  # noqa: ASYNC110  (an engine has no event for each number)
        await asyncio.sleep(0)
    return state


async def drawn(bench: Bench, count: int) -> None:
    """Until so many more tokens have been drawn."""
    goal = (await bench.engine.state()).tokens + count
    await until(bench, lambda state: state.tokens >= goal)


def test_generation_lengthens_a_rollout(run):
    async def check(bench: Bench) -> None:
        before = prompt()
        after = await bench.engine.generate(before, Sampling(max_tokens=7, seed=3))
        assert after.id == before.id and len(after) == len(before) + 7
        assert np.array_equal(after.token_ids[: len(before)], before.token_ids)
        assert after.finish_reason is FinishReason.LENGTH
        assert (after.source[len(before) :] == Source.SAMPLED).all() and after.loss_mask[len(before) :].all()
        assert (after.versions[len(before) :] == 0).all() and after.lineage == "life"
        assert (after.logprobs[len(before) :] < 0).all()
        call = after.calls[0]
        assert (call.start, call.stop, call.sampling.seed) == (6, 13, 3) and call.finished >= call.started > 0

    run(check)


def test_stop_tokens_end_a_call_and_belong_to_it(run):
    async def check(bench: Bench) -> None:
        stops = tuple(range(6, 60))
        after = await bench.engine.generate(prompt(), Sampling(max_tokens=50, stop_ids=stops, seed=1))
        assert after.finish_reason is FinishReason.STOP and int(after.token_ids[-1]) in stops
        assert not any(int(token) in stops for token in after.token_ids[6:-1])
        held = await bench.engine.generate(prompt(), Sampling(max_tokens=50, min_tokens=9, stop_ids=stops, seed=1))
        assert held.num_sampled >= 10
        assert not any(int(token) in stops for token in held.token_ids[6:15])

    run(check)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.6),
        Sampling(max_tokens=12, top_k=5),
        Sampling(max_tokens=12, top_p=0.7),
        Sampling(max_tokens=12, min_p=0.2),
        Sampling(max_tokens=12, temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
        Sampling(max_tokens=12, min_tokens=6, stop_ids=(1, 7, 8)),
    ],
)
def test_logprobs_are_those_of_the_distribution_drawn_from(run, sampling):
    """Scored again at equal weights, with the recorded temperature and mask, the ratio is 1 on every token."""

    async def check(bench: Bench) -> None:
        prompts = [prompt(f"r{i}", seed=i, length=3 + i) for i in range(9)]
        requests = [dataclasses.replace(sampling, seed=i) for i in range(9)]
        rollouts = await asyncio.gather(*map(bench.engine.generate, prompts, requests))
        for rollout, logprobs in zip(rollouts, await bench.engine.score(rollouts), strict=True):
            sampled = rollout.is_sampled
            np.testing.assert_allclose(logprobs[sampled], rollout.logprobs[sampled], atol=1e-5)
            if sampling.is_truncated:
                assert rollout.sampling_mask is not None
                for index in np.flatnonzero(sampled):
                    row = rollout.sampling_mask.row(int(index))
                    assert not len(row) or rollout.token_ids[index] in row
                    assert not sampling.top_k or len(row) <= sampling.top_k
            else:
                assert rollout.sampling_mask is None

    run(check)


def test_frequencies_follow_the_logprobs(run):
    """Draws of one token from one prompt: how often each came up against what its logprob says."""

    async def check(bench: Bench) -> None:
        count = 3000
        draws = await asyncio.gather(
            *(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=1, top_k=4, seed=i)) for i in range(count))
        )
        said: dict[int, float] = {}
        seen: dict[int, int] = {}
        for rollout in draws:
            token = int(rollout.token_ids[-1])
            said[token] = float(np.exp(rollout.logprobs[-1]))
            seen[token] = seen.get(token, 0) + 1
        assert len(said) == 4 and abs(sum(said.values()) - 1) < 1e-4
        for token, probability in said.items():
            assert abs(seen[token] / count - probability) < 4 * (probability * (1 - probability) / count) ** 0.5

    run(check, slots=256)


def test_greedy_is_certain(run):
    async def check(bench: Bench) -> None:
        first = await bench.engine.generate(prompt(), Sampling(max_tokens=8, temperature=0, seed=1))
        again = await bench.engine.generate(prompt(), Sampling(max_tokens=8, temperature=0, seed=2))
        assert np.array_equal(first.token_ids, again.token_ids) and not first.logprobs.any()

    run(check)


def test_the_same_seed_draws_the_same_tokens_in_any_batch(run):
    async def check(bench: Bench) -> None:
        alone = await bench.engine.generate(prompt(), Sampling(max_tokens=10, seed=5))
        crowd = await asyncio.gather(
            *(bench.engine.generate(prompt(f"r{i}", seed=i), Sampling(max_tokens=10, seed=5 + i)) for i in range(9))
        )
        assert np.array_equal(crowd[0].token_ids, alone.token_ids)
        assert not np.array_equal(crowd[1].token_ids[-10:], alone.token_ids[-10:])

    run(check)


def test_a_stream_is_the_same_call_and_closing_it_cancels(run):
    async def check(bench: Bench) -> None:
        whole = await bench.engine.generate(prompt(), Sampling(max_tokens=6, seed=2))
        parts = [part async for part in bench.engine.stream(prompt(), Sampling(max_tokens=6, seed=2))]
        assert [token for part in parts for token in part.token_ids] == whole.token_ids[6:].tolist()
        assert parts[-1].finish_reason is FinishReason.LENGTH and parts[0].finish_reason is None
        stream = bench.engine.stream(prompt(), Sampling(max_tokens=60))
        await anext(stream)
        assert (await bench.engine.state()).running == 1
        await stream.aclose()
        await until(bench, lambda state: state.running == 0)

    run(check)


def test_cancelling_gives_slot_and_blocks_back(run):
    async def check(bench: Bench) -> None:
        free = (await bench.engine.state()).free_blocks
        calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=60))) for i in range(7)]
        await until(bench, lambda state: (state.running, state.waiting) == (4, 3))
        for call in calls:
            call.cancel()
        await until(bench, lambda state: (state.running, state.waiting, state.free_blocks) == (0, 0, free))

    run(check)


def test_a_prompt_without_room_is_refused_and_a_long_one_ends_at_the_context(run):
    async def check(bench: Bench) -> None:
        with pytest.raises(PromptTooLong, match=str(CONTEXT)):
            await bench.engine.generate(prompt(length=CONTEXT), Sampling())
        after = await bench.engine.generate(prompt(length=CONTEXT - 2), Sampling(max_tokens=50))
        assert len(after) == CONTEXT and after.finish_reason is FinishReason.LENGTH

    run(check)


def test_keep_stamps_each_token_with_the_version_that_drew_it(run):
    async def check(bench: Bench) -> None:
        call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=80, seed=4)))
        for version in (1, 2):
            await drawn(bench, 8)
            bench.nudge()
            await bench.publish(version)
        after = await call
        versions = after.versions[after.is_sampled]
        assert set(versions.tolist()) == {0, 1, 2} and (np.diff(versions) >= 0).all() and len(after.calls) == 1

    run(check)


def test_abort_ends_where_it_is_and_generating_again_resumes(run):
    async def check(bench: Bench) -> None:
        call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=80, seed=4)))
        await drawn(bench, 8)
        bench.nudge()
        await bench.publish(1, interrupt=Interrupt.ABORT)
        partial = await call
        assert partial.finish_reason is FinishReason.ABORT and 0 < partial.num_sampled < 80
        whole = await bench.engine.generate(partial, Sampling(max_tokens=80 - partial.num_sampled, seed=4))
        assert np.array_equal(whole.token_ids[: len(partial)], partial.token_ids) and len(whole.calls) == 2
        assert set(whole.versions[whole.is_sampled].tolist()) == {0, 1}
        late = slice(len(partial), None)
        fresh = (await bench.engine.score([whole]))[0]
        np.testing.assert_allclose(fresh[late], whole.logprobs[late], atol=1e-5)

    run(check)


def test_an_aborted_stream_ends(run):
    async def check(bench: Bench) -> None:
        stream = bench.engine.stream(prompt(), Sampling(max_tokens=60))
        await anext(stream)
        await bench.publish(1, interrupt=Interrupt.ABORT)
        parts = [part async for part in stream]
        assert parts[-1].finish_reason is FinishReason.ABORT

    run(check)


def test_a_greedy_rollout_can_be_scored_and_an_empty_one_is_refused(run):
    async def check(bench: Bench) -> None:
        rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=5, temperature=0))
        assert np.isfinite((await bench.engine.score([rollout]))[0]).all()
        with pytest.raises(UnusablePrompt, match="empty"):
            await bench.engine.generate(prompt(length=0), Sampling())

    run(check)


def test_drain_finishes_what_is_in_flight_on_the_old_version(run):
    async def check(bench: Bench) -> None:
        calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=40))) for i in range(6)]
        await drawn(bench, 8)
        bench.nudge()
        await bench.publish(1, interrupt=Interrupt.DRAIN)
        versions = [set(rollout.versions[rollout.is_sampled].tolist()) for rollout in await asyncio.gather(*calls)]
        assert sorted(map(tuple, versions)) == [(0,)] * 4 + [(1,)] * 2

    run(check)


def test_a_paused_engine_can_still_be_drained(run):
    async def check(bench: Bench) -> None:
        call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=40)))
        await drawn(bench, 4)
        await bench.engine.pause(Interrupt.KEEP)
        assert not call.done()
        await bench.engine.pause(Interrupt.DRAIN)
        assert (await call).num_sampled == 40
        later = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=2)))
        await until(bench, lambda state: state.waiting == 1)
        assert (await bench.engine.state()).running == 0
        await bench.engine.resume()
        assert (await later).num_sampled == 2

    run(check)


def test_new_weights_are_really_used(run):
    async def check(bench: Bench) -> None:
        rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=10))
        before = (await bench.engine.score([rollout]))[0]
        bench.nudge()
        await bench.publish(1)
        after = (await bench.engine.score([rollout]))[0]
        assert np.abs(after - before).max() > 1e-2
        assert (await bench.engine.state()).version == 1

    run(check)


@pytest.mark.parametrize("fault", ["dropped", "flipped", "renamed", "reshaped"])
def test_a_faulty_update_is_refused_and_the_old_version_stays(run, fault):
    async def check(bench: Bench) -> None:
        rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=10))
        before = (await bench.engine.score([rollout]))[0]
        bench.nudge()
        update = bench.sync.offer(1, make_manifest(named_tensors(bench.model)))
        tensors = [(name, tensor.clone()) for name, tensor in named_tensors(bench.model)]
        name, tensor = tensors[3]
        if fault == "dropped":
            del tensors[3]
        elif fault == "flipped":
            tensor.view(torch.int32).reshape(-1)[1] ^= 1
        elif fault == "renamed":
            tensors[3] = (name + "x", tensor)
        else:
            tensors[3] = (name, tensor[:-1])
        await bench.sync.send(update, tensors)
        with pytest.raises(RuntimeError, match="version 1"):
            await bench.engine.load(update)
        bench.sync.abort(update)
        assert (await bench.engine.state()).version == 0
        assert np.array_equal((await bench.engine.score([rollout]))[0], before)
        with pytest.raises(SyncError, match="not on offer"):
            await bench.engine.load(update)

    run(check)
