"""Weights over NCCL to vLLM's workers, without a GPU: the handshake and the packing against vLLM's own code, the rest against
a library that does as it is told."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import socket
import subprocess
import threading
import time

import pytest
import torch
from vllm_server import VARIABLES, vllm_python

from headrace.engine.vllm.nccl import Nccl, NcclHandover, chunks, in_order, pickled_id
from headrace.errors import SyncError

CPU = torch.device("cpu")
ID = bytes(range(128, 256))
BUFFER = 1000


class FakeLibrary:
    """NCCL that keeps what is broadcast, and stops or fails where told. It answers as the C library does."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.aborted: list[int] = []
        self.stuck_at = self.failing_at = -1
        """The broadcast whose call does not return its status, and that which a peer's death ends."""
        self.is_stuck = threading.Event()
        self.has_read = threading.Event()
        """That the worker has the id: no group is formed before."""
        self.sums = 0

    def ncclGetVersion(self, code):
        code._obj.value = 22703
        return 0

    def ncclGetUniqueId(self, made):
        ctypes.memmove(made, ID, len(ID))
        return 0

    def ncclCommInitRankConfig(self, communicator, size, group_id, rank, config):
        assert (bytes(group_id), rank) == (ID, 0) and size >= 2 and config._obj.blocking == 0
        communicator._obj.value = 7
        return 7

    def ncclCommGetAsyncError(self, communicator, status):
        assert communicator.value == 7 and not self.aborted
        is_idle = self.has_read.is_set() and self.stuck_at != len(self.sent)
        if self.stuck_at == len(self.sent):
            self.is_stuck.set()
        status._obj.value = 6 if self.failing_at == len(self.sent) else 0 if is_idle else 7
        return 0

    def ncclAllReduce(self, place, _, count, *rest):
        assert count.value == 1
        self.sums += 1
        return 0

    def ncclBroadcast(self, place, _, num_bytes, *rest):
        self.sent.append(ctypes.string_at(place.value, num_bytes.value))
        return 7

    def ncclCommAbort(self, communicator):
        self.aborted.append(communicator.value)
        return 0

    class ncclGetErrorString:
        def __new__(cls, status):
            return b"remote process exited or there was a network error"

    class ncclGetLastError:
        def __new__(cls, _):
            return b""


@pytest.fixture(autouse=True)
def unloaded(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeLibrary())


def sender_of(library, *, deadline=20.0, num_workers=1, release="0.32.0", host="127.0.0.1"):
    made = NcclHandover(CPU, host=host, deadline=deadline, buffer_bytes=BUFFER)
    made._nccl._library = library
    made.told = made.init_info(num_workers, release)
    return made


@contextlib.contextmanager
def worker_of(sender, library):
    """As a worker does, as far as the store; gives the list it puts the id into."""
    info, got = sender.told, []

    def come():
        store = torch.distributed.TCPStore(info["master_address"], info["master_port"], info["world_size"], False)
        got.append(store.get("broadcast_from/0/0"))
        library.has_read.set()

    coming = threading.Thread(target=come)
    coming.start()
    yield got
    coming.join(10)


def joined(library, **settings):
    sender = sender_of(library, **settings)
    with worker_of(sender, library):
        sender.join()
    return sender


@contextlib.contextmanager
def meanwhile(call):
    """In a thread; gives the list of what it raised."""
    errors = []

    def run():
        try:
            call()
        except SyncError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    yield errors
    thread.join(10)
    assert not thread.is_alive()


def is_listened_on(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ending_threads():
    return [thread for thread in threading.enumerate() if "vllm-nccl" in thread.name]


def odd_weights():
    """Odd sizes, several dtypes in a bad order, one beyond the buffer, an empty one, strides, and a rest."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    return {
        "norm": normal(3).bfloat16(),
        "router": normal(7, 5),
        "large": normal(101, 13).bfloat16(),
        "scale": normal(1, 33).to(torch.float8_e4m3fn),
        "turned": normal(17, 9).T,
        "nothing": torch.empty(0, 4),
        "mask": normal(11) > 0,
        "steps": torch.arange(9),
        **{f"layer.{number}": normal(number, 19).half() for number in range(1, 30)},
        "last": normal(1).bfloat16(),
    }


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


WORKER = """
import dataclasses, hashlib, json, sys, types
from contextlib import nullcontext
import torch
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

told = json.load(sys.stdin)
info = nccl_engine.NCCLWeightTransferInitInfo(**told["init"])
group = StatelessProcessGroup.create(info.master_address, info.master_port, info.rank_offset, info.world_size)
group_id = group.broadcast_obj(None, src=0)
update = nccl_engine.NCCLWeightTransferUpdateInfo(**told["update"])

class Group:
    def __init__(self):
        self.left = [open(path, "rb").read() for path in told["files"]]
    def broadcast(self, tensor, src):
        data = self.left.pop(0)
        assert src == 0 and tensor.numel() == len(data), (tensor.numel(), len(data))
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

class Stream:
    def synchronize(self):
        pass

torch.cuda.Stream = lambda *_, **__: Stream()
torch.cuda.stream = lambda stream: nullcontext()
torch.accelerator.current_device_index = lambda: 0
received = {}
def load(named):
    for name, tensor in named:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        received[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]
fake = Group()
packed_tensor.packed_nccl_broadcast_consumer(
    iterator=((n, (s, getattr(torch, d))) for n, d, s in zip(update.names, update.dtype_names, update.shapes)),
    group=fake, src=0, post_unpack_func=load, device="cpu",
    buffer_size_bytes=info.packed_buffer_size_bytes, num_buffers=info.packed_num_buffers)
print(json.dumps({
    "type": type(group_id) is ncclUniqueId, "id": bytes(group_id).hex(), "packed": info.packed,
    "left": len(fake.left), "received": received}))
"""


@pytest.mark.long
@pytest.mark.skipif(vllm_python() is None, reason="needs an interpreter with vLLM: HEADRACE_VLLM_PYTHON names it")
def test_vllm_itself_takes_the_id_the_forms_and_the_packed_bytes(tmp_path):
    weights = odd_weights()
    packed = FakeLibrary()
    joined(packed).send(weights)
    files = [tmp_path / str(number) for number in range(len(packed.sent))]
    for path, data in zip(files, packed.sent, strict=True):
        path.write_bytes(data)

    sender = sender_of(FakeLibrary(), deadline=90.0)  # which forms no group, and keeps its store until closed
    told = {
        "init": sender.told,
        "update": sender.update_info(weights),
        "files": [str(path) for path in files],
    }
    with meanwhile(sender.join) as errors:
        command, variables = [vllm_python(), "-c", WORKER], os.environ | VARIABLES
        worker = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=80, env=variables)
        sender.close()
    assert errors == ["the sender was closed"]
    assert worker.returncode == 0, worker.stderr
    answer = json.loads(worker.stdout.splitlines()[-1])
    assert answer["type"] and bytes.fromhex(answer["id"]) == ID and answer["packed"]
    assert answer["left"] == 0
    assert answer["received"] == {
        name: [str(tensor.dtype), list(tensor.shape), digest(tensor)] for name, tensor in weights.items()
    }


def receive(sent, info):
    """What a worker makes of broadcasts by vLLM's rules, written apart from ours and from theirs."""
    sizes = [
        torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
        for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True)
    ]
    received, position = {}, 0
    for data in sent:
        taken = 0
        while position < len(sizes) and taken <= info["packed_buffer_size_bytes"]:
            dtype, shape = getattr(torch, info["dtype_names"][position]), info["shapes"][position]
            room = torch.frombuffer(bytearray(data), dtype=torch.uint8)[taken : taken + sizes[position]]
            received[info["names"][position]] = room.view(dtype).view(shape)
            taken += sizes[position]
            position += 1
        assert taken == len(data)
    assert position == len(sizes)
    return received


def test_what_is_sent_is_what_was_told_of_it():
    weights, library = odd_weights(), FakeLibrary()
    sender = joined(library, release="0.26.0")
    sender.send(weights)
    info = sender.update_info(weights)
    received = receive(library.sent, info)
    assert received.keys() == weights.keys() and len(library.sent) > 5
    for name, tensor in weights.items():
        assert received[name].dtype == tensor.dtype and digest(received[name]) == digest(tensor), name
    sender.send({})
    sender.send({"one": torch.ones(3)})
    assert library.sent[-1] == torch.ones(3).numpy().tobytes()
    assert library.sums == 1
    sender.close()
    assert library.aborted == [7]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ([], []),
        ([10], [[10]]),
        ([500, 500, 1], [[500, 500, 1]]),
        ([500, 501, 1], [[500, 501], [1]]),
        ([5000, 1, 2], [[5000], [1, 2]]),
        ([1, 5000], [[1, 5000]]),
        ([0, 1001, 0], [[0, 1001], [0]]),
    ],
)
def test_a_broadcast_ends_with_the_tensor_that_passes_the_size(sizes, expected):
    named = [(str(number), torch.empty(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    assert [[tensor.nbytes for tensor in chunk] for chunk in chunks(named, BUFFER)] == expected


def test_every_tensor_lies_at_a_multiple_of_its_elements():
    for chunk in chunks(in_order(odd_weights()), BUFFER):
        start = 0
        for tensor in chunk:
            assert start % tensor.element_size() == 0
            start += tensor.nbytes


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1+cu130", "v0.22.0", "0.3.1", "0.28.0", "0.32.0+cpu", "1.0.1", "dev"])
def test_each_release_is_told_in_its_own_form(release):
    sender = sender_of(FakeLibrary(), num_workers=3, release=release)
    weights = {"a": torch.zeros(2, 3).bfloat16(), "b": torch.zeros(4)}
    place = {"master_address": "127.0.0.1", "master_port": sender.port, "rank_offset": 1, "world_size": 4}
    names = {"names": ["b", "a"], "dtype_names": ["float32", "bfloat16"], "shapes": [[4], [2, 3]]}
    packing = {"packed": True, "packed_buffer_size_bytes": BUFFER, "packed_num_buffers": 2}
    is_new = release in ("0.28.0", "0.32.0+cpu", "1.0.1", "dev")
    assert sender.told == (place | packing if is_new else place)
    update = json.loads(json.dumps(sender.update_info(weights)))
    assert update == (names if is_new else names | packing)
    sender.close()


def test_only_the_named_address_is_listened_on_and_only_as_long_as_needed():
    library = FakeLibrary()
    sender = sender_of(library)
    port = sender.port
    with socket.socket() as other:
        assert is_listened_on(port) and other.connect_ex(("127.0.0.2", port)) != 0
    with worker_of(sender, library):
        sender.join()
    assert not is_listened_on(port)
    with pytest.raises(SyncError, match=r"192\.0\.2\.1.*address of this machine"):
        sender_of(FakeLibrary(), host="192.0.2.1")


def test_the_id_is_put_down_in_one_piece():
    assert pickled_id(ID).count(ID) == 1 and pickled_id(ID).endswith(b"R.")
    library = FakeLibrary()
    sender = sender_of(library)
    with worker_of(sender, library) as got:
        sender.join()
    assert got == [pickled_id(ID)]


def test_a_worker_that_does_not_come_is_waited_for_so_long_and_leaves_nothing_open():
    library = FakeLibrary()
    sender = sender_of(library, deadline=0.3, num_workers=2)
    port = sender.port
    began = time.monotonic()
    with pytest.raises(SyncError, match=rf"none of the server's 2 workers came to 127\.0\.0\.1:{port}.*0\.3 s"):
        sender.join()
    assert time.monotonic() - began < 3.0
    assert not is_listened_on(port) and not ending_threads() and not library.aborted
    with pytest.raises(SyncError, match="none of the server's 2 workers"):
        sender.send({})


def test_a_worker_that_comes_but_does_not_join_is_waited_for_so_long():
    library = FakeLibrary()
    library.stuck_at = 0
    sender = sender_of(library, deadline=3.0, num_workers=2)
    port = sender.port
    missing = r"not all of the server's 2 workers joined over NCCL 22703.*3 s"
    with worker_of(sender, library), pytest.raises(SyncError, match=missing) as kept:
        sender.join()
    assert library.aborted == [7]
    assert not is_listened_on(port), kept  # though the error, and with it its frames, is still held


def test_a_broadcast_that_does_not_go_on_ends_with_the_deadline():
    library = FakeLibrary()
    sender = joined(library, deadline=3.0)
    library.stuck_at = 3
    with pytest.raises(SyncError, match=r"broadcast 3 of \d+ to 1 workers did not go on within 3 s"):
        sender.send(odd_weights())
    assert library.aborted == [7] and len(library.sent) == 3
    with pytest.raises(SyncError, match="did not go on"):
        sender.send({"one": torch.ones(3)})
    assert len(library.sent) == 3 and library.aborted == [7]


def test_a_failed_peer_is_told_at_once():
    library = FakeLibrary()
    sender = joined(library, deadline=60.0)
    library.failing_at = 2
    began = time.monotonic()
    with pytest.raises(SyncError, match="remote process exited"):
        sender.send(odd_weights())
    assert time.monotonic() - began < 10.0 and library.aborted == [7]


@pytest.mark.parametrize("when", ["before anyone came", "while it forms", "during a broadcast"])
def test_closing_ends_whoever_waits(when):
    library = FakeLibrary()
    if when == "during a broadcast":
        sender = joined(library, deadline=60.0)
        library.stuck_at = 2
        work = functools.partial(sender.send, odd_weights())
    else:
        sender = sender_of(library, deadline=60.0)
        library.stuck_at = 0
        work = sender.join
    with meanwhile(work) as errors:
        if when == "before anyone came":
            time.sleep(0.1)
        else:
            with worker_of(sender, library) if when == "while it forms" else contextlib.nullcontext():
                assert library.is_stuck.wait(10)
        began = time.monotonic()
        sender.close("the server answered 500")
    assert errors == ["the server answered 500"] and time.monotonic() - began < 5.0
    assert library.aborted == ([] if when == "before anyone came" else [7])
    sender.close("again")
    assert len(library.aborted) < 2 and not ending_threads()


def test_an_abort_that_takes_long_is_not_waited_for():
    library = FakeLibrary()
    sender = joined(library)
    let_go = threading.Event()
    library.ncclCommAbort = lambda communicator: let_go.wait(20) and 0
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < 5.0 and len(ending_threads()) == 1
    let_go.set()
    ending_threads()[0].join(10)
    assert not ending_threads()


class FakeShared:
    """A shared library of NCCL whose calls all answer one status."""

    def __init__(self, status):
        self._status = status

    def __getattr__(self, name):
        if not name.startswith("nccl"):
            raise AttributeError(name)
        last = b"" if self._status == 5 else b"Duplicate GPU detected "
        texts = {"ncclGetErrorString": b"unhandled system error", "ncclGetLastError": last}
        setattr(self, name, lambda *arguments: texts.get(name, self._status))
        return getattr(self, name)


def test_what_nccl_says_of_an_error_is_passed_on(monkeypatch):
    def call(name, status):
        monkeypatch.setattr("ctypes.CDLL", lambda _: FakeShared(status))
        Nccl().call(name)

    with pytest.raises(SyncError, match=r"^ncclBroadcast: unhandled system error: Duplicate GPU detected$"):
        call("ncclBroadcast", 2)
    with pytest.raises(SyncError, match=r"^ncclGetUniqueId: unhandled system error$"):
        call("ncclGetUniqueId", 5)
    call("ncclBroadcast", 7)
    call("ncclBroadcast", 0)


def test_no_nccl_is_said_so(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(SyncError, match=r"no NCCL here \(libnccl.so.2: cannot open.*torch built for CUDA"):
        Nccl()
