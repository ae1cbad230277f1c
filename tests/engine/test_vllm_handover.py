"""How new weights get into a server by its weight-transfer interface: in which order it is told, and what ends with what.

The other end of the transfer itself is in `test_vllm_nccl_broadcast.py`, and on a GPU in the contract suite.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading

import pytest
import torch
from fake_vllm import OLD, Fake, engine_over

from headrace.engine.protocol import EngineDied
from headrace.engine.vllm import handover
from headrace.engine.vllm.handover import saved_form
from headrace.engine.vllm.nccl import NcclHandover
from headrace.errors import SyncError
from headrace.model.load import load_model
from headrace.model.weights import named_tensors
from headrace.sync import Lineage, MemoryTransport, WeightSync

CALLS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


class Sender(NcclHandover):
    """In the place of NCCL: notes what it is given, and blocks or fails as it is told."""

    def __init__(self):
        self.sent, self.aborted = [], ""
        self.failure = ""
        self.is_stuck = False
        self._ended = threading.Event()

    def init_info(self, num_workers, release):
        return {"workers": num_workers, "release": release}

    def update_info(self, tensors):
        return {"names": list(tensors)}

    def join(self):
        pass

    def send(self, tensors):
        if self.failure:
            raise SyncError(self.failure)
        if self.is_stuck:
            assert self._ended.wait(20)
            raise SyncError(self.aborted)
        self.sent.append({name: tensor.clone() for name, tensor in tensors.items()})

    def close(self, reason="closed"):
        self.aborted = self.aborted or reason
        self._ended.set()


@pytest.fixture
def over(tiny_model):
    """Opens an engine over a fake server that hands over by NCCL: (engine, publish, the source's model, the sender)."""

    @contextlib.asynccontextmanager
    async def opening(fake):
        sync, source, way = WeightSync(Lineage("life"), MemoryTransport()), load_model(tiny_model), Sender()
        async with engine_over(fake, load_model(tiny_model), sync=sync, handover=way) as engine:

            async def publish(version):
                with torch.no_grad():
                    for _, tensor in named_tensors(source):
                        tensor.add_(1)
                update = sync.offer(version, named_tensors(source))
                await engine.load(update)
                sync.release(update)

            yield engine, publish, source, way

    return opening


def asked_of(fake):
    return [path for path, _ in fake.asked if path in CALLS]


async def test_what_is_broadcast_is_what_was_received_in_the_form_of_a_folder(over):
    fake = Fake(version=OLD)
    async with over(fake) as (engine, publish, source, sender):
        assert asked_of(fake) == [CALLS[0]]
        assert dict(fake.asked)[CALLS[0]] == {"init_info": {"workers": 2, "release": OLD}}
        for version in (0, 1):
            await publish(version)
            expected = saved_form(source)
            assert sender.sent[-1].keys() == expected.keys()
            assert all(torch.equal(sender.sent[-1][name], tensor) for name, tensor in expected.items())
        assert asked_of(fake) == [CALLS[0], *CALLS[1:], *CALLS[1:]] and engine.version == 1
        assert dict(fake.asked)[CALLS[2]] == {"update_info": {"names": list(expected)}}
        paused = [path for path, _ in fake.asked if path in ("/pause", "/resume", "/update_weights")]
        assert paused == ["/pause", "/update_weights", "/resume"] * 2


@pytest.mark.parametrize("path", CALLS[1:])
async def test_a_server_that_fails_ends_the_sending_and_the_engine(over, path):
    fake = Fake(version=OLD)
    async with over(fake) as (engine, publish, _, sender):
        await publish(0)
        fake.failing.add(path)
        sender.is_stuck = path != CALLS[3]
        with pytest.raises(EngineDied, match=rf"version 1 did not get into the server: .*{path}.*the disk is full"):
            await publish(1)
        assert engine.version == 0 and engine.died.done()
        assert "the disk is full" in sender.aborted


async def test_a_broadcast_that_fails_does_not_wait_for_the_server(over):
    async with over(Fake(version=OLD, hanging={"/update_weights"})) as (engine, publish, _, sender):
        sender.failure = "a worker is gone"
        with pytest.raises(EngineDied, match="version 0 did not get into the server: a worker is gone"):
            await publish(0)
        assert engine.died.done()


def test_handles_arrive_as_they_were_written():
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    storage = tensor._typed_storage()
    parts = (
        type(tensor),
        tensor.size(),
        tensor.stride(),
        7,
        type(storage),
        tensor.dtype,
        0,
        b"handle",
        24,
        0,
        False,
        b"c",
        1,
        b"",
        False,
    )
    handles = [{"GPU-1": parts}, {"GPU-1": parts}]
    assert pickle.loads(base64.b64decode(handover._written(handles))) == handles
