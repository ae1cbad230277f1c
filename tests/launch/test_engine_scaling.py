"""A pool of engines that Ray lets grow and shrink: what is measured, and what is done about it."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.launch import on_ray
from headrace.launch.hosts import Host, HostOffer
from headrace.launch.on_ray import RayProcesses
from headrace.launch.scaling import Measured, wanted_change
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.launch.on_ray import Run


def after(*, waits: float, idles: float, used: float = 1.0, engines: int = 2) -> Measured:
    """What a minute has added up, of which the trainer waited and the engines idled these shares."""
    engine = {"decode": 60 * engines * (1 - idles), "wait-gate": 60 * engines * idles}
    trainer = {"compute": 60 * (1 - waits), "wait-batch": 60 * waits}
    return Measured(60.0, 5, engine, trainer, (int(100 * used), 100))


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (1, {"waits": 0.5, "idles": 0.0}),
        (0, {"waits": 0.05, "idles": 0.0}),
        (0, {"waits": 0.5, "idles": 0.3}),  # they take turns, or wait for the scorer
        (0, {"waits": 0.5, "idles": 0.0, "used": 0.2}),  # a long tail
        (-1, {"waits": 0.0, "idles": 0.6}),
        (0, {"waits": 0.0, "idles": 0.4}),  # one alone would be at work for 120 % of the time
        (-1, {"waits": 0.0, "idles": 0.4, "engines": 4}),
    ],
)
def test_who_waits_decides(change, how):
    before = Measured(0.0, 0, {}, {"compute": 0.1}, (0, 0))
    now = after(**how)
    assert wanted_change(before, now, num_engines=how.get("engines", 2)) == change
    assert now.is_enough_since(before)
    for changed in ({"time": 5.0}, {"version": 2}, {"time": 130.0}):  # the last: for most of which there was no trainer
        assert not now._replace(**changed).is_enough_since(before)
    assert now.continues(before) and not now.continues(before._replace(trainer={}))
    assert not now._replace(version=-1).continues(before) and not now._replace(trainer={"compute": 0.0}).continues(before)


def test_an_engine_is_asked_for_once_and_given_back_when_it_idles(tmp_path, monkeypatch):
    killed, said, running = [], [], [Future()]

    def kill(actor: object) -> None:
        killed.append(actor)
        if not running[-1].done():
            running[-1].set_exception(RuntimeError("the actor is dead"))

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=kill))
    change, sleep = [1], asyncio.sleep
    monkeypatch.setattr(on_ray, "wanted_change", lambda *_, **__: change[0])
    monkeypatch.setattr(Measured, "is_enough_since", lambda *_: True)
    monkeypatch.setattr(Measured, "continues", lambda *_: True)
    monkeypatch.setattr(Measured, "now", classmethod(lambda cls, *_, version: Measured(0.0, version, {}, {}, (0, 0))))
    monkeypatch.setattr(on_ray.asyncio, "sleep", lambda _: sleep(0.001))

    async def main() -> None:
        settings = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "engine.max_count": 2}
        processes = RayProcesses(make_recipe(settings), tmp_path)
        processes._say = said.append
        first, extra = (SimpleNamespace(name=name, update=None) for name in ("engine-0", "engine-1"))

        def start_actor(role: str, threads: int, where: object) -> tuple[str, Run]:
            processes._actors["engine 7"] = "an actor"
            return "engine 7", lambda: running[-1]

        monkeypatch.setattr(processes, "_start_actor", start_actor)
        monkeypatch.setattr(Host, "dismiss", lambda host: (setattr(host, "is_gone", True), running[-1].set_result(0)))
        scaling = asyncio.ensure_future(processes._scale())

        async def until(holds) -> None:
            async with asyncio.timeout(30):
                while not holds():
                    await sleep(0.001)

        await until(lambda: processes._extra)
        await sleep(0.05)
        assert processes._extra == ["engine 7"] and len(said) == 1, "another is not asked for before it has joined"
        change[0] = 0
        await until(lambda: not processes._extra)
        assert killed == ["an actor"] and not processes._actors and not processes._over
        assert said == [
            "the trainer waits for engines: asking Ray for one more (1 + 1)",
            "the trainer no longer waits for engines: Ray is not asked for one more",
        ]
        killed.clear()
        running.append(Future())
        change[0] = 1
        await until(lambda: processes._extra)
        said.clear()
        offer = HostOffer(host="far", address="10.0.0.9", label="engine 7")
        processes.place("engine", 1, host=Host(1, None, asyncio.get_running_loop(), offer=offer))
        await sleep(0.05)
        assert not said, "there are as many as may be"
        processes.pool.engines = [extra]
        change[0] = -1
        await sleep(0.05)
        assert not said, "the only one stays while the other is lost"
        processes.pool.engines = [first, extra]
        await until(lambda: killed)
        assert killed == ["an actor"] and not processes._extra and not processes._actors
        await sleep(0.05)
        assert not scaling.done(), "an engine past count that has joined by hand stays"
        scaling.cancel()

    asyncio.run(main())
    assert said == ["the engines idle: one of 2 is given back"]


def test_ranges_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="only Ray finds room for more engines"):
        make_recipe({"engine.max_count": 2})
    with pytest.raises(ConfigError, match="max_count = 2: must be ≥ count = 3, or 0"):
        make_recipe({"engine.count": 3, "engine.max_count": 2})


@pytest.mark.parametrize(("device", "in_cluster", "wanted"), [("auto", 0, 0), ("auto", 8, 1), ("cpu", 8, 0), ("cuda", 0, 1)])
def test_a_process_asks_for_a_gpu_where_it_must_have_one(tmp_path, monkeypatch, device, in_cluster, wanted):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": in_cluster}))
    settings = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0", "device": device}
    assert RayProcesses(make_recipe(settings), tmp_path)._needs("engine", 3) == (3, wanted)
