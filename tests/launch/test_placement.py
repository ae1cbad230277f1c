"""Where the launcher puts processes, and that they are told all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.config import make_recipe
from headrace.launch.placement import Order, Placement, place_on_this_host
from headrace.sync import TransportConfig

if TYPE_CHECKING:
    import pytest


def placement(role: str, index: int, **settings: object) -> Placement:
    recipe = make_recipe({"threads": 3, "sync.host": "127.0.0.2", **settings})
    name = f"{role}-{index}"
    return place_on_this_host(recipe, role, index, name=name, run_folder=Path("runs/x"), shared_folder=Path("/dev/shm"))


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
