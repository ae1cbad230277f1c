"""One update by two routes: engines on the trainer's host take it from shared memory, those on others over HTTPS."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from far import Receiver, Sender, make_sync

from headrace.errors import SyncError
from headrace.sync import TransportConfig, resolve_transport, routed, transport_class
from headrace.tls import make_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator


class Run:
    """A trainer, two engines on its host and three on others, which share no folder with it."""

    def __init__(self, folder, payload: str) -> None:
        here, there = folder / "here", folder / "there"
        here.mkdir()
        config = TransportConfig(
            "shared_memory+http", str(here), "headrace-t", "127.0.0.1", "t" * 32, 5.0, certificate=make_certificate()
        )
        far = replace(config, transport=transport_class(config.transport).between_hosts, folder=str(there))
        self.trainer = Sender(make_sync(config, payload=payload, is_sender=True, name="trainer"))
        self.near = [Receiver(make_sync(config, payload=payload, is_sender=False, name=f"near-{each}")) for each in range(2)]
        self.far = [Receiver(make_sync(far, payload=payload, is_sender=False, name=f"far-{each}")) for each in range(3)]
        self.engines = [self.far[0], self.near[0], self.far[1], self.near[1], self.far[2]]

    def route(self, update) -> list:
        return list(zip(self.engines, routed(update, [engine.sync.relay for engine in self.engines]), strict=True))

    def close(self) -> None:
        for each in (self.trainer, *self.engines):
            each.sync.close()


@pytest.fixture(params=["full", "delta"])
def run(request, tmp_path) -> Iterator[Run]:
    made = Run(tmp_path, request.param)
    yield made
    made.close()
    assert not list((tmp_path / "here").iterdir()) and not (tmp_path / "there").exists()


def test_each_engine_gets_the_update_by_its_own_route(run):
    for version in range(1, 4):
        update = run.trainer.offer(version)
        for engine, own in run.route(update):
            (part,) = own.parts
            assert part.transport == ("http" if engine in run.far else "shared_memory")
            assert own.manifest == update.manifest, "one receipt for all"
            engine.spare.receive(own, lambda into, engine=engine, own=own: engine.sync.receive(own, into))
            engine.spare.exchange()
            assert engine.held["sums"] == run.trainer.sums
        run.trainer.sync.release(update)
        (part,) = update.parts
        served = run.trainer.sync._transport._far.bytes_served
        run.trainer.sync._transport._far._server.bytes_served = 0
        assert served == 2 * part.num_bytes, "the third has it from the first; those on this host ask for none"


def test_what_is_served_is_what_lies_in_shared_memory(run):
    update = run.trainer.offer(1)
    transport, key = run.trainer.sync._transport, update.parts[0].key
    served = transport._far._buffers.held[key].bytes
    assert served.data_ptr() == transport._near.bytes_of(key).data_ptr(), "no copy"


def test_an_update_that_is_given_up_is_found_by_neither_route(run):
    update = run.trainer.offer(1)
    routes = run.route(update)
    run.trainer.sync.abort(update)
    for engine, own in routes[:2]:
        with pytest.raises(SyncError, match=f"version 1 over {own.parts[0].transport}"):
            engine.load(own)
    again = run.trainer.offer(1, whole=True)
    for engine, own in run.route(again):
        engine.load(own)
        assert engine.held["sums"] == run.trainer.sums


def test_auto_chooses_by_where_engines_are():
    def chosen(**more) -> str:
        return resolve_transport("auto", is_one_process=False, **{"shares_gpu": False, "between_hosts": True, **more})

    assert chosen() == "shared_memory+http" and chosen(shares_gpu=True) == "cuda_ipc+http"
    assert chosen(on_this_host=False) == "http" and chosen(between_hosts=False) == "shared_memory"
