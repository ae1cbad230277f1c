"""Engines of a pool come, share work, are brought up to date and are lost: no rollout and no version is."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from headrace.bench.loads import finished
from headrace.engine import PromptTooLong, remote_engine, worker
from headrace.engine.remote_engine import PoolRequest
from headrace.errors import SyncError
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.partial import Interrupt
from headrace.records import SAMPLED_ENTROPY, FinishReason, Rollout, Sampling, WireError, frames
from headrace.rpc import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pooled import Far, Pooled

    from headrace.records import WeightUpdate


def prompt(name: str = "r", *, length: int = 6, seed: int = 0) -> Rollout:
    return Rollout.from_prompt(np.random.default_rng(seed).integers(6, 90, size=length), id=name)


async def until(holds: Callable[[], bool]) -> None:
    """The test's own deadline ends a wait in vain."""
    while not holds():  # noqa: ASYNC110  (numbers change in other threads, and raise no event)
        await asyncio.sleep(0.001)


def slow(far: Far, seconds: float) -> None:
    step = far.core.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    far.core.step = slowly  # type: ignore[method-assign]


class Gate:
    """Holds up what an engine does in a thread, until it is opened."""

    def __init__(self, far: Far, name: str) -> None:
        self.is_reached, self._may_go = threading.Event(), threading.Event()
        inner = getattr(far.engine, name)

        def held(*arguments: Any) -> Any:
            self.is_reached.set()
            self._may_go.wait(60)
            return inner(*arguments)

        setattr(far.engine, name, held)

    async def reached(self) -> None:
        await until(self.is_reached.is_set)

    def open(self) -> None:
        self._may_go.set()


class Policy:
    """Weights that change and are published."""

    def __init__(self, bench: Pooled) -> None:
        self._bench, self._model = bench, load_model(bench.model_path)

    async def send(self, version: int) -> WeightUpdate:
        with torch.no_grad():
            for _, tensor in named_tensors(self._model):
                tensor.mul_(1.01)
        return self._bench.sync.offer(version, named_tensors(self._model))

    async def publish(self, version: int) -> None:
        await self._bench.pool.load(await self.send(version))


# Sharing work


async def test_whoever_has_room_pulls_and_a_fast_engine_does_more(bench: Pooled):
    slow(await bench.join(slots=2), 0.02)
    await bench.join(slots=2)
    done = await asyncio.gather(*(bench.pool.generate(prompt(f"r{i}"), Sampling(max_tokens=8, seed=i)) for i in range(60)))
    assert [rollout.id for rollout in done] == [f"r{i}" for i in range(60)]
    did = Counter(rollout.calls[0].engine for rollout in done)
    assert 0 < did["engine-0"] < did["engine-1"] / 1.5 and did.total() == 60


def hold(far: Far) -> threading.Event:
    """It takes no step until this is set."""
    step, may_go = far.core.step, threading.Event()

    def held() -> Any:
        may_go.wait(60)
        return step()

    far.core.step = held  # type: ignore[method-assign]
    return may_go


async def test_each_call_goes_to_the_engine_with_the_largest_share_of_its_room_left(bench: Pooled):
    fars = [await bench.join(slots=slots) for slots in (6, 2, 4)]
    await until(lambda: [far.remote.credit for far in fars] == [12, 4, 8])
    held = [hold(far) for far in fars]
    calls = []
    for index in range(12):
        calls.append(asyncio.ensure_future(bench.pool.generate(prompt(f"r{index}", seed=index), Sampling(max_tokens=9))))
        await until(lambda: sum(len(far.requests) for far in fars) == len(calls))
        if index == 5:
            assert [len(far.requests) for far in fars] == [3, 1, 2]
    assert [len(far.requests) for far in fars] == [6, 2, 4]
    at_once = [bench.pool.generate(prompt(f"s{index}", seed=index), Sampling(max_tokens=9)) for index in range(12)]
    calls += map(asyncio.ensure_future, at_once)
    await until(lambda: sum(len(far.requests) for far in fars) == len(calls))
    assert [len(far.requests) for far in fars] == [12, 4, 8]
    for each in held:
        each.set()
    await asyncio.gather(*calls)


async def test_siblings_go_to_one_engine_while_it_has_free_slots(bench: Pooled):
    fars = [await bench.join(slots=8) for _ in range(3)]
    await until(lambda: all(far.remote.credit == 16 for far in fars))
    held = [hold(far) for far in fars]

    def group(name: str, count: int, *, start: int = 0) -> list[asyncio.Future[Rollout]]:
        tokens = prompt(seed=int(name)).token_ids
        each = [Rollout.from_prompt(tokens, id=f"{name}/{start + index}", group=name) for index in range(count)]
        return [asyncio.ensure_future(bench.pool.generate(rollout, Sampling(max_tokens=9))) for rollout in each]

    groups = [group(str(name), 4) for name in range(5)]
    await until(lambda: sum(len(far.requests) for far in fars) == 20)
    assert sorted(len(far.requests) for far in fars) == [4, 8, 8]
    late = group("4", 6, start=4)
    await until(lambda: sum(len(far.requests) for far in fars) == 26)
    for each in held:
        each.set()
    went = [Counter(map(engine_of, await asyncio.gather(*calls))) for calls in groups]
    assert [list(each.values()) for each in went] == [[4]] * 5
    assert Counter(map(engine_of, await asyncio.gather(*late)))[next(iter(went[4]))] == 4, "until its slots are full"


async def test_an_engine_is_sent_what_it_pulled_and_no_more(bench: Pooled):
    """However calls end (finished, cancelled, refused), each gives back the one place it took."""
    far = await bench.join(slots=2)
    await until(lambda: far.remote.credit > 0)
    room, most, take = far.remote.credit, 0, far.worker._take_work

    def count(value: Any) -> None:
        nonlocal most
        take(value)
        most = max(most, len(far.worker._requests))

    far.data.notices["work"] = count
    calls = [asyncio.ensure_future(bench.pool.generate(prompt(f"r{i}"), Sampling(max_tokens=6))) for i in range(50)]
    calls += [asyncio.ensure_future(bench.pool.generate(prompt(length=96), Sampling())) for _ in range(10)]
    await until(lambda: calls[0].done())
    assert far.core.num_running <= 2 and (await bench.pool.state()).waiting > 20
    for call in calls[5:40:3]:
        call.cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    kinds = Counter(type(each).__name__ for each in ended)
    assert kinds["PromptTooLong"] == 10 and kinds["Rollout"] + kinds["CancelledError"] == 50 and kinds["Rollout"] >= 38
    await until(lambda: far.remote.credit == room)
    assert 2 < most <= room == 4
    assert not far.requests and not far.worker._requests


async def test_a_call_cancelled_as_soon_as_it_is_sent_is_not_generated(bench: Pooled):
    """Its cancellation must not overtake it."""
    far = await bench.join(slots=512)
    await until(lambda: far.remote.credit > 0)
    room = far.remote.credit
    calls = [asyncio.ensure_future(bench.pool.generate(prompt(f"r{i}"), Sampling(max_tokens=80))) for i in range(room)]
    await until(lambda: far.remote.credit == 0)
    for call in calls:
        call.cancel()
    await until(lambda: far.remote.credit == room)
    await far.engine.between_steps(lambda: None)
    assert (far.core.num_running, far.core.num_waiting) == (0, 0)
    assert far.core.num_sampled < 80 * room / 4


async def test_a_refused_stream_says_why(bench: Pooled):
    far = await bench.join()
    with pytest.raises(PromptTooLong, match="96"):
        await anext(bench.pool.stream(prompt(length=96), Sampling()))
    assert not far.requests


async def test_looking_at_an_engine_does_not_wait_behind_its_work(bench: Pooled):
    far = await bench.join(slots=2048, context=700)
    await bench.pool.pause(Interrupt.KEEP)
    await until(lambda: far.remote.credit > 0)
    rollouts = [prompt(f"r{i}", length=600, seed=i) for i in range(far.remote.credit)]
    sent = far.remote.data.stream.bytes_sent
    calls = [asyncio.ensure_future(bench.pool.generate(rollout, Sampling())) for rollout in rollouts]
    await until(lambda: far.remote.data.stream.bytes_sent > sent)
    assert far.remote.data.stream.bytes_sent - sent > 20e6 and far.remote.data.stream.backlog > 0
    state = await bench.pool.state()
    assert far.remote.data.stream.backlog > 0, "the answer came before the work was sent"
    assert state.running == 0
    for call in calls:
        call.cancel()
    await until(lambda: far.remote.credit == len(rollouts))


async def test_work_held_back_by_a_backlog_is_sent_when_the_backlog_is_gone(bench: Pooled, monkeypatch):
    """Nothing else may happen by then: an engine without work finishes none, and so pulls no more."""
    far = await bench.join()
    await until(lambda: far.remote.credit > 0)
    with monkeypatch.context() as patch:
        patch.setattr(remote_engine, "_MOST_BACKLOG", 0)  # as if it read nothing
        call = asyncio.ensure_future(bench.pool.generate(prompt(), Sampling(max_tokens=2)))
        await asyncio.sleep(0.02)
        assert bench.pool.num_waiting == 1 and not far.requests
    assert (await call).calls[0].engine == far.name


# Sizes


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 1 << 14)


@pytest.fixture
def notices(monkeypatch) -> Counter[str]:
    """How many of each were sent, by either end."""
    sent: Counter[str] = Counter()
    notify = Peer.notify
    monkeypatch.setattr(Peer, "notify", lambda self, name, value: (sent.update([name]), notify(self, name, value)))
    return sent


@pytest.mark.usefixtures("small_pieces")
async def test_work_and_results_are_cut_by_their_bytes(bench: Pooled, notices, monkeypatch):
    monkeypatch.setattr(worker, "TELL_SECONDS", 1e9)  # all is told at the end
    far = await bench.join(slots=64, context=700)
    await bench.pool.pause(Interrupt.KEEP)
    await until(lambda: far.remote.credit == 128)
    rollouts = [prompt(f"r{i}", length=400, seed=i) for i in range(60)]  # of 5.6 kB each
    calls = [asyncio.ensure_future(bench.pool.generate(each, Sampling(max_tokens=200, seed=1))) for each in rollouts]
    await until(lambda: len(far.worker._requests) == 60)
    assert notices["work"] >= 20
    await bench.pool.resume()
    await until(lambda: far.core.num_sampled > 300)
    await bench.pool.pause(Interrupt.ABORT)  # all of them end at once
    done = await asyncio.gather(*calls)
    assert [each.id for each in done] == [each.id for each in rollouts] and 2 <= notices["sampled"] <= 60
    assert all(np.array_equal(each.token_ids[:400], given.token_ids) for each, given in zip(done, rollouts, strict=True))
    assert not far.worker._requests and not far.requests
    await until(lambda: far.remote.credit == 128)


@pytest.mark.usefixtures("small_pieces")
async def test_one_rollout_may_be_longer_than_a_piece(bench: Pooled):
    await bench.join(slots=2, context=4096)
    given = prompt(length=4000)
    done = await bench.pool.generate(given, Sampling(max_tokens=8))
    assert done.num_sampled == 8 and np.array_equal(done.token_ids[:4000], given.token_ids)


async def test_work_that_cannot_be_sent_fails_alone(bench: Pooled):
    far = await bench.join()
    await until(lambda: far.remote.credit == 8)
    names = ["a", "half of a character \ud800", "b"]
    requests = [bench.pool.generate(prompt().replace(id=name), Sampling(max_tokens=3)) for name in names]
    first, failed, last = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(failed, WireError) and first.num_sampled == last.num_sampled == 3
    assert not far.requests
    await until(lambda: far.remote.credit == 8)


async def test_results_that_cannot_be_sent_are_not_forgotten_and_end_the_engine(bench: Pooled, monkeypatch):
    """As child processes do, the test loses the engine when its worker has failed."""

    def raise_wire_error(_: object, *, policy: str) -> None:
        raise WireError("too odd")

    far = await bench.join()
    refuse = pytest.MonkeyPatch()
    refuse.setattr(worker, "pack_sampled", raise_wire_error)
    call = asyncio.ensure_future(bench.pool.generate(prompt(), Sampling(max_tokens=3, seed=1)))
    with pytest.raises(WireError, match="too odd"):
        await far.worker.failed
    refuse.undo()
    assert len(far.worker._requests) == len(far.requests) == 1 and not call.done()
    far.kill()
    await bench.join()
    assert (await call).num_sampled == 3


# Losing an engine


async def test_a_lost_engines_rollouts_go_on_from_what_it_told(bench: Pooled, monkeypatch):
    monkeypatch.setattr(worker, "TELL_SECONDS", 0.02)
    bench.record_entropy = True
    policy, first = Policy(bench), await bench.join(slots=2)
    await policy.publish(3)
    requests = [(prompt(f"r{i}", seed=i), Sampling(max_tokens=60, top_k=20, seed=i)) for i in range(4)]
    whole = [await bench.pool.generate(*request) for request in requests[:2]]
    slow(first, 0.004)
    calls = [asyncio.ensure_future(bench.pool.generate(*request)) for request in requests]
    await until(lambda: sum(request.num_known > 1 for request in first.requests) == 2)
    told = [request.num_known for request in first.requests][:2]
    second = await bench.join(slots=2)
    assert not second.requests
    order: list[str] = []
    submit = second.core.submit
    monkeypatch.setattr(second.core, "submit", lambda request: (order.append(request.rollout.id), submit(request)))
    first.kill()
    for partial, uncut, length in zip(await asyncio.gather(*calls[:2]), whole, told, strict=True):
        assert partial.finish_reason is FinishReason.ABORT and length <= partial.num_sampled < 60
        stop = len(partial)
        assert np.array_equal(partial.token_ids, uncut.token_ids[:stop])
        np.testing.assert_allclose(partial.logprobs, uncut.logprobs[:stop], atol=1e-5)
        assert np.array_equal(partial.versions, uncut.versions[:stop]) and set(partial.versions[6:]) == {3}
        assert (partial.policy, partial.lineage) == (uncut.policy, "life")
        assert all(np.array_equal(partial.sampling_mask.row(i), uncut.sampling_mask.row(i)) for i in range(stop))
        entropies = uncut.columns[SAMPLED_ENTROPY]
        assert not entropies[:6].any() and (entropies[6:] > 1).all()
        np.testing.assert_allclose(partial.columns[SAMPLED_ENTROPY], entropies[:stop], atol=1e-5)
        call = partial.calls[0]
        assert (call.start, call.stop, call.engine, call.finish_reason) == (6, stop, "engine-0", FinishReason.ABORT)
        resumed = await bench.pool.generate(partial, Sampling(max_tokens=66 - stop, top_k=20, seed=call.sampling.seed))
        assert np.array_equal(resumed.token_ids, uncut.token_ids) and resumed.calls[1].engine == "engine-1"
        np.testing.assert_allclose(resumed.columns[SAMPLED_ENTROPY], entropies, atol=1e-5)
    for again in await asyncio.gather(*calls[2:]):
        assert again.finish_reason is FinishReason.LENGTH and again.num_sampled == 60 and len(again.calls) == 1
    assert [name for name in order if name not in ("r0", "r1")] == ["r2", "r3"]


async def test_a_call_is_reported_when_it_has_grown_by_an_eighth_and_a_stream_after_every_step(bench: Pooled, monkeypatch):
    monkeypatch.setattr(worker, "TELL_SECONDS", 0.0)
    reported: dict[str, list[tuple[int, int]]] = {"whole": [], "stream": []}
    add = PoolRequest.add

    def recorded(self: PoolRequest, new: Any, *more: Any) -> None:
        reported[self.rollout.id].append((self.num_known, len(new)))
        add(self, new, *more)

    monkeypatch.setattr(PoolRequest, "add", recorded)
    await bench.join(slots=2)
    streamed = [0]
    calls = [
        bench.pool.generate(prompt("whole", seed=1), Sampling(max_tokens=80, seed=1)),
        bench.pool.generate(prompt("stream", seed=2), Sampling(max_tokens=80, seed=2), on_tokens=streamed.append),
    ]
    whole, stream = await asyncio.gather(*calls)
    assert whole.num_sampled == stream.num_sampled == 80
    *grown, _ = reported["whole"]  # the last came with the end
    few = [(known, new) for known, new in grown if new <= known / 8]
    assert 1 <= len(few) <= 8 and len(grown) <= 32, "and every tenth time whatever has grown"
    assert all(new <= max(2, known / 8 + 2) for known, new in grown), "and as soon as it has"
    assert len(reported["stream"]) >= 70


async def test_an_engine_that_leaves_finishes_its_calls_and_gets_no_others(bench: Pooled):
    first, second = await bench.join(slots=2), await bench.join(slots=2)
    for far in (first, second):
        slow(far, 0.01)
    await until(lambda: first.remote.credit > 0 and second.remote.credit > 0)
    begun = [asyncio.ensure_future(bench.pool.generate(prompt(f"a{i}", seed=i), Sampling(max_tokens=20))) for i in range(4)]
    await until(lambda: first.requests and second.requests)
    leaving = asyncio.ensure_future(bench.pool.drain(first.remote, seconds=60))
    await asyncio.sleep(0)
    more = [asyncio.ensure_future(bench.pool.generate(prompt(f"b{i}", seed=i), Sampling(max_tokens=4))) for i in range(4)]
    ended = await asyncio.gather(*begun, *more)
    await leaving
    assert {rollout.finish_reason for rollout in ended} == {FinishReason.LENGTH}
    assert {rollout.calls[-1].engine for rollout in ended[4:]} == {"engine-1"}
    assert bench.pool.engines == [second.remote]


async def test_an_engine_that_takes_too_long_to_leave_hands_its_calls_over(bench: Pooled, monkeypatch):
    monkeypatch.setattr(worker, "TELL_SECONDS", 0.02)
    first = await bench.join(slots=2)
    slow(first, 0.02)
    call = asyncio.ensure_future(bench.pool.generate(prompt("r", seed=1), Sampling(max_tokens=60)))
    await until(lambda: any(request.num_known > 1 for request in first.requests))
    await bench.pool.drain(first.remote, seconds=0.1)
    assert (await call).finish_reason is FinishReason.ABORT and not bench.pool.engines


async def test_a_lost_engines_streams_end(bench: Pooled):
    far = await bench.join()
    slow(far, 0.002)
    parts = []
    async for part in bench.pool.stream(prompt(), Sampling(max_tokens=80, seed=1)):
        parts.append(part)
        if len(parts) == 5:
            far.kill()
    assert parts[-1].finish_reason is FinishReason.ABORT and not any(part.finish_reason for part in parts[:-1])
    await bench.join()
    whole = await bench.pool.generate(prompt(), Sampling(max_tokens=80, seed=1))
    tokens = [token for part in parts for token in part.token_ids]
    assert 5 <= len(tokens) < 80 and tokens == whole.token_ids[6 : 6 + len(tokens)].tolist()


async def test_work_waits_where_there_is_no_engine(bench: Pooled):
    call = asyncio.ensure_future(bench.pool.generate(prompt(), Sampling(max_tokens=4)))
    gone = asyncio.ensure_future(bench.pool.generate(prompt("gone"), Sampling(max_tokens=4)))
    await asyncio.sleep(0.01)
    assert (await bench.pool.state()).waiting == 2
    gone.cancel()
    await asyncio.sleep(0)
    far = await bench.join()
    assert (await call).num_sampled == 4 and far.core.num_sampled == 4


async def test_scoring_is_tried_again_elsewhere(bench: Pooled):
    first, second = await bench.join(), await bench.join()
    rollouts = [await bench.pool.generate(prompt(), Sampling(max_tokens=9))]
    expected = await second.engine.score(rollouts)
    gate = Gate(first, "_score")
    call = asyncio.ensure_future(bench.pool.score(rollouts))
    await gate.reached()
    first.ends["control"]._writer.transport.abort()
    assert np.array_equal((await call)[0], expected[0])
    gate.open()
    assert bench.pool.engines == [second.remote]


async def test_a_report_read_after_its_engine_was_lost_is_not_counted_again(bench: Pooled):
    far = await bench.join()
    report = far.remote.notices()["report"]
    report({"totals": {}})
    bench.pool.lose(far.remote)
    report({"totals": {}})
    assert far.reports == [{"totals": {}}]


# The front of the line


def aborted(name: str, *, seed: int) -> Rollout:
    return finished(prompt(name, seed=seed), np.array([9]), version=2, lineage="life", reason=FinishReason.ABORT)


async def test_interrupted_rollouts_go_first_in_the_order_they_come(bench: Pooled):
    names = ["new-0", "old-0", "old-1", "new-1", "old-2", "old-3"]
    rollouts = [aborted(n, seed=i) if n.startswith("old") else prompt(n, seed=i) for i, n in enumerate(names)]
    calls = [asyncio.ensure_future(bench.pool.generate(rollout, Sampling(max_tokens=4))) for rollout in rollouts]
    await asyncio.sleep(0)
    assert (await bench.pool.state()).waiting == 6
    far = await bench.start(slots=2, context=96)
    order: list[str] = []
    submit = far.core.submit
    far.core.submit = lambda request: (order.append(request.rollout.id), submit(request))  # type: ignore[method-assign]
    await bench.pool.join(far.remote)
    await asyncio.gather(*calls)
    assert order == ["old-0", "old-1", "old-2", "old-3", "new-0", "new-1"]


async def test_at_a_swap_with_abort_nothing_new_takes_the_slots_of_those_interrupted(bench: Pooled):
    """They go to the launcher and back; what the engine has waiting would begin meanwhile."""

    async def resumed(bench: Pooled, rollout: Rollout) -> Rollout:
        rollout = await bench.pool.generate(rollout, Sampling(max_tokens=60))
        while rollout.finish_reason is FinishReason.ABORT:
            rollout = await bench.pool.generate(rollout, Sampling(max_tokens=66 - len(rollout)))
        return rollout

    policy, far = Policy(bench), await bench.join(slots=2)
    await policy.publish(0)
    slow(far, 0.004)
    calls = [asyncio.ensure_future(resumed(bench, prompt(f"r{i}", seed=i))) for i in range(4)]
    await until(lambda: far.core.num_sampled > 10 and far.core.num_waiting == 2)
    assert {request.rollout.id for request in far.core.scheduler.running.values()} == {"r0", "r1"}
    await bench.pool.load(await policy.send(1), interrupt=Interrupt.ABORT)
    await until(lambda: far.core.num_running == 2)
    assert {request.rollout.id for request in far.core.scheduler.running.values()} == {"r0", "r1"}
    done = await asyncio.gather(*calls)
    assert [len(rollout.calls) for rollout in done] == [2, 2, 1, 1] and all(len(rollout) == 66 for rollout in done)


async def test_the_pool_knows_what_is_in_flight_as_far_as_it_was_told(bench: Pooled, monkeypatch):
    monkeypatch.setattr(worker, "TELL_SECONDS", 0.02)
    waiting = asyncio.ensure_future(bench.pool.generate(aborted("old", seed=9), Sampling(max_tokens=60)))
    await asyncio.sleep(0)
    only = (await bench.pool.in_flight())[0]
    assert (only.rollout.id, only.num_sampled, only.oldest) == ("old", 0, 2) and only.partial() is only.rollout
    policy, far = Policy(bench), await bench.join(slots=3)
    slow(far, 0.004)
    await policy.publish(3)
    calls = [asyncio.ensure_future(bench.pool.generate(prompt(f"r{i}", seed=i), Sampling(max_tokens=60))) for i in range(4)]
    await until(lambda: sum(request.num_known > 1 for request in far.requests) == 3)
    found = {call.rollout.id: call for call in await bench.pool.in_flight()}
    assert found.keys() == {"old", "r0", "r1", "r2", "r3"}
    assert (found["old"].oldest, found["r0"].oldest, found["r3"].oldest) == (2, 3, None)
    partial = found["r0"].partial()
    assert partial.finish_reason is FinishReason.ABORT and partial.num_sampled >= found["r0"].num_sampled > 0
    assert found["r3"].num_sampled == 0 and found["r3"].partial() is found["r3"].rollout
    whole = await calls[0]
    assert np.array_equal(partial.token_ids, whole.token_ids[: len(partial)])
    assert np.array_equal(partial.versions, whole.versions[: len(partial)]) and partial.lineage == "life"
    await asyncio.gather(waiting, *calls)
    assert await bench.pool.in_flight() == []


# Versions


async def test_an_update_counts_for_the_living(bench: Pooled):
    policy, first, second = Policy(bench), await bench.join(), await bench.join()
    await policy.publish(0)
    gate = Gate(second, "_stage")
    loading = asyncio.ensure_future(policy.publish(1))
    await gate.reached()
    await until(lambda: first.core.version == 1)
    await asyncio.sleep(0.02)
    assert not loading.done(), "one of two holds it"
    second.ends["control"]._writer.transport.abort()
    await loading
    gate.open()
    assert bench.pool.engines == [first.remote] and (await bench.pool.state()).version == 1


async def test_an_update_waits_for_an_engine_when_none_is_left(bench: Pooled):
    policy, only = Policy(bench), await bench.join()
    await policy.publish(0)
    gate = Gate(only, "_stage")
    loading = asyncio.ensure_future(policy.publish(1))
    await gate.reached()
    only.ends["control"]._writer.transport.abort()
    await asyncio.sleep(0.05)
    assert not bench.pool.engines and not loading.done()
    gate.open()
    successor = await bench.start(slots=4, context=96)
    await bench.pool.join(successor.remote)
    assert successor.core.version == 1
    await loading


@pytest.mark.parametrize("newest", [1, 2])
async def test_who_joins_holds_the_newest_version_first(bench: Pooled, newest):
    """Also when that changes while it reads an older one, and when what it reads is overwritten meanwhile (by the next but
    one): it never draws with anything else."""
    policy, old = Policy(bench), await bench.join()
    await policy.publish(0)
    late = await bench.start(slots=4, context=96)
    gate = Gate(late, "_stage")
    joining = asyncio.ensure_future(bench.pool.join(late.remote))
    await gate.reached()
    for version in range(1, newest + 1):
        await policy.publish(version)
    assert not joining.done() and bench.pool.engines == [old.remote]
    gate.open()
    await joining
    assert late.core.version == newest and bench.pool.engines == [old.remote, late.remote]
    drawn = await late.engine.score([prompt()])
    assert np.array_equal(drawn[0], (await old.engine.score([prompt()]))[0])


async def test_an_update_that_is_refused_is_wanted_no_more(bench: Pooled):
    policy, far = Policy(bench), await bench.join()
    await policy.publish(0)
    update = await policy.send(1)
    bench.parcel(update)[100] ^= 1
    with pytest.raises(SyncError, match=r"version 1: tensor .* differs from what was sent"):
        await bench.pool.load(update)
    bench.sync.abort(update)
    late = await bench.join()
    assert (far.core.version, late.core.version) == (0, 0) and late.remote.update is far.remote.update


# Pausing


async def test_who_joins_a_paused_pool_stands_still_with_it(bench: Pooled):
    await bench.pool.pause(Interrupt.KEEP)
    far = await bench.join()
    call = asyncio.ensure_future(bench.pool.generate(prompt(), Sampling(max_tokens=4)))
    await until(lambda: far.core.num_waiting == 1)
    await asyncio.sleep(0.03)
    assert far.core.num_sampled == 0
    await bench.pool.resume()
    assert (await call).num_sampled == 4


async def test_what_changes_while_a_joining_engine_is_paused_reaches_it_too(bench: Pooled):
    policy, _ = Policy(bench), await bench.join()
    await policy.publish(0)
    late = await bench.start(slots=4, context=96)
    pause, is_reached, may_go = late.engine.pause, asyncio.Event(), asyncio.Event()

    async def held(interrupt: Interrupt) -> None:
        await pause(interrupt)
        is_reached.set()
        await may_go.wait()

    late.engine.pause = held  # type: ignore[method-assign]
    await bench.pool.pause(Interrupt.KEEP)
    joining = asyncio.ensure_future(bench.pool.join(late.remote))
    await is_reached.wait()
    await policy.publish(1)
    await bench.pool.resume()
    may_go.set()
    await joining
    assert late.core.version == 1
    bench.pool.lose(bench.far[0].remote)
    assert (await bench.pool.generate(prompt(), Sampling(max_tokens=4))).versions[-1] == 1


# Forks of what is pinned


def count_prompt_rows(far: Far) -> list[int]:
    """Filled with the prompt tokens that each of its steps computes from now on."""
    rows: list[int] = []
    step = far.core.step

    def counted() -> Any:
        done = step()
        rows.append(done.prompt_rows)
        return done

    far.core.step = counted  # type: ignore[method-assign]
    return rows


def engine_of(rollout: Rollout) -> str:
    return rollout.calls[-1].engine


async def test_a_next_turn_and_a_fork_go_to_the_engine_that_has_their_keys(bench: Pooled):
    fars = [await bench.join(slots=2) for _ in range(3)]
    await until(lambda: all(far.remote.credit > 0 for far in fars))
    first = Sampling(max_tokens=20, seed=3)
    parents = await asyncio.gather(*(bench.pool.generate(prompt(f"r{i}", seed=i), first) for i in range(12)))
    assert len(set(map(engine_of, parents))) == 3
    await until(lambda: all(far.remote.credit == 4 for far in fars))
    rows = [count_prompt_rows(far) for far in fars]
    turns = [parent.append([7, 8, 9]) for parent in parents[:6]]
    forks = [parent.forked(11 + i, id=f"fork {i}") for i, parent in enumerate(parents[6:])]
    waiting = list(zip((*turns, *forks), parents, strict=True))
    while waiting:
        at_once = [each for far in fars for each in [(c, p) for c, p in waiting if engine_of(p) == far.name][:2]]
        waiting = [each for each in waiting if each not in at_once]
        await until(lambda: all(far.remote.credit == 4 for far in fars))  # else one without room may be relieved of calls
        done = await asyncio.gather(*(bench.pool.generate(call, Sampling(max_tokens=5)) for call, _ in at_once))
        assert list(map(engine_of, done)) == [engine_of(parent) for _, parent in at_once]
    assert bench.pool.turns == {"returned": 12}
    assert sum(map(sum, rows)) == 6 * (1 + 3) + 6, "the last token, which predicts the next, and the replies"


async def test_a_fork_at_the_first_sampled_token_goes_to_the_engine_of_its_parent(bench: Pooled):
    """As where a template drops what was thought: no call is left in the fork."""
    fars = [await bench.join(slots=2) for _ in range(3)]
    await until(lambda: all(far.remote.credit == 4 for far in fars))
    parents = await asyncio.gather(*(bench.pool.generate(prompt(f"r{i}", seed=i), Sampling(max_tokens=9)) for i in range(3)))
    assert len(set(map(engine_of, parents))) == 3
    for parent in parents:
        fork = parent.forked(6, id=f"fork of {parent.id}")
        assert not fork.calls
        await until(lambda: all(far.remote.credit == 4 for far in fars))
        assert engine_of(await bench.pool.generate(fork, Sampling(max_tokens=3))) == engine_of(parent)
    assert bench.pool.turns == {"returned": 3}


async def finished_parent(bench: Pooled) -> tuple[Rollout, Far, Far]:
    """A rollout, the engine that generated it, and another; both slow, with room for two calls each."""
    parent = await bench.pool.generate(prompt("parent"), Sampling(max_tokens=20))
    home, other = sorted(bench.far, key=lambda far: far.name != engine_of(parent))
    for far in (home, other):
        slow(far, 0.005)
        await until(lambda far=far: far.remote.credit == 2)  # type: ignore[misc]
    return parent, home, other


async def test_a_turn_waits_for_its_engine_unless_another_has_a_free_slot(bench: Pooled):
    for _ in range(2):
        await bench.join(slots=1)
    parent, home, other = await finished_parent(bench)

    def go_on(name: str, *, tokens: int) -> asyncio.Future[Rollout]:
        return asyncio.ensure_future(bench.pool.generate(parent.forked(9, id=name), Sampling(max_tokens=tokens)))

    home.remote.is_behind = True
    new = asyncio.ensure_future(bench.pool.generate(prompt("new"), Sampling(max_tokens=80)))
    await until(lambda: other.remote.credit == 1)
    home.remote.is_behind = False
    busy = [go_on(f"busy {index}", tokens=40) for index in range(2)]
    await until(lambda: home.remote.credit == 0)
    waiting, unwanted = go_on("waiting", tokens=3), go_on("unwanted", tokens=3)
    await asyncio.sleep(0.02)
    assert bench.pool.num_waiting == 2 and other.remote.credit == 1, "it has room for one more, and no free slot"
    unwanted.cancel()
    await asyncio.sleep(0)
    assert bench.pool.num_waiting == 1
    assert engine_of(await waiting) == home.name
    assert [engine_of(each) for each in await asyncio.gather(*busy)] == [home.name] * 2
    await new
    await until(lambda: home.remote.credit == other.remote.credit == 2)
    before = bench.pool.turns["moved"]
    calls = [go_on(f"many {index}", tokens=40) for index in range(4)]
    went = Counter(map(engine_of, await asyncio.gather(*calls)))
    assert went[other.name] >= 1 and bench.pool.turns["moved"] - before == went[other.name]
    await until(lambda: home.remote.credit == other.remote.credit == 2)
    bench.pool.delivery._interrupt = Interrupt.LEASE
    calls = [go_on(f"leased {index}", tokens=40) for index in range(4)]
    assert {engine_of(each) for each in await asyncio.gather(*calls)} == {home.name}, "which has the adapter they keep"


async def test_turns_of_a_lost_engines_rollouts_go_to_another(bench: Pooled):
    """Those sent to it, those that waited for it, and those asked for afterwards."""
    for _ in range(2):
        await bench.join(slots=1)
    parent, home, other = await finished_parent(bench)
    calls = [
        asyncio.ensure_future(bench.pool.generate(parent.forked(9, id=f"f{i}"), Sampling(max_tokens=30, seed=i)))
        for i in range(5)
    ]
    await until(lambda: len(home.requests) == 2)
    home.kill()
    await until(lambda: home.remote.is_lost)
    for index, fork in enumerate(await asyncio.gather(*calls)):
        assert engine_of(fork) == other.name and fork.num_sampled == 33 and fork.id == f"f{index}"
    again = await bench.pool.generate(parent.append([7]), Sampling(max_tokens=3))
    assert engine_of(again) == other.name and bench.pool.num_waiting == 0


async def test_turns_do_not_wait_for_an_engine_that_is_behind(bench: Pooled):
    for _ in range(2):
        await bench.join(slots=1)
    parent, home, other = await finished_parent(bench)
    busy = [
        asyncio.ensure_future(bench.pool.generate(parent.forked(9, id=f"busy {i}"), Sampling(max_tokens=60))) for i in range(5)
    ]
    await until(lambda: bool(home.remote.bound))
    home.remote.is_behind = True
    assert engine_of(await bench.pool.generate(parent.append([7]), Sampling(max_tokens=3))) == other.name
    await asyncio.gather(*busy)


# Later turns: only what is new travels


async def test_a_call_that_ended_otherwise_than_was_reported_is_sent_whole(bench: Pooled, monkeypatch):
    far, told, checks = await bench.join(slots=2), [], itertools.count()
    monkeypatch.setattr(worker, "zlib", SimpleNamespace(crc32=lambda *_: next(checks)))  # none is like another
    _, back = sent_tokens(far)
    sampling = Sampling(max_tokens=60, seed=3)
    rollout = await bench.pool.generate(prompt("r"), sampling, on_tokens=lambda new: told.extend(new.token_ids))
    alone = await far.engine.generate(prompt("r"), sampling)
    assert len(back) > 1 and back[-1] == rollout.num_sampled == 60, "the last message has all of them"
    assert told == rollout.token_ids[-60:].tolist() == alone.token_ids[-60:].tolist()


def sent_tokens(far: Far) -> tuple[list[int], list[int]]:
    """Grow by the tokens of every rollout that travels to an engine and back."""
    to, back = [], []
    take, sampled = far.worker._take_work, far.remote._take_sampled

    def take_work(value: Any) -> None:
        to.extend(value["rollouts"]["rollouts"]["length"])
        take(value)

    def take_sampled(value: Any) -> None:
        back.append(len(value["tokens"]))
        sampled(value)

    far.data.notices["work"], far.remote.data.notices["sampled"] = take_work, take_sampled  # type: ignore[union-attr]
    return to, back


@pytest.mark.parametrize("seconds", [0.0, 1e9])
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=9), Sampling(max_tokens=9, top_k=5, min_tokens=2, stop_ids=(3,))])
async def test_of_a_later_turn_only_what_is_new_travels(bench: Pooled, sampling, seconds, monkeypatch):
    """After every step or at the end; and the rollout is the one that an engine in this process makes of it."""
    monkeypatch.setattr(worker, "TELL_SECONDS", seconds)
    bench.record_entropy = True
    far = await bench.join(slots=2)
    to, back = sent_tokens(far)
    rollout = prompt("r", length=12)
    alone = rollout
    for turn in range(4):
        seeded, start = sampling.with_seed(turn), len(rollout)
        rollout = await bench.pool.generate(rollout, seeded)
        alone = await far.engine.generate(alone.replace(id=f"alone {turn}"), seeded)
        assert sum(back) == len(rollout) - start and (len(back) > 1) is (seconds == 0)
        back.clear()
        for name in ("token_ids", "source", "loss_mask", "versions", "sampling_mask", "finish_reason", "lineage"):
            assert np.array_equal(getattr(rollout, name), getattr(alone, name)), (turn, name)
        np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
        np.testing.assert_allclose(rollout.columns[SAMPLED_ENTROPY], alone.columns[SAMPLED_ENTROPY], atol=1e-5)
        spans = [[(call.start, call.stop, call.finish_reason) for call in each.calls] for each in (rollout, alone)]
        assert spans[0] == spans[1] and len(spans[0]) == turn + 1
        rollout, alone = rollout.append([7, 8 + turn]), alone.append([7, 8 + turn])
    assert to == [12, 2, 2, 2]


async def test_a_turn_at_an_engine_that_records_no_entropy_any_more(bench: Pooled, monkeypatch):
    """As after a run is resumed with other settings. Some of its tokens are reported before it ends."""
    monkeypatch.setattr(worker, "TELL_SECONDS", 0.0)
    await bench.join(slots=2)
    sampling = Sampling(max_tokens=4, seed=1)
    before = prompt("r").demonstrate([8, 9], engine="engine-7").replace(columns={SAMPLED_ENTROPY: np.full(8, 0.5, np.float32)})
    rollout = await asyncio.wait_for(bench.pool.generate(before, sampling), 30)
    assert rollout.columns[SAMPLED_ENTROPY].tolist() == [0.5] * 8 + [0.0] * 4


async def test_what_an_engine_no_longer_has_is_sent_whole(bench: Pooled, monkeypatch):
    """Because it held too much, because the history changed, or because it was restarted."""
    far = await bench.join(slots=2)
    first = await bench.pool.generate(prompt("r", length=12), Sampling(max_tokens=9))
    to, _ = sent_tokens(far)
    tokens = first.token_ids.copy()
    tokens[3] = 60 if tokens[3] != 60 else 61
    changed = first.replace(token_ids=tokens).append([7])
    second = await bench.pool.generate(changed, Sampling(max_tokens=9))
    assert to == [1, len(changed)] and second.token_ids[: len(changed)].tolist() == changed.token_ids.tolist()
    monkeypatch.setattr(worker, "_MOST_HELD", 0)
    third = await bench.pool.generate(second.append([8]), Sampling(max_tokens=9))
    fourth = await bench.pool.generate(third.append([9]), Sampling(max_tokens=9))
    assert to[2:] == [1, 1, len(third) + 1] and len(fourth) == len(third) + 10 and not far.worker._held
    assert far.remote.credit == 4 and not far.worker._requests


async def test_a_call_cancelled_while_its_rollout_is_asked_for_gives_its_place_back(bench: Pooled):
    far = await bench.join(slots=2)
    first = await bench.pool.generate(prompt("r"), Sampling(max_tokens=9))
    await until(lambda: far.remote.credit == 4)
    far.worker._held.clear()
    asked, take = asyncio.Event(), far.remote._take_missing
    far.remote.data.notices["missing"] = lambda keys: (call.cancel(), asked.set(), late.append(keys))  # type: ignore
    late: list[list[int]] = []
    call = asyncio.ensure_future(bench.pool.generate(first.append([7]), Sampling(max_tokens=9)))
    await asked.wait()
    await asyncio.gather(call, return_exceptions=True)
    far.remote.data.notices["missing"] = take  # type: ignore[union-attr]
    take(late[0])
    await until(lambda: far.remote.credit == 4)
    assert not far.remote.requests and not far.worker._requests
    assert (await bench.pool.generate(first.append([7]), Sampling(max_tokens=9))).num_sampled == 18


async def test_an_episode_that_has_ended_is_held_by_no_engine(bench: Pooled):
    fars = [await bench.join(slots=2) for _ in range(2)]
    names = [f"r{index}" for index in range(6)]
    done = await asyncio.gather(*(bench.pool.generate(prompt(name), Sampling(max_tokens=9)) for name in names))
    assert sum(len(far.worker._held) for far in fars) == 6
    bench.pool.release([rollout.id for rollout in done[1:]])
    await until(lambda: sum(len(far.worker._held) for far in fars) == 1)
    assert sum(far.worker._num_held for far in fars) == done[0].num_bytes
    await until(lambda: sum(far.core.scheduler.pool.kept(name).num_tokens > 0 for far in fars for name in names) == 1)


async def test_only_engines_that_had_a_rollout_are_told_that_it_has_ended(bench: Pooled):
    fars, told = [await bench.join(slots=1) for _ in range(3)], Counter[str]()
    await until(lambda: all(far.remote.credit == 2 for far in fars))
    for far in fars:
        far.data.notices["release"] = lambda ids, name=far.name: told.update(dict.fromkeys(ids, 1) | {name: len(ids)})
    first = await bench.pool.generate(prompt("r"), Sampling(max_tokens=9))
    home = next(far for far in fars if far.name == engine_of(first))
    home.remote.is_behind = True
    moved = await bench.pool.generate(first.append([7]), Sampling(max_tokens=9))
    bench.pool.release(["r"])
    await until(lambda: told["r"] == 2)
    assert told == {"r": 2, home.name: 1, engine_of(moved): 1}
    bench.pool.release(["of a run before"])
    await until(lambda: told["of a run before"] == 3)
