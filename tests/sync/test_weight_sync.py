"""What a sender makes of weights, whatever carries them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from headrace.errors import LinkError, SyncError
from headrace.model.arena import Arena, lay_out
from headrace.model.weights import StagedWeights, StagingBuffer, named_tensors
from headrace.records import WeightUpdate
from headrace.sync import Lineage, MemoryTransport, TransportConfig, WeightSync, make_transport, table, transport_class


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"matrix": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "norm": torch.ones(9)}


def test_the_same_version_again_is_no_difference_from_itself(weights):
    """As at the beginning of a leg: an engine that was started meanwhile could not take one."""
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    kinds = []
    for version in (0, 1, 1, 2):
        update = sync.offer(version, weights.items())
        sync.release(update)
        kinds.append((update.payload, update.base_version))
    assert kinds == [("full", None), ("delta", 0), ("full", None), ("delta", 1)]


def test_weights_of_a_kind_that_has_no_difference_travel_whole(weights):
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    for version in range(3):
        update = sync.offer(version, {**weights, "steps": torch.tensor([version])}.items())
        sync.release(update)
        assert update.payload == "full"


def test_weights_that_are_not_finite_are_not_published_and_leave_no_room_behind(weights):
    sync = WeightSync(Lineage("life"), MemoryTransport())
    weights["norm"][3] = float("nan")
    with pytest.raises(SyncError, match="'norm' holds NaN"):
        sync.offer(0, weights.items())
    assert not sync._offered and not sync._transport._held


def test_a_link_that_fails_is_known_as_one_whoever_names_it(weights, monkeypatch):
    sync, spare = WeightSync(Lineage("life"), MemoryTransport()), StagedWeights(torch.nn.Linear(4, 4))
    update = sync.offer(1, [(name, tensor + 1) for name, tensor in named_tensors(torch.nn.Linear(4, 4))])
    update = replace(update, parts=tuple(replace(part, sender="trainer-0") for part in update.parts))

    def fails(*_: object, **__: object) -> None:
        raise LinkError("it has sent nothing")

    monkeypatch.setattr(sync._transport, "fetch", fails)
    with pytest.raises(LinkError, match="version 1 over memory: from trainer-0: it has sent nothing"):
        spare.receive(update, lambda incoming: sync.receive(update, incoming))


def test_an_update_that_is_given_up_here_ends_at_its_next_piece_and_the_one_after_it_is_taken():
    model = torch.nn.Linear(4, 4)
    sync, spare = WeightSync(Lineage("life"), MemoryTransport()), StagedWeights(model)
    update = sync.offer(1, [(name, tensor + 1) for name, tensor in named_tensors(model)])

    def bring(incoming: StagingBuffer) -> None:
        spare.give_up()
        sync.receive(update, incoming)

    with pytest.raises(SyncError, match="version 1 was given up here"):
        spare.receive(update, bring)
    with pytest.raises(SyncError, match="no weights lie ready"):
        spare.exchange()
    assert spare.receive(update, partial(sync.receive, update)) == update.manifest


# What the wire says


@pytest.mark.parametrize("size", [10**9, 10**15])
def test_a_difference_of_a_size_it_cannot_have_is_refused_before_memory_is_taken(weights, size):
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    sync.release(sync.offer(0, weights.items()))
    update = sync.offer(1, weights.items())
    arena = Arena(lay_out(update.manifest), device=torch.device("cpu"))
    incoming = StagingBuffer(arena, running=arena, check=lambda: None)
    with pytest.raises(SyncError, match=r"version 1 over memory: .* bytes are no difference of"):
        sync.receive(replace(update, parts=(replace(update.parts[0], num_bytes=size),)), incoming)


@pytest.mark.parametrize(
    ("transport", "place"),
    [
        ("shared_memory", {"key": "1/../../other", "bytes": 4}),
        ("files", {"file": "../outside.safetensors", "bytes": 4}),
        ("files", {"file": "/tmp/outside.safetensors", "bytes": 4}),
        ("files", {"file": "passwords.txt", "bytes": 4}),
    ],
)
def test_a_place_outside_the_folder_is_refused_and_not_looked_at(transport, place, tmp_path, monkeypatch):
    ends = TransportConfig(transport=transport, folder=str(tmp_path), prefix="t", host="", token="", deadline=0.2)
    receiver = make_transport(ends, is_sender=False, device="cpu")

    def looked(*_: object, **__: object) -> None:
        raise AssertionError("it was looked at")

    refused = pytest.raises(SyncError, match=r"is no place in shared memory|is not the name of a file of weights")
    with monkeypatch.context() as patch, refused:
        patch.setattr(Path, "open", looked)
        patch.setattr(Path, "stat", looked)
        receiver.fetch(place, None, receiver="engine-0")


# A transport of one's own


class Pigeon(MemoryTransport):
    """A transport of one's own: whatever is posted, any end of this process can fetch."""

    name = "pigeon"
    crosses_processes = True
    is_pushed = True
    sent: ClassVar[dict[str, torch.Tensor]] = {}

    def post(self, key, views):
        self.sent[key] = self.bytes_of(key).clone()
        return super().post(key, views)

    def push(self, key, receivers):
        self.sent["to " + " ".join(receivers)] = self.sent[key]

    def fetch(self, place, target, *, receiver):
        target.write(0, self.sent[place["key"]])

    @classmethod
    def routes(cls, part, relays):
        return [replace(part, place={**part.place, "relay": relay}) for relay in relays]


@pytest.mark.parametrize("payload", ["full", "delta"])
def test_a_transport_of_ones_own_needs_a_line_in_the_table_and_nothing_else(monkeypatch, payload):
    monkeypatch.setitem(table.TRANSPORTS, "pigeon", f"{__name__}:Pigeon")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Pigeon.__module__])
    config = TransportConfig(transport="pigeon", folder="", prefix="p", host="", token="", deadline=1.0)
    sender, receiver = (make_transport(config, is_sender=is_sender, device="cpu") for is_sender in (True, False))
    trainer, engine = (WeightSync(Lineage("life"), transport, payload=payload) for transport in (sender, receiver))
    model = torch.nn.Linear(64, 64)
    spare = StagedWeights(model)
    tensors = {name: tensor.clone() for name, tensor in named_tensors(model)}
    for version in range(2):
        tensors["weight"][version] += 1
        update = trainer.offer(version, tensors.items())
        assert table.is_pushed(update)
        assert [each.parts[0].place["relay"] for each in table.routed(update, ["a", "b"])] == ["a", "b"]
        trainer.send(update, ["engine-0"])
        spare.receive(update, partial(engine.receive, update))
        spare.exchange()
        trainer.release(update)
    assert update.payload == payload and torch.equal(model.weight, tensors["weight"]) and "to engine-0" in Pigeon.sent
    assert transport_class("pigeon").memory(10, on_gpu=False).trainer == 20


def test_unknown_choices_are_refused_by_name():
    with pytest.raises(SyncError, match="'owl' is no transport; known are memory, shared_memory"):
        transport_class("owl")
    update = WeightUpdate(policy="p", lineage="l", version=1, payload="parrot")
    with pytest.raises(SyncError, match="'parrot' is no payload; known are full, delta"):
        WeightSync(Lineage("life"), MemoryTransport()).receive(update, None)
