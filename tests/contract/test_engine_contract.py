"""What every engine promises, whichever it is. A new engine is one more entry in `ENGINES`; nothing here changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from manifests import make_manifest
from pooled import parcel_of, pooled
from safetensors.torch import save_file
from vllm_server import served

from headrace.engine import Engine, EngineState, PromptTooLong, UnusablePrompt
from headrace.engine.native.core import EngineCore
from headrace.engine.native.engine import NativeEngine
from headrace.engine.protocol import EngineAsleep, NotFinite
from headrace.engine.stop_strings import decoder_of
from headrace.engine.vllm.handover import saved_form
from headrace.errors import SyncError
from headrace.model.arena import Arena, lay_out
from headrace.model.load import load_model, load_tokenizer
from headrace.model.weights import named_tensors
from headrace.observe import ProcessTimeline, Timeline
from headrace.partial import Interrupt
from headrace.records import Batch, FinishReason, Rollout, Sampling, Source
from headrace.sync import Lineage, MemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from headrace.engine.native.step import StepPlan

    Decode = Callable[[list[int]], str]

CONTEXT = 240
END = 1


@dataclasses.dataclass
class Bench:
    """An engine, and the weights of a policy that can be changed and published to it."""

    engine: Engine
    model: torch.nn.Module
    sync: WeightSync
    vocabulary: int
    spoil: Callable[[], Awaitable[None]]
    """Has the weights that run, and no others, hold what is not a number."""
    native_core: EngineCore | None = None
    """What steps in there: for tests that look at what it computes."""

    @property
    def core(self) -> EngineCore:
        assert self.native_core is not None, "a test of native engines only"
        return self.native_core

    async def publish(self, version: int, *, interrupt: Interrupt = Interrupt.KEEP, is_paused: bool = True) -> None:
        """To an engine that is paused meanwhile, or by `load` alone."""
        update = self.sync.offer(version, named_tensors(self.model))
        if is_paused:
            await self.engine.pause(interrupt)
            await self.engine.load(update)
            await self.engine.resume()
        else:
            await self.engine.load(update, interrupt=interrupt)
        self.sync.release(update)

    def nudge(self) -> None:
        with torch.no_grad():
            for _, tensor in named_tensors(self.model):
                if tensor.ndim >= 2:
                    tensor.add_(0.05 * torch.randn_like(tensor))


def bench_of(engine: Engine, core: EngineCore, model_path: str, sync: WeightSync) -> Bench:
    """Over an engine whose core is at hand."""

    async def spoil_core() -> None:
        spoil(core.model)

    return Bench(engine, load_model(model_path), sync, core.head.vocabulary, spoil_core, core)


def make_core(model_path: str, slots: int, decode: Decode | None) -> EngineCore:
    return EngineCore(load_model(model_path), name="engine-0", slots=slots, context=CONTEXT, decode=decode)


@contextlib.asynccontextmanager
async def native(model_path: str, slots: int, decode: Decode | None) -> AsyncIterator[Bench]:
    """In this thread, beside whoever calls it."""
    sync = WeightSync(Lineage("life"), MemoryTransport())
    engine = NativeEngine(make_core(model_path, slots, decode), sync=sync, timeline=Timeline("engine"))
    serving = asyncio.ensure_future(engine.serve())
    try:
        yield bench_of(engine, engine.core, model_path, sync)
    finally:
        serving.cancel()
        if serving.done() and not serving.cancelled():
            serving.result()


@contextlib.asynccontextmanager
async def threaded(model_path: str, slots: int, decode: Decode | None) -> AsyncIterator[Bench]:
    """In a thread of its own."""
    sync = WeightSync(Lineage("life"), MemoryTransport())
    engine = NativeEngine(make_core(model_path, slots, decode), sync=sync, timeline=ProcessTimeline("engine"))
    engine.start()
    try:
        yield bench_of(engine, engine.core, model_path, sync)
    finally:
        engine.close()
        assert not engine.died.done(), engine.died.exception()


@contextlib.asynccontextmanager
async def pool(model_path: str, slots: int, decode: Decode | None) -> AsyncIterator[Bench]:
    """In a pool of one, over sockets and shared memory."""
    async with pooled(model_path, decode=decode) as bench:
        far = await bench.join(slots=slots, context=CONTEXT)
        yield bench_of(bench.pool, far.core, model_path, bench.sync)


@contextlib.asynccontextmanager
async def vllm(model_path: str, slots: int, decode: Decode | None) -> AsyncIterator[Bench]:
    """A real server over HTTP, the same for all tests; each has an engine of its own over it."""
    sync = WeightSync(Lineage("life"), MemoryTransport())
    async with served(model_path, sync=sync, slots=slots, context=CONTEXT, decode=decode) as (engine, api):
        model = load_model(model_path)
        vocabulary = engine.vocabulary

        async def spoil_server() -> None:
            with tempfile.TemporaryDirectory() as folder:
                harmed = load_model(model_path)
                spoil(harmed)
                save_file(saved_form(harmed), Path(folder) / "model.safetensors")
                await api.reload(folder)

        yield Bench(engine, model, sync, vocabulary, spoil_server)


ENGINES: dict[str, Callable[[str, int, Decode | None], AbstractAsyncContextManager[Bench]]] = {
    "native": native,
    "threaded": threaded,
    "pool": pool,
    "vllm": vllm,
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name == "vllm")) for name in ENGINES])
def opened(request: pytest.FixtureRequest, tiny_model: str) -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """Opens a served engine that holds version 0."""
    if request.param == "vllm":
        request.getfixturevalue("vllm_server")

    @contextlib.asynccontextmanager
    async def opening(*, slots: int = 4, has_tokenizer: bool = True) -> AsyncIterator[Bench]:
        torch.manual_seed(0)
        decode = decoder_of(load_tokenizer(tiny_model)) if has_tokenizer else None
        async with ENGINES[request.param](tiny_model, slots, decode) as bench:
            await bench.publish(0)
            yield bench

    return opening


@pytest.fixture
def bench(opened: Callable[..., AbstractAsyncContextManager[Bench]]) -> AbstractAsyncContextManager[Bench]:
    return opened()


here = pytest.mark.parametrize("opened", ["native", "threaded"], indirect=True)
"""Of engines in this process only."""
ours = pytest.mark.parametrize("opened", ["native", "threaded", "pool"], indirect=True)
"""Of the native engine, wherever it is."""


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


async def test_generation_lengthens_a_rollout(bench: Bench):
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


async def test_stop_tokens_end_a_call_and_belong_to_it(bench: Bench):
    stops = tuple(range(6, 60))
    after = await bench.engine.generate(prompt(), Sampling(max_tokens=50, stop_ids=stops, seed=1))
    assert after.finish_reason is FinishReason.STOP and int(after.token_ids[-1]) in stops
    assert not any(int(token) in stops for token in after.token_ids[6:-1])
    held = await bench.engine.generate(prompt(), Sampling(max_tokens=50, min_tokens=9, stop_ids=stops, seed=1))
    assert held.num_sampled >= 10
    assert not any(int(token) in stops for token in held.token_ids[6:15])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.6),
        Sampling(max_tokens=12, top_k=5),
        Sampling(max_tokens=12, top_k=1),
        Sampling(max_tokens=12, top_p=0.7),
        Sampling(max_tokens=12, min_p=0.2),
        Sampling(max_tokens=12, temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
        Sampling(max_tokens=12, min_tokens=6, stop_ids=(1, 7, 8)),
    ],
)
async def test_logprobs_are_those_of_the_distribution_drawn_from(bench: Bench, sampling):
    """Scored again at equal weights, with the recorded temperature and mask, the ratio is 1 on every token."""
    prompts = [prompt(f"r{i}", seed=i, length=3 + i) for i in range(9)]
    requests = [dataclasses.replace(sampling, seed=i) for i in range(9)]
    rollouts = await asyncio.gather(*map(bench.engine.generate, prompts, requests))
    for rollout, logprobs in zip(rollouts, await bench.engine.score(rollouts), strict=True):
        sampled = rollout.is_sampled
        np.testing.assert_allclose(logprobs[sampled], rollout.logprobs[sampled], atol=1e-5)
        if sampling.is_truncated:
            assert rollout.sampling_mask is not None
            for index in np.flatnonzero(sampled):
                row, token = rollout.sampling_mask.row(int(index)).tolist(), int(rollout.token_ids[index])
                assert token in row if row and row[0] >= 0 else ~token not in row
                assert not sampling.top_k or len(row) <= sampling.top_k
        else:
            assert rollout.sampling_mask is None


CUTS = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.95, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9},
    {"min_tokens": 15, "stop_ids": tuple(range(6, 30))},
    {"top_p": 0.8, "min_p": 0.02, "min_tokens": 15, "stop_ids": tuple(range(6, 30)), "temperature": 0.7},
]


@pytest.mark.parametrize("opened", ["native", pytest.param("vllm", marks=pytest.mark.long)], indirect=True)
async def test_the_trainer_finds_a_ratio_of_one_only_with_what_was_recorded(opened, tiny_model, monkeypatch):
    """At equal weights, for any distribution: by its own pass, the mean over all tokens and the largest difference."""
    monkeypatch.setattr("headrace.engine.vllm.call._FEW", 8)  # so that tokens of wide distributions are sampled again with more
    trainer = DeviceTrainer(load_model(tiny_model), tokenizer=load_tokenizer(tiny_model), settings=TrainSettings())

    def seen(rollouts: list[Rollout]) -> tuple[float, float]:
        total = sum(each.num_sampled for each in rollouts)
        weights = tuple((each.loss_mask / total).astype(np.float32) for each in rollouts)
        batch = Batch(rollouts=tuple(rollouts), advantages=weights, weights=weights, loss="reinforce", version=1)
        metrics = trainer.forward_backward(batch)
        return metrics["ratio"], metrics["mismatch_max"]

    async with opened(slots=12) as bench:
        with torch.no_grad():  # some distributions are narrow and some wide, unlike those of an untrained model
            dict(bench.model.named_parameters())["model.norm.weight"].mul_(5)
        trainer.model.load_state_dict(bench.model.state_dict())
        await bench.publish(1)
        for changes in CUTS:
            samplings = [Sampling(**{"max_tokens": 30, **changes, "seed": index}) for index in range(12)]
            prompts = [prompt(f"r{index}", seed=index, length=3 + index) for index in range(12)]
            rollouts = await asyncio.gather(*map(bench.engine.generate, prompts, samplings))
            ratio, largest = seen(rollouts)
            assert ratio == pytest.approx(1.0, abs=1e-4) and largest < 1e-4, changes
            ratio, largest = seen([each.replace(sampling_mask=None) for each in rollouts])
            assert ratio < 0.98 if samplings[0].is_truncated else largest < 1e-4, changes
            cold = [dataclasses.replace(call, sampling=Sampling()) for each in rollouts for call in each.calls]
            ratio, largest = seen([each.replace(calls=(call,)) for each, call in zip(rollouts, cold, strict=True)])
            assert largest > 0.1 if "temperature" in changes else largest < 1e-4, changes


async def test_frequencies_follow_the_logprobs(opened):
    """Draws of one token from one prompt: how often each came up against what its logprob says."""
    async with opened(slots=256) as bench:
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


async def test_greedy_is_certain(bench: Bench):
    first = await bench.engine.generate(prompt(), Sampling(max_tokens=8, temperature=0, seed=1))
    again = await bench.engine.generate(prompt(), Sampling(max_tokens=8, temperature=0, seed=2))
    assert np.array_equal(first.token_ids, again.token_ids) and not first.logprobs.any()


async def test_the_same_seed_draws_the_same_tokens_in_any_batch(bench: Bench):
    alone = await bench.engine.generate(prompt(), Sampling(max_tokens=10, seed=5))
    crowd = await asyncio.gather(
        *(bench.engine.generate(prompt(f"r{i}", seed=i), Sampling(max_tokens=10, seed=5 + i)) for i in range(9))
    )
    assert np.array_equal(crowd[0].token_ids, alone.token_ids)
    assert not np.array_equal(crowd[1].token_ids[-10:], alone.token_ids[-10:])


async def test_a_call_tells_its_tokens_as_they_come_and_returns_the_same(bench):
    told = []
    rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=6, seed=2), on_tokens=told.append)
    start = rollout.calls[0].start
    assert [id for part in told for id in part.token_ids] == rollout.token_ids[start:].tolist()
    assert [v for part in told for v in part.versions] == rollout.versions[start:].tolist()
    assert told[-1].finish_reason is rollout.finish_reason and told[0].finish_reason is None


async def test_a_stream_is_the_same_call_and_closing_it_cancels(bench: Bench):
    whole = await bench.engine.generate(prompt(), Sampling(max_tokens=6, seed=2))
    parts = [part async for part in bench.engine.stream(prompt(), Sampling(max_tokens=6, seed=2))]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids[6:].tolist()
    assert parts[-1].finish_reason is FinishReason.LENGTH and parts[0].finish_reason is None
    stream = bench.engine.stream(prompt(), Sampling(max_tokens=60))
    await anext(stream)
    assert (await bench.engine.state()).running == 1
    await stream.aclose()
    await until(bench, lambda state: state.running == 0)


async def test_cancelling_gives_slot_and_blocks_back(bench: Bench):
    free = (await bench.engine.state()).free_blocks
    calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=60))) for i in range(7)]
    await until(bench, lambda state: (state.running, state.waiting) == (4, 3))
    for call in calls:
        call.cancel()
    await until(bench, lambda state: (state.running, state.waiting, state.free_blocks) == (0, 0, free))


async def test_a_prompt_without_room_is_refused_and_a_long_one_ends_at_the_context(bench: Bench):
    with pytest.raises(PromptTooLong, match=str(CONTEXT)):
        await bench.engine.generate(prompt(length=CONTEXT), Sampling())
    after = await bench.engine.generate(prompt(length=CONTEXT - 2), Sampling(max_tokens=50))
    assert len(after) == CONTEXT and after.finish_reason is FinishReason.LENGTH


async def test_keep_stamps_each_token_with_the_version_that_drew_it(bench: Bench):
    call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=230, min_tokens=230, seed=4)))
    for version in (1, 2):
        await drawn(bench, 8)
        bench.nudge()
        await bench.publish(version)
    after = await call
    versions = after.versions[after.is_sampled]
    assert set(versions.tolist()) == {0, 1, 2} and (np.diff(versions) >= 0).all() and len(after.calls) == 1


async def test_abort_ends_where_it_is_and_generating_again_resumes(bench: Bench):
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


async def test_an_aborted_stream_ends(bench: Bench):
    stream = bench.engine.stream(prompt(), Sampling(max_tokens=60))
    await anext(stream)
    await bench.publish(1, interrupt=Interrupt.ABORT)
    parts = [part async for part in stream]
    assert parts[-1].finish_reason is FinishReason.ABORT


async def test_a_greedy_rollout_can_be_scored_and_an_empty_one_is_refused(bench: Bench):
    rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=5, temperature=0))
    assert np.isfinite((await bench.engine.score([rollout]))[0]).all()
    with pytest.raises(UnusablePrompt, match="empty"):
        await bench.engine.generate(prompt(length=0), Sampling())


async def test_drain_finishes_what_is_in_flight_on_the_old_version(bench: Bench):
    calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=40))) for i in range(6)]
    await drawn(bench, 8)
    bench.nudge()
    await bench.publish(1, interrupt=Interrupt.DRAIN)
    versions = [set(rollout.versions[rollout.is_sampled].tolist()) for rollout in await asyncio.gather(*calls)]
    assert sorted(map(tuple, versions)) == [(0,)] * 4 + [(1,)] * 2


async def test_a_paused_engine_can_still_be_drained(bench: Bench):
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


async def test_new_weights_are_really_used(bench: Bench):
    rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=10))
    before = (await bench.engine.score([rollout]))[0]
    bench.nudge()
    await bench.publish(1)
    after = (await bench.engine.score([rollout]))[0]
    assert np.abs(after - before).max() > 1e-2
    assert (await bench.engine.state()).version == 1


@pytest.mark.parametrize("fault", ["dropped", "flipped", "renamed", "reshaped"])
async def test_a_faulty_update_is_refused_and_the_old_version_stays(bench: Bench, fault):
    rollout = await bench.engine.generate(prompt(), Sampling(max_tokens=10))
    before = (await bench.engine.score([rollout]))[0]
    bench.nudge()
    tensors = list(named_tensors(bench.model))
    name, tensor = tensors[3]
    if fault == "dropped":
        del tensors[3]
    elif fault == "renamed":
        tensors[3] = (name + "x", tensor)
    elif fault == "reshaped":
        tensors[3] = (name, tensor[:-1])
    update = bench.sync.offer(1, tensors)
    if fault == "flipped":
        parcel_of(bench.sync, update)[5] ^= 1
    with pytest.raises(RuntimeError, match="version 1"):
        await bench.engine.load(update)
    bench.sync.abort(update)
    assert (await bench.engine.state()).version == 0
    assert np.array_equal((await bench.engine.score([rollout]))[0], before)
    with pytest.raises(SyncError, match="not on offer" if fault == "flipped" else "version 1"):
        await bench.engine.load(update)


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "by load"])
async def test_retract_goes_on_inside_the_call_over_keys_of_the_new_weights(bench: Bench, is_paused):
    """More calls than slots, so that some wait meanwhile. Kept, the same swap would show: their later logprobs are not those
    of a fresh pass, or the test would prove nothing."""

    async def furthest(bench: Bench, version: int, interrupt: Interrupt) -> float:
        """How far logprobs drawn after the swap are from a fresh pass under the new weights."""
        sampling = [Sampling(max_tokens=60, seed=seed) for seed in range(6)]
        prompts = [prompt(f"r{index}", seed=index, length=4 + 3 * index) for index in range(6)]
        calls = [asyncio.ensure_future(bench.engine.generate(*each)) for each in zip(prompts, sampling, strict=True)]
        await drawn(bench, 40)
        bench.nudge()
        await bench.publish(version, interrupt=interrupt, is_paused=is_paused)
        rollouts = await asyncio.gather(*calls)
        distance, num_spanning = 0.0, 0
        for rollout, fresh in zip(rollouts, await bench.engine.score(rollouts), strict=True):
            versions = rollout.versions[rollout.is_sampled]
            assert len(rollout.calls) == 1 and rollout.num_sampled == 60 and rollout.finish_reason is FinishReason.LENGTH
            assert set(versions.tolist()) <= {version - 1, version} and (np.diff(versions) >= 0).all()
            num_spanning += len(set(versions.tolist())) == 2
            late = rollout.versions == version
            distance = max(distance, float(np.abs(fresh[late] - rollout.logprobs[late]).max()))
        assert num_spanning >= 1
        return distance

    assert await furthest(bench, 1, Interrupt.KEEP) > 1e-3
    assert await furthest(bench, 2, Interrupt.RETRACT) < 1e-5


async def test_retracted_calls_do_not_wait_for_ever_when_the_engine_stays_paused(bench: Bench):
    free = (await bench.engine.state()).free_blocks
    call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=80, seed=4)))
    await drawn(bench, 4)
    await bench.engine.pause(Interrupt.RETRACT)
    state = await until(bench, lambda state: state.running == 0)
    assert (state.waiting, state.free_blocks) == (1, free) and not call.done()
    await bench.engine.resume()
    alone = await bench.engine.generate(prompt(), Sampling(max_tokens=80, seed=4))
    assert np.array_equal((await call).token_ids, alone.token_ids)


# Stop strings; the tiny model's tokens are single characters, so that a string of several spans several tokens


async def test_a_stop_string_ends_a_call_at_the_token_that_completes_it(bench: Bench, tiny_model):
    plain = Sampling(max_tokens=40, top_k=40, seed=6)
    free = await bench.engine.generate(prompt(), plain)
    ids = free.token_ids[6:].tolist()
    decode = decoder_of(load_tokenizer(tiny_model))
    stop = decode(ids[17:20])
    end = next(end for end in range(1, 41) if decode(ids[:end]).endswith(stop))
    asked = [
        dataclasses.replace(plain, stop=(stop,)),
        dataclasses.replace(plain, stop=("never drawn so", stop, decode(ids[25:28]))),
    ]
    for each in await asyncio.gather(*(bench.engine.generate(prompt(), sampling) for sampling in asked)):
        assert each.finish_reason is FinishReason.STOP and each.num_sampled == end
        assert np.array_equal(each.token_ids, free.token_ids[: 6 + end])
        np.testing.assert_allclose(each.logprobs, free.logprobs[: 6 + end], atol=1e-5)
        assert each.sampling_mask is not None and len(each.sampling_mask.offsets) == len(each) + 1
    parts = [part async for part in bench.engine.stream(prompt(), asked[0])]
    assert [token for part in parts for token in part.token_ids] == ids[:end]
    assert parts[-1].finish_reason is FinishReason.STOP
    await until(bench, lambda state: (state.running, state.waiting) == (0, 0))


async def test_a_stop_string_in_the_prompt_or_within_min_tokens_does_not_end_a_call(bench: Bench, tiny_model):
    """It does not count later either: not while it is still in the text that is looked at."""
    plain = Sampling(max_tokens=40, seed=6)
    free = await bench.engine.generate(prompt(), plain)
    ids = free.token_ids[6:].tolist()
    decode = decoder_of(load_tokenizer(tiny_model))
    texts = {end: decode(ids[end - 3 : end]) for end in range(5, 20)}
    end = next(end for end, text in texts.items() if len(text) == 3 and decode(ids).count(text) == 1)  # no special token
    stop = texts[end]
    for min_tokens in (end - 1, end, end + 2):
        rollout = await bench.engine.generate(prompt(), dataclasses.replace(plain, stop=(stop,), min_tokens=min_tokens))
        assert rollout.num_sampled == (end if min_tokens < end else 40), min_tokens
        assert np.array_equal(rollout.token_ids, free.token_ids[: len(rollout)])
    again = Rollout.from_prompt(free.token_ids[: 6 + end], id="again")
    assert (await bench.engine.generate(again, dataclasses.replace(plain, stop=(stop,), max_tokens=30))).num_sampled == 30


async def test_a_stop_string_is_found_across_an_interruption(bench: Bench, tiny_model):
    """Half of it was drawn before the call was aborted, half after it was resumed."""
    plain = Sampling(max_tokens=40, temperature=0)  # drawn alike wherever it is gone on with
    free = await bench.engine.generate(prompt(seed=3), plain)
    ids = free.token_ids[6:].tolist()
    decode = decoder_of(load_tokenizer(tiny_model))
    stop = decode(ids[5:9])
    assert stop not in decode(ids[:8]), "another prompt, please"
    partial = free.forked(6 + 7, id="resumed")
    assert partial.finish_reason is FinishReason.ABORT
    whole = await bench.engine.generate(partial, dataclasses.replace(plain, stop=(stop,), max_tokens=33))
    assert whole.finish_reason is FinishReason.STOP and np.array_equal(whole.token_ids, free.token_ids[: 6 + 9])


async def test_stop_strings_are_refused_without_a_tokenizer(opened):
    async with opened(has_tokenizer=False) as bench:
        with pytest.raises(UnusablePrompt, match="no tokenizer"):
            await bench.engine.generate(prompt(), Sampling(max_tokens=4, stop=("x",)))
        assert (await bench.engine.generate(prompt(), Sampling(max_tokens=4))).num_sampled == 4


# What is not a number, and what is not a token


def spoil(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(tensor for name, tensor in named_tensors(model) if "down_proj" in name)[0, 0] = float("nan")


@ours
async def test_weights_that_are_not_numbers_fail_what_runs_and_good_ones_serve_again(bench: Bench):
    """A vLLM server must be started anew for that: tests/engine/test_vllm_faults.py."""
    free = (await bench.engine.state()).free_blocks
    sampling = Sampling(max_tokens=20, seed=2)
    expected = await bench.engine.generate(prompt("good"), sampling)
    await until(bench, lambda state: state.running == 0)
    await bench.engine.pause(Interrupt.KEEP)
    await bench.spoil()
    calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"bad {i}", seed=i), sampling)) for i in range(6)]
    await bench.engine.resume()
    for index, error in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        assert isinstance(error, NotFinite) and f"'bad {index}'" in str(error)
    with pytest.raises(NotFinite, match="'streamed'"):
        _ = [part async for part in bench.engine.stream(prompt("streamed"), sampling)]
    await until(bench, lambda state: (state.running, state.waiting, state.free_blocks) == (0, 0, free))
    await bench.publish(1)
    again = await bench.engine.generate(prompt("good"), sampling)
    assert np.array_equal(again.token_ids, expected.token_ids) and (again.versions[again.is_sampled] == 1).all()


async def test_an_update_that_holds_nan_is_refused_and_the_old_weights_serve(bench: Bench):
    expected = await bench.engine.generate(prompt(), Sampling(max_tokens=10, seed=2))
    update = bench.sync.offer(1, named_tensors(bench.model))
    spoil(bench.model)
    with pytest.raises(SyncError, match="NaN or infinity; such weights are not published"):
        bench.sync.offer(1, named_tensors(bench.model))
    spoiled = make_manifest(named_tensors(bench.model))
    image = Arena(lay_out(spoiled), device=torch.device("cpu"), allocate=lambda *_: parcel_of(bench.sync, update))
    for name, tensor in named_tensors(bench.model):
        image.views[name].copy_(tensor)
    update = dataclasses.replace(update, manifest=spoiled)  # by a sender that does not look
    with pytest.raises(RuntimeError, match=r"version 1.*NaN"):
        await bench.engine.load(update)
    bench.sync.abort(update)
    again = await bench.engine.generate(prompt(), Sampling(max_tokens=10, seed=2))
    assert np.array_equal(again.token_ids, expected.token_ids) and (again.versions[again.is_sampled] == 0).all()


async def test_a_token_outside_the_vocabulary_is_refused(bench: Bench):
    vocabulary = bench.vocabulary
    for token in (vocabulary, 2**31 - 1):
        with pytest.raises(UnusablePrompt, match=f"holds token {token}; the vocabulary has {vocabulary}"):
            await bench.engine.generate(Rollout.from_prompt([7, token, 8], id="odd"), Sampling(max_tokens=4))
    last = Rollout.from_prompt([7, vocabulary - 1, 8], id="even")
    assert (await bench.engine.generate(last, Sampling(max_tokens=4))).num_sampled == 4


# Forks and sleep, of engines in this process


def count_prompt_rows(core: EngineCore) -> list[int]:
    """Filled with the prompt tokens that each step computes from now on."""
    rows: list[int] = []
    step = core.step

    def counted() -> StepPlan:
        done = step()
        rows.append(done.prompt_rows)
        return done

    core.step = counted  # type: ignore[method-assign]  # a look from outside at one engine's own steps
    return rows


@here
@pytest.mark.parametrize("at", [7, 16, 29, 36])
async def test_a_fork_of_a_finished_rollout_is_the_same_prefix_without_its_computation(bench: Bench, at):
    assert isinstance(bench.engine, NativeEngine)
    free = (await bench.engine.state()).free_blocks
    parent = await bench.engine.generate(prompt("parent"), Sampling(max_tokens=30, seed=1))
    rows = count_prompt_rows(bench.core)
    child = parent.forked(at, id="child")
    assert child.parent == ("parent", at)
    forked = await bench.engine.generate(child, Sampling(max_tokens=20, seed=8))
    assert sum(rows) == 1
    await until(bench, lambda state: (state.running, state.free_blocks) == (0, free))
    bench.core.forget_kept()
    bench.core.scheduler.pool.forget_prefixes()
    rows.clear()
    fresh = await bench.engine.generate(Rollout.from_prompt(parent.token_ids[:at], id="f"), Sampling(max_tokens=20, seed=8))
    assert sum(rows) == at and np.array_equal(forked.token_ids, fresh.token_ids)
    np.testing.assert_allclose(forked.logprobs[at:], fresh.logprobs[at:], atol=1e-5)
    assert np.array_equal(forked.logprobs[:at], parent.logprobs[:at])


@here
async def test_a_fork_goes_on_over_kept_keys_after_a_swap_as_long_as_they_are_kept(bench: Bench):
    assert isinstance(bench.engine, NativeEngine)
    parent = await bench.engine.generate(prompt("parent"), Sampling(max_tokens=30, seed=1))
    bench.nudge()
    await bench.publish(1)
    rows = count_prompt_rows(bench.core)
    first = parent.forked(20, id="first")
    over_old_keys = await bench.engine.generate(first, Sampling(max_tokens=10, seed=8))
    assert sum(rows) == 1 and (over_old_keys.versions[20:] == 1).all() and (over_old_keys.versions[6:20] == 0).all()
    fresh = (await bench.engine.score([over_old_keys]))[0]
    assert np.abs(fresh[20:] - over_old_keys.logprobs[20:]).max() > 1e-3
    bench.core.forget_kept()
    rows.clear()
    second = await bench.engine.generate(parent.forked(20, id="second"), Sampling(max_tokens=10, seed=8))
    assert sum(rows) == 20
    np.testing.assert_allclose((await bench.engine.score([second]))[0][20:], second.logprobs[20:], atol=1e-5)


@here
@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("interrupt", [each for each in Interrupt if each is not Interrupt.LEASE])
async def test_between_two_turns_an_update_does_what_the_interrupt_says(bench: Bench, interrupt, is_paused):
    """`keep` continues over the older KV cache, as a running rollout does; any other computes it again."""
    first = await bench.engine.generate(prompt("r"), Sampling(max_tokens=30, seed=1))
    bench.nudge()
    await bench.publish(1, interrupt=interrupt, is_paused=is_paused)
    rows = count_prompt_rows(bench.core)
    second = await bench.engine.generate(first.append([7, 8, 9]), Sampling(max_tokens=10, seed=8))
    start = len(first) + 3
    assert (second.versions[start:] == 1).all() and (second.versions[6 : len(first)] == 0).all()
    fresh = (await bench.engine.score([second]))[0]
    if interrupt is Interrupt.KEEP:
        assert sum(rows) == 1 + 3 and np.abs(fresh[start:] - second.logprobs[start:]).max() > 1e-3
    else:
        assert sum(rows) == start
        np.testing.assert_allclose(fresh[start:], second.logprobs[start:], atol=1e-5)


@here
@pytest.mark.parametrize("weights", [False, True], ids=["cache", "weights too"])
async def test_a_sleeping_engine_gives_memory_back_and_goes_on_where_it_was(bench: Bench, weights):
    engine, storage = bench.engine, bench.core.cache.memory.tensor.untyped_storage()
    assert isinstance(engine, NativeEngine)
    size = storage.size()
    asked = [(prompt(f"r{i}", seed=i), Sampling(max_tokens=50, seed=i)) for i in range(6)]
    expected = await asyncio.gather(*(engine.generate(*each) for each in asked))
    calls = [asyncio.ensure_future(engine.generate(*each)) for each in asked[:5]]
    await drawn(bench, 20)
    await engine.sleep(weights=weights)
    await engine.sleep(weights=weights)
    assert size > 0 and storage.size() == 0
    calls.append(asyncio.ensure_future(engine.generate(*asked[5])))
    state = await until(bench, lambda state: state.waiting == 6)
    assert (state.running, state.version, state.slots) == (0, 0, 4)
    await asyncio.sleep(0.05)
    assert (await engine.state()).tokens == state.tokens and not any(call.done() for call in calls)
    await engine.wake()
    await engine.wake()
    assert storage.size() == size
    for rollout, before in zip(await asyncio.gather(*calls), expected, strict=True):
        assert np.array_equal(rollout.token_ids, before.token_ids) and len(rollout.calls) == 1
        np.testing.assert_allclose(rollout.logprobs, before.logprobs, atol=1e-5)


@here
async def test_a_sleeping_engine_takes_new_weights_and_wakes_with_them(bench: Bench):
    assert isinstance(bench.engine, NativeEngine)
    call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=60, seed=4)))
    await drawn(bench, 8)
    await bench.engine.sleep()
    bench.nudge()
    await bench.publish(1, is_paused=False)
    assert (await bench.engine.state()).version == 1 and not call.done()
    await bench.engine.wake()
    rollout = await call
    late = rollout.versions == 1
    assert set(rollout.versions[rollout.is_sampled].tolist()) == {0, 1} and len(rollout.calls) == 1
    fresh = (await bench.engine.score([rollout]))[0]
    np.testing.assert_allclose(fresh[late], rollout.logprobs[late], atol=1e-5)


@here
async def test_nothing_is_kept_in_memory_that_was_given_back(bench: Bench):
    assert isinstance(bench.engine, NativeEngine)
    parent = await bench.engine.generate(prompt("parent"), Sampling(max_tokens=30, seed=1))
    await bench.engine.sleep()
    await bench.engine.wake()
    rows = count_prompt_rows(bench.core)
    forked = await bench.engine.generate(parent.forked(20, id="child"), Sampling(max_tokens=10, seed=8))
    assert sum(rows) == 20
    np.testing.assert_allclose((await bench.engine.score([forked]))[0][20:], forked.logprobs[20:], atol=1e-5)


@here
async def test_a_sleeping_engine_cannot_drain_and_says_so(bench: Bench):
    assert isinstance(bench.engine, NativeEngine)
    await bench.engine.sleep()
    await bench.engine.pause(Interrupt.DRAIN)
    await bench.engine.resume()
    await bench.engine.wake()
    call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=60, seed=4)))
    await drawn(bench, 8)
    await bench.engine.sleep()
    with pytest.raises(EngineAsleep, match="engine-0 sleeps with 1 rollouts in flight; wake it"):
        await bench.engine.pause(Interrupt.DRAIN)
    await bench.engine.wake()
    assert (await call).num_sampled == 60, "it goes on as if it had not been asked"


@here
@pytest.mark.parametrize("interrupt", [Interrupt.DRAIN, Interrupt.ABORT])
async def test_a_paused_engine_does_with_what_is_in_flight_as_the_update_says(bench: Bench, interrupt):
    call = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=60, seed=4)))
    await drawn(bench, 8)
    await bench.engine.pause(Interrupt.KEEP)
    bench.nudge()
    await bench.publish(1, interrupt=interrupt, is_paused=False)
    rollout = await call
    assert set(rollout.versions[rollout.is_sampled].tolist()) == {0}
    assert rollout.finish_reason is (FinishReason.ABORT if interrupt is Interrupt.ABORT else FinishReason.LENGTH)
    late = asyncio.ensure_future(bench.engine.generate(prompt(), Sampling(max_tokens=3)))
    await asyncio.sleep(0.05)
    assert not late.done(), "it stays paused"
    await bench.engine.resume()
    assert set((await late).versions[6:].tolist()) == {1}


@here
async def test_what_is_in_flight_can_be_looked_at(bench: Bench):
    asked = [(prompt(f"r{i}", seed=i), Sampling(max_tokens=50, seed=i)) for i in range(5)]
    expected = await asyncio.gather(*(bench.engine.generate(*each) for each in asked))
    calls = [asyncio.ensure_future(bench.engine.generate(*each)) for each in asked]
    await drawn(bench, 20)
    for _ in range(2):
        found = {each.rollout.id: each for each in await bench.engine.in_flight()}
        assert found.keys() == {f"r{i}" for i in range(5)} and found["r4"].oldest is None
        assert found["r4"].partial() is found["r4"].rollout
        for before in expected[:4]:
            look = found[before.id]
            partial = look.partial()
            assert look.oldest == 0 and partial.finish_reason is FinishReason.ABORT
            assert len(look.rollout) == 6 and partial.num_sampled >= look.num_sampled > 0
            assert np.array_equal(partial.token_ids, before.token_ids[: len(partial)])
        assert isinstance(bench.engine, NativeEngine)
        await bench.engine.pause(Interrupt.RETRACT)  # retracted ones are in flight too
    await bench.engine.resume()
    for rollout, before in zip(await asyncio.gather(*calls), expected, strict=True):
        assert np.array_equal(rollout.token_ids, before.token_ids), "nothing was stopped for it"
    assert await bench.engine.in_flight() == []


@here
async def test_a_rollout_kept_into_another_life_names_the_life_it_began_in(bench: Bench):
    calls = [asyncio.ensure_future(bench.engine.generate(prompt(f"r{i}"), Sampling(max_tokens=60))) for i in range(5)]
    await drawn(bench, 8)
    bench.sync.lineage = Lineage("next")
    bench.nudge()
    await bench.publish(0)
    done = await asyncio.gather(*calls)
    assert [rollout.lineage for rollout in done] == ["life"] * 4 + ["next"]
    again = await bench.engine.generate(prompt("new"), Sampling(max_tokens=3))
    assert again.lineage == "next"
