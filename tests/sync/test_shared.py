"""Weights through shared memory: what arrives is what was sent, or it is refused and nothing has changed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from headrace import leftovers
from headrace.errors import SyncError
from headrace.model.arena import Arena, lay_out
from headrace.model.weights import StagedWeights, WeightError, named_tensors
from headrace.sync import Lineage, SharedMemoryTransport, TransportConfig, WeightSync, transport_class
from headrace.sync.transport import check_space

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from headrace.records import WeightUpdate

ODD: dict[str, Tensor] = {
    "matrix": torch.randn(33, 17),
    "half": torch.randn(5, 3).bfloat16(),
    "steps": torch.tensor([2**62, -1], dtype=torch.int64),
    "scalar": torch.tensor(2.5),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 4),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "last": torch.randn(1),
}


class Landing:
    """A target in this process."""

    def __init__(self, update: WeightUpdate) -> None:
        self.arena = Arena(lay_out(update.manifest), device=torch.device("cpu"))
        self.num_bytes, self.views = self.arena.num_bytes, self.arena.views

    def write(self, start: int, piece: Tensor) -> None:
        self.arena.memory[start : start + len(piece)].copy_(piece)

    def check(self) -> None:
        """It is wanted."""


class BothEnds:
    """A sender and a receiver that share nothing but a prefix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        transports = [SharedMemoryTransport(prefix="weights", folder=folder) for _ in range(2)]
        self.transport = transports[0]
        self.sender, self.receiver = (WeightSync(Lineage("life"), transport) for transport in transports)

    def send(self, version: int, tensors: dict[str, Tensor]) -> WeightUpdate:
        return self.sender.offer(version, tensors.items())

    def receive(self, update: WeightUpdate) -> dict[str, Tensor]:
        landing = Landing(update)
        self.receiver.receive(update, landing)  # type: ignore[arg-type]
        return dict(landing.views)

    def fill(self, spare: StagedWeights, update: WeightUpdate) -> None:
        spare.receive(update, partial(self.receiver.receive, update))

    def segment(self, update: WeightUpdate) -> Path:
        return self.folder / f"weights-{update.parts[0].key}"


@pytest.fixture
def ends(tmp_path):
    ends = BothEnds(tmp_path)
    yield ends
    ends.receiver.close()
    ends.sender.close()
    assert not list(tmp_path.glob("weights-*"))


class Small(torch.nn.Module):
    """Tied weights, a buffer and a dtype beside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(6)
        self.register_buffer("count", torch.tensor(3))


def changed(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor + seed
        for name, tensor in named_tensors(model)
    }


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def copied(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(model)}


# The segments


def test_every_kind_of_tensor_arrives_as_it_was(ends):
    update = ends.send(0, ODD)
    assert equal(ends.receive(update), ODD)
    assert update.parts[0].transport == "shared_memory" and update.lineage == "life"
    assert stat.S_IMODE(ends.segment(update).stat().st_mode) == 0o600
    nothing = ends.send(1, {})
    assert ends.receive(nothing) == {}


def test_the_newest_version_stays_readable_while_the_next_is_written_into_other_memory(ends):
    tensors = [{"a": torch.full((1000,), float(version))} for version in range(4)]
    zero = ends.send(0, tensors[0])
    ends.sender.release(zero)
    one = ends.send(1, tensors[1])
    assert equal(ends.receive(zero), tensors[0]) and equal(ends.receive(one), tensors[1])
    ends.sender.release(one)
    with pytest.raises(SyncError, match=r"version 0 .* is not on offer"):
        ends.receive(zero)
    inodes = {path.stat().st_ino for path in ends.folder.iterdir()}
    two = ends.send(2, tensors[2])
    assert equal(ends.receive(one), tensors[1]) and equal(ends.receive(two), tensors[2])
    ends.sender.release(two)
    ends.sender.release(ends.send(3, tensors[3]))
    assert len(inodes) == 2 and {path.stat().st_ino for path in ends.folder.iterdir()} == inodes, "memory is used again"


def test_what_is_read_before_is_mapped_once(ends):
    for version in range(6):
        update = ends.send(version, {"a": torch.full((1000,), float(version))})
        assert ends.receive(update)["a"][0] == version
        ends.sender.release(update)
    assert len(ends.receiver._transport._mapped) == 2


def test_an_update_larger_than_the_last_gets_a_segment_of_its_own_size(ends):
    for version in range(2):  # the first is spare then
        ends.sender.release(ends.send(version, {"a": torch.ones(8)}))
    large = {"a": torch.randn(1 << 16)}
    update = ends.send(2, large)
    assert equal(ends.receive(update), large)
    ends.sender.release(update)
    small = ends.send(3, {"a": torch.ones(8)})
    assert equal(ends.receive(small), {"a": torch.ones(8)})


def test_what_is_given_up_is_on_offer_no_more_and_a_later_version_is_not_taken_with_it(ends):
    zero, one = ends.send(0, ODD), ends.send(1, ODD)
    ends.sender.abort(one)
    with pytest.raises(SyncError, match="version 1 over shared_memory: it is not on offer"):
        ends.receive(one)
    assert equal(ends.receive(zero), ODD)
    two = ends.send(2, ODD)
    ends.sender.abort(zero)
    ends.sender.abort(zero)
    assert equal(ends.receive(two), ODD)
    assert equal(ends.receive(ends.send(3, ODD)), ODD)


def test_a_killed_senders_segments_can_be_removed(ends, tmp_path):
    ends.send(0, ODD)
    (tmp_path / "other-0").write_text("")
    leftovers.remove(tmp_path, "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["other-0"]
    assert equal(ends.receive(ends.send(1, ODD)), ODD), "what cleans up temporary files does not end a run"


# No room


def test_no_room_is_an_error_that_says_where_how_much_and_what_to_do(ends, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SyncError) as caught:
            ends.send(0, {"a": torch.zeros(1_000_000)})
    message = str(caught.value)
    assert str(ends.folder) in message and "need 8 MB there (2 versions of 4 MB)" in message and "MB free" in message
    assert "remount,size=" in message and "--shm-size" in message and "sync.folder" in message and "No space left" in message
    assert not list(ends.folder.iterdir())
    assert equal(ends.receive(ends.send(0, ODD)), ODD), "with room again it goes on"


def test_a_limit_of_the_system_is_met_when_the_segment_is_made(tmp_path):
    script = f"""
import resource, torch
from pathlib import Path
from headrace.errors import SyncError
from headrace.sync import Lineage, SharedMemoryTransport, WeightSync
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sync = WeightSync(Lineage("life"), SharedMemoryTransport(prefix="weights", folder=Path({str(tmp_path)!r})))
try:
    sync.offer(0, [("a", torch.zeros(1 << 20))])
except SyncError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "File too large" in done.stdout and str(tmp_path) in done.stdout, done
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_seen_beforehand(tmp_path):
    check_space(tmp_path, 1000)
    with pytest.raises(SyncError, match=r"MB free and the weights need 2,000,000,000 MB"):
        check_space(tmp_path, 10**15)
    config = TransportConfig(transport="http", folder=str(tmp_path), prefix="x", host="", token="", deadline=1)
    transport_class("http").check_space(config, 10**15)
    with pytest.raises(SyncError, match=r"the weights need 1,000,000,000 MB there .1 versions"):
        transport_class("http").check_space(config, 10**15, beside=1)
    with pytest.raises(SyncError, match=r"sync\.folder = .*: there is no such folder"):
        check_space(tmp_path / "nowhere", 1)


# The receipt


@pytest.mark.parametrize("fault", ["flipped", "missing", "cut", "overwritten"])
def test_what_differs_from_its_manifest_changes_nothing(ends, fault):
    model = Small()
    spare, before = StagedWeights(model), copied(model)
    update = ends.send(1, changed(model, 1))
    segment = ends.segment(update)
    if fault == "flipped":
        ends.transport.bytes_of(update.parts[0].key)[100] ^= 128
    elif fault == "missing":
        segment.unlink()
    elif fault == "cut":
        segment.write_bytes(segment.read_bytes()[:-64])
    else:
        segment.write_bytes(ends.segment(ends.send(3, changed(model, 3))).read_bytes())
    with pytest.raises((WeightError, SyncError), match="version 1"):
        ends.fill(spare, update)
    with pytest.raises(WeightError, match="no weights lie ready"):
        spare.exchange()
    assert equal(copied(model), before)
    whole = changed(model, 5)
    ends.fill(spare, ends.send(5, whole))
    spare.exchange()
    assert equal(copied(model), whole), "a good one after a bad one is taken"


def test_tensors_in_another_order_arrive_all_the_same(ends):
    model = Small()
    spare, new = StagedWeights(model), changed(model, 1)
    update = ends.send(1, dict(reversed(new.items())))
    ends.fill(spare, update)
    spare.exchange()
    assert equal(copied(model), new)
