"""One update to many engines: the slowest does not hold the others, and whoever comes late is brought up to date."""

from __future__ import annotations

import asyncio
import functools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from manifests import make_manifest
from pooled import Far, Pooled, pooled

from headrace.engine import EnginePool, RemoteEngine, weight_delivery
from headrace.engine.weight_delivery import WeightDelivery
from headrace.errors import LinkError, SyncError
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.partial import Interrupt
from headrace.records import Rollout, Sampling, WeightUpdate
from headrace.rpc import RemoteError, StreamClosed
from headrace.sync.delta import payload as delta_payload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between two attempts, which take no time here."""
    paused, sleep = list[float](), asyncio.sleep

    def passes(seconds: float) -> Awaitable[None]:
        is_pause = seconds in weight_delivery._PAUSES[1:]
        if is_pause:
            paused.append(seconds)
        return sleep(0 if is_pause else seconds)

    monkeypatch.setattr(asyncio, "sleep", passes)
    return paused


class Source:
    """The trainer's side, here; counts what it is asked for."""

    def __init__(self, bench: Pooled) -> None:
        self._bench = bench
        self.sent: list[tuple[int, tuple[str, ...]]] = []
        self.asked: list[list[WeightUpdate]] = []

    def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
        return [update] * len(receivers)

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        self.sent.append((update.version, tuple(receivers)))

    async def catch_up(self, version: int | None) -> Sequence[WeightUpdate]:
        self.asked.append(self._bench.sync.catch_up(version))
        return self.asked[-1]


class Policy:
    def __init__(self, bench: Pooled) -> None:
        self.bench, self.model = bench, load_model(bench.model_path)
        self.source = bench.pool.delivery.source = Source(bench)

    async def publish(self, version: int, *, interrupt: Interrupt = Interrupt.KEEP) -> WeightUpdate:
        with torch.no_grad():
            for _, tensor in named_tensors(self.model):
                tensor.reshape(-1)[version::53] *= 1.01
        update = self.bench.sync.offer(version, named_tensors(self.model))
        await self.bench.pool.load(update, interrupt=interrupt)
        self.bench.sync.release(update)
        return update

    def is_held_by(self, far: Far) -> bool:
        return make_manifest(named_tensors(far.core.model)) == make_manifest(named_tensors(self.model))


class Held:
    """An engine that stops in the middle of receiving, until it is let go."""

    def __init__(self, far: Far) -> None:
        self.may_go, self.is_there = threading.Event(), threading.Event()
        receive = far.engine._sync.receive

        def held(update: WeightUpdate, incoming: object) -> None:
            self.is_there.set()
            assert self.may_go.wait(110)
            receive(update, incoming)  # type: ignore[arg-type]

        far.engine._sync.receive = held  # type: ignore[method-assign]


def run(test: Callable[[Pooled], Awaitable[None]], model_path: str, *, payload: str = "full") -> None:
    async def main() -> None:
        torch.manual_seed(0)
        async with pooled(model_path, payload=payload) as bench:
            await asyncio.wait_for(test(bench), 120)

    asyncio.run(main())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def prompts(count: int, name: str) -> list[Rollout]:
    return [Rollout.from_prompt(np.arange(6, 14), id=f"{name}{index}") for index in range(count)]


async def engines_of(bench: Pooled, name: str) -> set[str]:
    rollouts = await asyncio.gather(*(bench.pool.generate(each, Sampling(max_tokens=4)) for each in prompts(12, name)))
    return {rollout.calls[0].engine for rollout in rollouts}


def test_the_slowest_engine_does_not_hold_the_others(tiny_model):
    async def check(bench: Pooled) -> None:
        policy, fast, slow = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        bench.pool.delivery.patience = 0.1
        assert await engines_of(bench, "both") == {"engine-0", "engine-1"}
        held = Held(slow)
        await policy.publish(2)
        assert bench.pool.versions == {"engine-0": 2, "engine-1": 1}
        await until(held.is_there.is_set)
        await policy.publish(3)
        assert (fast.core.version, slow.core.version) == (3, 1)
        assert await engines_of(bench, "one") == {"engine-0"}, "whoever is behind begins nothing"
        held.may_go.set()
        await until(lambda: not slow.remote.is_behind)
        assert bench.pool.versions == {"engine-0": 3, "engine-1": 3} and policy.is_held_by(slow)
        assert await engines_of(bench, "again") == {"engine-0", "engine-1"}
        bench.pool.delivery.patience = 60.0
        await policy.publish(4)
        assert (fast.core.version, slow.core.version) == (4, 4)

    run(check, tiny_model)


def test_an_engine_that_drains_does_not_hold_one_that_is_empty(tiny_model):
    """It has prefetched what it will hold, and goes on with what it has begun."""

    async def check(bench: Pooled) -> None:
        policy, busy = Policy(bench), await bench.join(context=4096)
        await policy.publish(1)
        bench.pool.delivery.patience = 0.05
        long = asyncio.ensure_future(bench.pool.generate(prompts(1, "long")[0], Sampling(max_tokens=1000)))
        await until(lambda: busy.core.num_running == 1)
        empty = await bench.join()
        await policy.publish(2, interrupt=Interrupt.DRAIN)
        assert (busy.core.version, empty.core.version) == (1, 2) and not long.done()
        rollout = await long
        assert (rollout.versions[rollout.is_sampled] == 1).all()
        await until(lambda: not busy.remote.is_behind)
        assert busy.core.version == 2

    run(check, tiny_model)


def test_nobody_scores_with_weights_that_the_others_hold_no_more(tiny_model):
    """The one that held the new ones is lost: the canary waits for one that is still on its way to them."""

    async def check(bench: Pooled) -> None:
        policy, fast, slow = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        bench.pool.delivery.patience = 0.05
        held = Held(slow)
        await policy.publish(2)
        fast.kill()
        await until(lambda: fast.remote.is_lost)
        scoring = asyncio.ensure_future(bench.pool.score(prompts(1, "canary")))
        await asyncio.sleep(0.1)
        assert not scoring.done()
        held.may_go.set()
        await scoring
        assert slow.core.version == 2

    run(check, tiny_model)


def test_an_engine_that_took_what_others_refused_is_ahead_and_not_behind(tiny_model):
    """It cannot go back, and need not: the version comes again, or the next does."""

    async def check(bench: Pooled) -> None:
        policy, bad = Policy(bench), await bench.join()
        await policy.publish(1)
        update = bench.sync.offer(2, named_tensors(policy.model))
        new, held = await bench.start(slots=4, context=96), Held(bad)
        loading = asyncio.ensure_future(bench.pool.load(update))
        await until(held.is_there.is_set)
        calling, may_pause = new.remote.call, asyncio.Event()

        async def pauses_late(name: str, **arguments: object) -> object:
            await (may_pause.wait() if name == "pause" else asyncio.sleep(0))
            return await calling(name, **arguments)

        new.remote.call = pauses_late  # type: ignore[method-assign]
        bench.pool._is_paused = True
        joining = asyncio.ensure_future(bench.pool.join(new.remote))
        await until(lambda: new.core.version == 2)
        bench.parcel(update)[3] ^= 1
        held.may_go.set()
        with pytest.raises(SyncError, match="version 2"):
            await loading
        bench.sync.abort(update)
        may_pause.set()
        await joining
        assert [far.core.version for far in (bad, new)] == [1, 2]
        await policy.publish(3)
        assert all(far.core.version == 3 and policy.is_held_by(far) for far in (bad, new))

    run(check, tiny_model, payload="delta")


def test_what_a_refusal_came_from_is_told(tiny_model):
    async def check(bench: Pooled) -> None:
        policy, _ = Policy(bench), await bench.join()
        update = bench.sync.offer(1, named_tensors(policy.model))
        bench.parcel(update)[64] ^= 1
        with pytest.raises(SyncError, match="version 1") as caught:
            await bench.pool.load(update)
        assert isinstance(caught.value.__cause__, RemoteError) and "Traceback" in caught.value.__cause__.detail

    run(check, tiny_model)


def test_with_patience_all_of_them_hold_it(tiny_model):
    async def check(bench: Pooled) -> None:
        policy, _, slow = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        held = Held(slow)
        publishing = asyncio.ensure_future(policy.publish(2))
        await asyncio.sleep(0.3)
        assert not publishing.done()
        held.may_go.set()
        await publishing
        assert bench.pool.versions == {"engine-0": 2, "engine-1": 2}
        assert policy.source.sent[-1] == (2, ("engine-0", "engine-1"))

    run(check, tiny_model)


# Differences


def test_an_engine_that_nobody_can_say_what_it_missed_to_is_hung_up_on(tiny_model):
    """Whatever the reason: behind for ever it would hold its slots and its rollouts."""

    async def check(bench: Pooled) -> None:
        policy, fast, slow = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        bench.pool.delivery.patience = 0.05
        held = Held(slow)
        for version in (2, 3, 4):
            await policy.publish(version)

        async def fails(version: int | None) -> Sequence[WeightUpdate]:
            raise RuntimeError("the trainer failed: out of memory")

        policy.source.catch_up = fails  # type: ignore[method-assign]
        held.may_go.set()
        await until(lambda: slow.remote.is_lost)
        assert bench.pool.engines == [fast.remote]

    run(check, tiny_model, payload="delta")


def test_an_engine_that_missed_differences_replays_them_and_a_new_one_gets_all(tiny_model):
    async def check(bench: Pooled) -> None:
        policy, first, slow = Policy(bench), await bench.join(), await bench.join()
        assert (await policy.publish(1)).payload == "full"
        bench.pool.delivery.patience = 0.05
        held = Held(slow)
        updates = [await policy.publish(version) for version in (2, 3, 4)]
        assert [update.payload for update in updates] == ["delta"] * 3
        assert [update.base_version for update in updates] == [1, 2, 3]
        held.may_go.set()
        await until(lambda: not slow.remote.is_behind)
        replayed = [update.version for update in policy.source.asked[-1]]
        assert replayed == [3, 4] and all(update.payload == "delta" for update in policy.source.asked[-1])
        late = await bench.join()
        assert [update.payload for update in policy.source.asked[-1]] == ["full"]
        num_offered = len(bench.sync._offered)
        await bench.join()
        assert len(bench.sync._offered) == num_offered, "who comes next gets the same: memory has room for a few, not for all"
        for far in (first, slow, late):
            assert far.core.version == 4 and policy.is_held_by(far)
        bench.pool.delivery.patience = 60.0
        await policy.publish(5)
        assert all(far.core.version == 5 and policy.is_held_by(far) for far in (first, slow, late))

    run(check, tiny_model, payload="delta")


def test_differences_that_are_no_longer_kept_are_made_good_by_all_of_it(tiny_model, monkeypatch):
    monkeypatch.setattr(delta_payload, "_MOST_KEPT", 3)

    async def check(bench: Pooled) -> None:
        policy, _, slow = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        bench.pool.delivery.patience = 0.0
        held = Held(slow)
        for version in range(2, 8):
            await policy.publish(version)
        held.may_go.set()
        await until(lambda: not slow.remote.is_behind)
        assert [update.payload for update in policy.source.asked[-1]] == ["full"]
        assert slow.core.version == 7 and policy.is_held_by(slow)
        assert len(bench.sync._offered) == 4, "three differences and all of it: what nobody needs is freed"

    run(check, tiny_model, payload="delta")


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_after_a_refusal_the_version_is_sent_again_whole(tiny_model, payload):
    async def check(bench: Pooled) -> None:
        policy, one, other = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        update = bench.sync.offer(2, named_tensors(policy.model))
        for far in (one, other):
            spoil(far, times=1)
        with pytest.raises(SyncError, match=r"version 2: tensor 'model\.embed_tokens\.weight' differs"):
            await bench.pool.load(update)
        bench.sync.abort(update)
        assert (one.core.version, other.core.version) == (1, 1)
        again = bench.sync.offer(2, named_tensors(policy.model), whole=True)
        assert again.payload == "full"
        await bench.pool.load(again)
        bench.sync.release(again)
        assert (one.core.version, other.core.version) == (2, 2) and policy.is_held_by(other)
        assert (await policy.publish(3)).payload == payload
        assert policy.is_held_by(one) and policy.is_held_by(other)

    run(check, tiny_model, payload=payload)


# One engine that refuses what the others take


def spoil(far: Far, *, times: float) -> list[int]:
    """Have the next so many updates arrive changed; returns the versions that arrived so."""
    receive, spoiled = far.engine._sync.receive, list[int]()

    def spoils(update: WeightUpdate, incoming: object) -> None:
        receive(update, incoming)  # type: ignore[arg-type]
        if len(spoiled) < times:
            spoiled.append(update.version)
            incoming.views["model.embed_tokens.weight"][3, 3] += 1  # type: ignore[attr-defined]

    far.engine._sync.receive = spoils  # type: ignore[method-assign]
    return spoiled


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_an_engine_that_refuses_an_update_is_named_and_sent_it_again_alone(tiny_model, payload):
    async def check(bench: Pooled) -> None:
        policy, good, bad = Policy(bench), await bench.join(), await bench.join()
        said: list[str] = []
        bench.pool.delivery.say = said.append
        await policy.publish(1)
        spoiled = spoil(bad, times=2)
        await policy.publish(2)
        assert good.core.version == 2
        await until(lambda: not bad.remote.is_behind)
        assert bad.core.version == 2 and policy.is_held_by(bad) and spoiled == [2, 2]
        assert [line.partition(":")[0] for line in said] == ["engine-1 refused version 2, and is sent it again alone"]
        assert "'model.embed_tokens.weight' differs" in said[0]
        assert policy.source.sent[1:] == [(2, ("engine-0", "engine-1")), (2, ("engine-1",)), (2, ("engine-1",))]
        assert await engines_of(bench, "both") == {"engine-0", "engine-1"}

    run(check, tiny_model, payload=payload)


def break_link(far: Far) -> list[int]:
    """Have every update fail after a while; returns the versions that did."""
    failed: list[int] = []

    def fails(update: WeightUpdate, _: object) -> None:
        failed.append(update.version)
        threading.Event().wait(0.3)
        raise SyncError("the link is broken")

    far.engine._sync.receive = fails  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize(("patience", "fail"), [(0.05, break_link), (60.0, functools.partial(spoil, times=np.inf))])
def test_an_engine_that_cannot_be_brought_up_to_date_is_let_go_after_pauses_that_grow_and_the_others_stay(
    tiny_model, pauses, patience, fail
):
    async def check(bench: Pooled) -> None:
        policy, good, bad = Policy(bench), await bench.join(), await bench.join()
        said: list[str] = []
        bench.pool.delivery.say = said.append
        await policy.publish(1)
        bench.pool.delivery.patience = patience
        failed = fail(bad)
        await policy.publish(2)
        await until(lambda: bad.remote.is_lost)
        assert bench.pool.engines == [good.remote] and failed == [2] * 4 and bad.core.version == 1
        assert pauses == [1.0, 4.0]
        assert "engine-1 was not brought up to date in 3 attempts and is let go: " in said[-1]
        await policy.publish(3)
        assert good.core.version == 3

    run(check, tiny_model)


def test_one_that_refuses_at_once_does_not_cut_short_those_that_still_load(tiny_model):
    async def check(bench: Pooled) -> None:
        policy, slow, bad = Policy(bench), await bench.join(), await bench.join()
        await policy.publish(1)
        bench.pool.delivery.patience = 0.0
        held, _ = Held(slow), spoil(bad, times=1)
        publishing = asyncio.ensure_future(policy.publish(2))
        await until(held.is_there.is_set)
        await asyncio.sleep(0.3)
        assert not publishing.done()
        held.may_go.set()
        await publishing
        assert slow.core.version == 2
        await until(lambda: not bad.remote.is_behind)
        assert bad.core.version == 2

    run(check, tiny_model)


# A delivery alone


class Stub:
    """An engine that loads as it is told to."""

    is_lost = is_behind = is_leaving = False
    update = None

    def __init__(self, name: str, load: Callable[[], Awaitable[None]]) -> None:
        self.name, self._load = name, load

    async def load(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        await self._load()

    def version_of(self, lineage: str) -> int | None:
        return None if self.update is None else self.update.version


def test_an_engine_that_is_gone_is_told_and_is_no_failure_of_the_others():
    async def closes() -> None:
        raise StreamClosed("gone")

    async def works() -> None:
        """At once."""

    async def check() -> None:
        lost: list[str] = []
        delivery = WeightDelivery(on_lost=lambda engine: lost.append(engine.name))
        engines = [Stub("gone", closes), Stub("there", works)]
        update = WeightUpdate(policy="policy", lineage="life", version=3)
        assert await delivery.deliver(update, engines, Interrupt.KEEP) == {}  # type: ignore[arg-type]
        assert lost == ["gone"] and engines[1].update is update and engines[0].update is None

    asyncio.run(check())


def test_one_that_leaves_is_not_sent_again_what_it_refused():
    async def refuses() -> None:
        leaving.is_leaving = True  # it is recalled meanwhile
        raise SyncError("no")

    async def works() -> None:
        """At once."""

    async def check() -> None:
        delivery = WeightDelivery(on_lost=lambda engine: None)
        await delivery.load(WeightUpdate(policy="policy", lineage="life", version=3), [leaving, there], Interrupt.KEEP)  # type: ignore[list-item]
        assert there.update is not None and not delivery.catching_up and not leaving.is_behind

    leaving, there = Stub("leaving", refuses), Stub("there", works)
    asyncio.run(check())


def test_engines_are_not_to_blame_for_a_source_that_is_lost():
    """One is late and asks what it missed, and the source is gone: it waits for the next update like the others."""

    async def check() -> None:
        lost: list[str] = []

        async def hangs() -> None:
            await asyncio.Event().wait()

        async def works() -> None:
            """At once."""

        delivery = WeightDelivery(on_lost=lambda engine: lost.append(engine.name))
        delivery.patience = 0.0
        engines, update = [Stub("late", hangs), Stub("there", works)], WeightUpdate(policy="policy", lineage="life", version=3)
        engines[1].update = update
        await delivery.load(update, engines, Interrupt.KEEP)  # type: ignore[arg-type]
        assert engines[0].is_behind and len(delivery.catching_up) == 1
        catching_up = list(delivery.catching_up.values())
        delivery.forget()
        await asyncio.wait(catching_up)
        assert not lost and not engines[0].is_behind and delivery.is_current(engines[0]) and not delivery.catching_up  # type: ignore[arg-type]

    asyncio.run(check())


def test_a_delivery_that_is_cancelled_leaves_nothing_under_way():
    async def check() -> None:
        ended: list[str] = []

        async def hangs() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("load")

        class Sending:
            def routes(self, update: WeightUpdate, receivers: Sequence[str]) -> Sequence[WeightUpdate]:
                return [update] * len(receivers)

            async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("send")

        delivery = WeightDelivery(on_lost=lambda _: None, source=Sending())  # type: ignore[arg-type]
        update = WeightUpdate(policy="policy", lineage="life", version=3)
        delivering = asyncio.ensure_future(delivery.deliver(update, [Stub("one", hangs)], Interrupt.KEEP))  # type: ignore[list-item]
        await asyncio.sleep(0.01)
        delivering.cancel()
        await asyncio.wait([delivering])
        await asyncio.sleep(0.01)
        assert sorted(ended) == ["load", "send"]

    asyncio.run(check())


class Linked:
    """An engine whose link works `after` so many seconds of a clock."""

    def __init__(self, name: str, clock: Callable[[], float], *, after: float = 0.0) -> None:
        self.name, self._clock, self._after = name, clock, after
        self.is_leaving = self.is_lost = self.is_behind = False
        self.update: WeightUpdate | None = None
        self.control = SimpleNamespace(stream=SimpleNamespace(close=lambda: None))

    version_of = RemoteEngine.version_of

    async def load(self, update: WeightUpdate, _: Interrupt) -> None:
        await asyncio.sleep(0)
        if self._clock() < self._after:
            raise LinkError("connection refused")


@pytest.mark.parametrize(
    ("after", "attempts"), [(0.5, [1.0]), (50.0, [1.0, 4.0, 8.0, 16.0, 30.0]), (1e9, [1.0, 4.0, 8.0, 16.0, 30.0, 30.0])]
)
def test_an_engine_whose_link_fails_is_let_go_after_the_deadline_and_not_after_three_attempts(
    monkeypatch, pauses, after, attempts
):
    async def check() -> None:
        lost, said, good = list[object](), list[str](), Linked("engine-0", lambda: sum(pauses))
        monkeypatch.setattr(weight_delivery, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
        delivery, cut_off = WeightDelivery(on_lost=lost.append), Linked("engine-1", lambda: sum(pauses), after=after)
        delivery.deadline, delivery.say = 60.0, said.append
        await delivery.load(WeightUpdate(policy="policy", lineage="life", version=1), [good, cut_off], Interrupt.KEEP)
        await asyncio.gather(*delivery.catching_up.values())
        assert pauses == attempts and cut_off.is_behind == bool(lost) == (after == 1e9)
        assert not lost or "was not brought up to date in 7 attempts and is let go: connection refused" in said[-1]

    asyncio.run(check())


def test_a_broken_link_is_known_as_one_in_the_launcher():
    async def refused(*_: object, **__: object) -> None:
        raise RemoteError(kind="LinkError", message="version 2 over http: it has sent nothing")

    async def check() -> None:
        engine = RemoteEngine("engine-0", EnginePool(), control=SimpleNamespace(call=refused), on_report=lambda *_: None)
        with pytest.raises(LinkError, match="has sent nothing"):
            await engine.call("load")

    asyncio.run(check())
