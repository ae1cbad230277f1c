"""Weights that leave the ranks of a trainer in parts: each rank offers its ranges, the engine puts them together."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from headrace.errors import SyncError
from headrace.model import ShardedWeights, StagedWeights, lay_out
from headrace.model.weights import checksum, describe, named_tensors
from headrace.records import WeightUpdate, frames
from headrace.sync import Lineage, TransportConfig, WeightSync, is_pushed, make_transport, table, transport_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

BETWEEN = [name for name in table.TRANSPORTS if table.transport_class(name).crosses_processes]


def share(weights: Mapping[str, Tensor], rank: int, count: int) -> ShardedWeights:
    """A rank's share, cut as from one flat block: some tensors whole, some in ranges, some not at all."""
    total, words = sum(tensor.numel() for tensor in weights.values()), 8
    first, last = (place * total // count // words * words if place < count else total for place in (rank, rank + 1))
    ranges, at = [], 0
    for name, tensor in weights.items():
        start, stop = (min(max(place - at, 0), tensor.numel()) for place in (first, last))
        start, stop = -(-start // words) * words, stop if stop == tensor.numel() else -(-stop // words) * words
        if start < min(stop, tensor.numel()):
            stop = min(stop, tensor.numel())
            ranges.append((name, start, stop, tensor.reshape(-1)[start:stop]))
        at += tensor.numel()
    return ShardedWeights(lay_out(describe(weights)), ranges)


class Run:
    """Senders of some ranks and one receiver, of one transport and payload."""

    def __init__(self, transport: str, folder: Path, *, payload: str = "full", count: int = 2) -> None:
        config = TransportConfig(transport, str(folder), "headrace-t", "127.0.0.1", "t" * 32, 5.0)
        device = "cuda:0" if transport_class(transport).needs_gpu else "cpu"
        self.count = count
        self.ranks = [
            WeightSync(
                Lineage("life"),
                make_transport(config, is_sender=True, device=device),
                payload=payload,
                name=f"trainer-{rank}",
            )
            for rank in range(count)
        ]
        receiving = make_transport(config, is_sender=False, device=device)
        self.engine = WeightSync(Lineage("life"), receiving, payload=payload, name="engine-0")
        self.model = make_model().to(device)
        self.spare = StagedWeights(self.model)

    def offer(self, version: int, weights: Mapping[str, Tensor], *, whole: bool = False) -> WeightUpdate:
        offered = [rank.offer(version, share(weights, place, self.count), whole=whole) for place, rank in enumerate(self.ranks)]
        return frames.decode(frames.encode(WeightUpdate.join(offered)))

    def receive(self, update: WeightUpdate) -> None:
        def send() -> None:  # one after the other, in the order of the parts
            for rank in self.ranks:
                with contextlib.suppress(SyncError):  # which the receiver reports too
                    rank.send(update, ["engine-0"])

        sending = threading.Thread(target=send)
        if is_pushed(update):
            sending.start()
        try:
            (own,) = table.routed(update, [self.engine.relay])
            assert self.spare.receive(own, partial(self.engine.receive, own)) == update.manifest
        finally:
            if is_pushed(update):
                sending.join()
        self.spare.exchange()

    def release(self, update: WeightUpdate) -> None:
        for rank in self.ranks:
            rank.release(update)

    def close(self) -> None:
        for sync in (self.engine, *self.ranks):
            sync.close()


def make_model() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(40, 30), "norm": nn.LayerNorm(30), "last": nn.Linear(30, 21)})


def new_weights(seed: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).to(device) for name, t in named_tensors(make_model())}


@pytest.fixture
def run_of(tmp_path) -> Iterator:
    runs = []

    def make(transport: str, **more) -> Run:
        if transport_class(transport).needs_gpu and not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        runs.append(Run(transport, tmp_path, **more))
        return runs[-1]

    yield make
    for each in runs:
        each.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("payload", table.PAYLOADS)
@pytest.mark.parametrize("transport", BETWEEN)
def test_every_transport_brings_the_shares_of_three_ranks_together(run_of, transport, payload):
    run = run_of(transport, payload=payload, count=3)
    device = next(run.model.parameters()).device
    weights = new_weights(0, device)
    for version in range(4):
        update = run.offer(version, weights, whole=version == 2)
        assert [part.sender for part in update.parts] == ["trainer-0", "trainer-1", "trainer-2"]
        assert update.payload == (payload if version not in (0, 2) else "full")
        assert [info.checksum for info in update.manifest] == [checksum(tensor) for tensor in weights.values()]
        run.receive(update)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in named_tensors(run.model))
        run.release(update)
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        weights["first.weight"].view(-1)[version * 300 :: 7] += 0.5  # some elements of some ranks
    late = WeightUpdate.join([rank.catch_up(None)[0] for rank in run.ranks])
    assert (late.version, late.base_version, len(late.parts)) == (3, None, 3)
    run.spare = StagedWeights(make_model().to(device))
    run.receive(late)


def test_an_engine_keeps_a_group_with_each_rank_and_leaves_those_of_ranks_that_are_gone(run_of):
    run, groups = run_of("collective"), []
    for version in range(2):
        run.receive(run.offer(version, new_weights(version)))
        groups.append(set(run.engine._transport.groups.values()))
    assert groups[0] == groups[1] and len(groups[0]) == 2
    other = run_of("collective")
    run.ranks, other.ranks = other.ranks, run.ranks  # as after a restart
    run.receive(run.offer(2, new_weights(2)))
    assert groups[0].isdisjoint(run.engine._transport.groups.values())


def test_a_rank_that_lost_its_share_is_named_and_the_next_attempt_succeeds(run_of):
    run = run_of("shared_memory")
    update = run.offer(1, new_weights(1))
    run.ranks[1].abort(update)
    with pytest.raises(SyncError, match=r"version 1 over shared_memory: from trainer-1: it is not on offer"):
        run.receive(update)
    run.ranks[0].abort(update)
    run.receive(run.offer(1, new_weights(1), whole=True))


def test_an_update_that_lacks_a_part_or_reaches_beyond_a_tensor_is_refused(run_of):
    run = run_of("shared_memory")
    update = run.offer(1, new_weights(1))
    run.spare._staging = run.spare.arena.like()
    for missing in range(2):
        run.spare._staging.memory.zero_()  # lest it still holds the right weights
        with pytest.raises(SyncError, match="differs from what was sent"):
            run.receive(replace(update, parts=(update.parts[missing],)))
    name, start, _ = update.parts[0].ranges[0]
    beyond = replace(update.parts[0], ranges=((name, start, 10**6),))
    with pytest.raises(SyncError, match=r"version 1 over shared_memory: it has no elements 0 to 1000000 of tensor"):
        run.receive(replace(update, parts=(beyond, update.parts[1])))
    run.receive(update)


def test_a_relay_serves_all_parts_of_an_update_until_the_next(run_of, tmp_path):
    run = run_of("http")
    child = run_of("http")
    for rank in child.ranks:
        rank.close()
    for version in range(2):
        weights = new_weights(version)
        update = run.offer(version, weights)
        run.receive(update)
        for rank in run.ranks:  # the child has the relay alone to read from
            rank._transport._buffers.close() if version else None
        relayed = table.routed(update, [run.engine.relay] * 3)[2]
        assert [part.place["sources"][0] for part in relayed.parts] == [run.engine.relay] * 2
        child.receive(relayed)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in named_tensors(child.model))
    assert len(run.engine._transport._buffers.held) == 2, "those of the last update"


def test_ranges_that_do_not_make_a_whole_are_refused(run_of):
    run = run_of("shared_memory", payload="delta")
    weights = new_weights(0)
    shares = [share(weights, rank, 2) for rank in range(2)]
    short = ShardedWeights(shares[1].slots, shares[1].ranges[:-1])
    one, two = run.ranks[0].offer(0, shares[0]), run.ranks[1].offer(0, short)
    with pytest.raises(ValueError, match=r"ranges of tensor 'last\.bias' end at element 0"):
        WeightUpdate.join([one, two])
    with pytest.raises(ValueError, match="is covered up to"):
        WeightUpdate.join([one, one])
    run.ranks[0].release(one)
    with pytest.raises(ValueError, match="different things"):
        WeightUpdate.join([run.ranks[0].offer(1, shares[0]), run.ranks[1].offer(1, shares[1])])
    odd = ShardedWeights(shares[0].slots, [("first.weight", 1, 5, weights["first.weight"].view(-1)[1:5])])
    with pytest.raises(SyncError, match="cut at element 1, which is no multiple of 8 bytes"):
        run.ranks[0].offer(2, odd)
    assert run.ranks[0].offer(2, ShardedWeights(shares[0].slots, [])).parts == ()


def test_a_rank_holds_its_share_alone_and_no_byte_travels_twice(run_of):
    """What publishing adds to a rank's peak memory ÷ its share ≤ 1.1; bytes sent ÷ bytes of the weights ≤ 1.05. A checksum
    takes a few megabytes, whatever the size of the weights, so these are large."""
    matrix, count = torch.ones(1024, 2048), 4
    weights = {f"layers.{place}.weight": matrix for place in range(96)} | {"norm": torch.ones(2048)}  # one memory for all
    total, run = sum(tensor.nbytes for tensor in weights.values()), run_of("shared_memory", count=count)
    offered = []
    for rank, sync in enumerate(run.ranks):
        mine = share(weights, rank, count)
        before = peak_after(lambda: None)
        peak = peak_after(lambda sync=sync, mine=mine: offered.append(sync.offer(0, mine)))
        sync.close()
        print(f"rank {rank} of {count} adds {(peak - before) * count / total:.3f} of its share to its peak")
        assert peak - before <= 1.1 * total / count
    update = WeightUpdate.join(offered)
    print(f"{update.num_bytes / total:.6f} of the weights' bytes are sent")
    assert update.num_bytes <= 1.05 * total == 1.05 * update.manifest.total_bytes


def peak_after(action) -> int:
    """The most memory of this process while `action` runs, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    action()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
