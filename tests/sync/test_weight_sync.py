"""What a sender makes of weights, whatever carries them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.errors import SyncError
from headrace.model.arena import Arena, lay_out
from headrace.model.weights import Incoming, SpareWeights, named_tensors
from headrace.records import Payload
from headrace.sync import Ends, Lineage, MemoryTransport, WeightSync


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
    assert kinds == [(Payload.FULL, None), (Payload.DELTA, 0), (Payload.FULL, None), (Payload.DELTA, 1)]


def test_weights_of_a_kind_that_has_no_difference_travel_whole(weights):
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    for version in range(3):
        update = sync.offer(version, {**weights, "steps": torch.tensor([version])}.items())
        sync.release(update)
        assert update.payload is Payload.FULL


def test_weights_that_are_not_finite_are_not_published_and_leave_no_room_behind(weights):
    sync = WeightSync(Lineage("life"), MemoryTransport())
    weights["norm"][3] = float("nan")
    with pytest.raises(SyncError, match="'norm' holds NaN"):
        sync.offer(0, weights.items())
    assert not sync._offered and not sync._transport._rooms._held


def test_an_update_that_is_given_up_here_ends_at_its_next_piece_and_the_one_after_it_is_taken():
    model = torch.nn.Linear(4, 4)
    sync, spare = WeightSync(Lineage("life"), MemoryTransport()), SpareWeights(model)
    update = sync.offer(1, [(name, tensor + 1) for name, tensor in named_tensors(model)])

    def bring(incoming: Incoming) -> None:
        spare.give_up()
        sync.receive(update, incoming)

    with pytest.raises(SyncError, match="version 1 was given up here"):
        spare.receive(update, bring)
    with pytest.raises(SyncError, match="no weights lie ready"):
        spare.exchange()
    assert spare.receive(update, partial(sync.receive, update)) == update.manifest


# What the wire says


@pytest.mark.parametrize("size", [-1, 10**15, "many", None])
def test_a_difference_of_a_size_it_cannot_have_is_refused_before_memory_is_taken(weights, size):
    sync = WeightSync(Lineage("life"), MemoryTransport(), payload="delta")
    sync.release(sync.offer(0, weights.items()))
    update = sync.offer(1, weights.items())
    arena = Arena(lay_out(update.manifest), device=torch.device("cpu"))
    incoming = Incoming(arena, running=arena, check=lambda: None)
    with pytest.raises(SyncError, match=r"version 1 over memory: .* bytes are no difference of"):
        sync.receive(replace(update, place={**update.place, "parcel": size}), incoming)


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
    ends = Ends(transport=transport, folder=str(tmp_path), prefix="t", host="", token="", deadline=0.2)
    receiver = ends.make(is_sender=False, device="cpu")

    def looked(*_: object, **__: object) -> None:
        raise AssertionError("it was looked at")

    refused = pytest.raises(SyncError, match=r"is no place in shared memory|is not the name of a file of weights")
    with monkeypatch.context() as patch, refused:
        patch.setattr(Path, "open", looked)
        patch.setattr(Path, "stat", looked)
        receiver.fetch(place, None, receiver="engine-0")
