"""Where the launcher puts processes, and that they are told all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.config import make_recipe
from headrace.launch.placement import (
    LENT,
    Order,
    Placement,
    check_ranks,
    choose_device,
    device_of,
    lends,
    place_on_this_host,
    shares_device,
    threads_of,
    why_not_lent,
)
from headrace.launch.process import Place
from headrace.settings import ConfigError
from headrace.sync import TransportConfig

ON_RAY = {"orchestrate": "ray", "cluster.listen": "127.0.0.1:0"}
JOINS = {"cluster.listen": "127.0.0.1:0", "cluster.trainer_joins": True}


def placement(role: str, index: int, **settings: object) -> Placement:
    recipe = make_recipe({"threads": 3, "sync.host": "127.0.0.2", **settings})
    place = Place(f"{role}-{index}", role, index)
    return place_on_this_host(recipe, place, run_folder=Path("runs/x"), shared_folder=Path("/dev/shm"))


def test_an_order_arrives_as_it_was_given() -> None:
    order = Order(
        name="engine-1",
        role="engine",
        index=1,
        incarnation=2,
        placement=placement("engine", 1),
        address="unix:/tmp/a b/ö/s",
        transport=TransportConfig("files", "/ö", "headrace-17-ab", "127.0.0.2", "0" * 64, 60.0),
        silence=180.0,
        deadline=600.0,
        import_path=["/a:b", "/ö"],
    )
    assert Order.read(order.line()) == order and order.line().count("\n") == 1


def test_a_placement_says_everything_that_the_process_must_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = placement("engine", 1, **{"engine.threads": 2})
    assert (placed.device, placed.receives_on, placed.threads, placed.address) == ("cpu", "cpu", 2, "127.0.0.2")
    assert Path(placed.log) == Path("runs/x/logs/engine-1.log").absolute() and placed.shared_folder == "/dev/shm"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert placement("trainer", 0).device == placement("trainer", 0).receives_on == "cuda:0"
    assert [placement("engine", index).device for index in range(3)] == ["cuda:1", "cuda:2", "cuda:1"]


def test_every_rank_of_the_trainer_gets_a_gpu_and_engines_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    ranks = {"train.parallel.replicate": 2, "train.parallel.shard": 1}
    assert [placement("trainer", rank, **ranks).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [placement("engine", index, **ranks).device for index in range(3)] == ["cuda:2", "cuda:3", "cuda:2"]
    everywhere = {"train.parallel.shard": 4}
    assert [placement("engine", index, **everywhere).device for index in range(5)] == [f"cuda:{i}" for i in (0, 1, 2, 3, 0)]
    check_ranks(make_recipe(everywhere))
    for settings, words in (
        ({"train.parallel.shard": 5}, "5 ranks, and torch sees 4 GPUs; each rank needs one of its own"),
        ({"train.parallel.replicate": 2, "orchestrate": "inline"}, r"\{replicate = 2, shard = 1\}: 2 ranks.*'inline' has one"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_ranks(make_recipe(settings))
    with pytest.raises(ConfigError, match=r"train\.batch = 8 in 2 mini-batches: a step has fewer rollouts than the 6 ranks"):
        make_recipe({"train.batch": 8, "train.mini_batches": 2, "train.parallel.shard": 6})
    with pytest.raises(ConfigError, match=r"train\.parallel\.shard = 0: must be at least 1"):
        make_recipe({"train.parallel.shard": 0})


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"engine.count": 2, "train.parallel.shard": 2}
    assert threads_of(make_recipe(settings), "trainer", cores=8) == 2
    assert threads_of(make_recipe({**settings, **ON_RAY}), cores=8) == 8, "none is counted on this host"
    assert threads_of(make_recipe({**settings, **JOINS}), "engine", cores=8) == 4, "engines alone are on this host"


def test_engines_have_the_gpus_of_a_host_that_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = {"engine.count": 2, "train.parallel.shard": 16}
    assert [device_of(make_recipe({**ranks, **JOINS}), "engine", index) for index in range(2)] == ["cuda:0", "cuda:1"]
    check_ranks(make_recipe({**ranks, **JOINS}))
    assert not shares_device(make_recipe({**ranks, **JOINS}))


def test_engines_that_ray_places_share_no_device_with_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert shares_device(make_recipe({})) and not shares_device(make_recipe(ON_RAY))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert shares_device(make_recipe({})) and not shares_device(make_recipe(ON_RAY))


def test_a_launcher_needs_no_gpu_if_ray_places_all_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = {"device": "cuda", "cluster.listen": "127.0.0.1:0"}
    assert choose_device(make_recipe({**settings, "orchestrate": "ray"})) == "cpu"
    sft = {"sft.steps": 1, "sft.tasks": [{"source": "builtin:sort_digits"}]}
    assert choose_device(make_recipe({**settings, "engine.count": 0, "cluster.trainer_joins": True})) == "cpu"
    for more in ({"orchestrate": "ray", **sft}, {"cluster.trainer_joins": True}, {"engine.count": 0}):
        with pytest.raises(ConfigError, match="device = 'cuda': torch sees no GPU"):
            choose_device(make_recipe({**settings, **more}))


def test_the_spare_engine_has_the_trainers_device_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    lent, threads = {"engine.lend": True}, {"train.threads": 5, "engine.threads": 2}
    assert lends(make_recipe(lent)) and not lends(make_recipe({})) and not why_not_lent(make_recipe({}))
    assert placement("engine", LENT, **lent, **threads).threads == 5
    assert "one process" in why_not_lent(make_recipe({**lent, "orchestrate": "inline"}))
    assert "'vllm'" in why_not_lent(make_recipe({**lent, "engine.kind": "vllm"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    placed = placement("engine", LENT, **lent)
    assert lends(make_recipe(lent)) and placed.device == placed.receives_on == "cuda:0"
    assert "a GPU for each end" in why_not_lent(make_recipe({"preset": "verl"}))
    assert lends(make_recipe({"preset": "verl", "sync.transport": "auto"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "already" in why_not_lent(make_recipe(lent)), "one GPU"
