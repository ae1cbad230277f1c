"""Child processes of `headrace bench sync`: an engine, a collective receiver and an HTTP sender."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from headrace.bench.loads import QWEN3_0_6B, SMALL, SMOLLM2_135M
from headrace.bench.measure import wait
from headrace.model import StagedWeights, held_tensors, served_dtype
from headrace.sync import CollectiveTransport, HttpTransport, Lineage, TransportConfig, WeightSync, make_transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model import Arena, StagingBuffer
    from headrace.records import WeightUpdate

SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Qwen3-0.6B": QWEN3_0_6B, "small": SMALL}
DEADLINE = 60.0
TOKEN = "of a benchmark on one host"


def make_model(shape: str, device: str) -> PreTrainedModel:
    """Random weights in the dtypes of a bfloat16 engine; all processes have the same tensors, not the same values."""
    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, tensor in held_tensors(model):
        tensor.data = tensor.data.to(served_dtype(model, name, tensor, torch.bfloat16))
    model.eval()
    return model


def time_copy(into: Arena, source: Arena) -> float:
    """Seconds of a copy; on a GPU by CUDA events, without the launch."""
    if source.device.type == "cuda":
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        into.copy_from(source)
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3
    before = time.perf_counter()
    into.copy_from(source)
    return time.perf_counter() - before


def engine(given: dict[str, Any], orders: Iterator[WeightUpdate | None]) -> Iterator[dict[str, float]]:
    """Holds weights as an engine does and loads each update; None requests a copy of as many bytes. Answers seconds."""
    torch.set_num_threads(given["threads"])
    transport = make_transport(TransportConfig(**given["ends"]), is_sender=False, device=given["device"])
    sync = WeightSync(Lineage("life"), transport, name=given["name"])
    spare = StagedWeights(make_model(given["shape"], given["device"]))
    other = spare.arena.like()
    yield {}
    for update in orders:
        yield {"copy": time_copy(other, spare.arena)} if update is None else _load(sync, spare, update, given["device"])
    sync.close()


def _load(sync: WeightSync, spare: StagedWeights, update: WeightUpdate, device: str) -> dict[str, float]:
    started, fetched = time.perf_counter(), 0.0

    def fetch(incoming: StagingBuffer) -> None:
        nonlocal fetched
        before = time.perf_counter()
        sync.receive(update, incoming)
        fetched = time.perf_counter() - before

    spare.receive(update, fetch)
    received = time.perf_counter()
    spare.exchange()
    wait(device)
    return {"fetch": fetched, "receive": received - started, "swap": time.perf_counter() - received}


class FlatTarget:
    """Where a transport writes what it fetches: one buffer in host memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.views: Mapping[str, Tensor] = {"all": self.buffer}

    def write(self, start: int, piece: Tensor) -> None:
        self.buffer[start : start + piece.numel()].copy_(piece)

    def check(self) -> None:
        """It is never aborted."""


def naive_group(port: int, *, rank: int, size: int) -> Any:  # noqa: ANN401
    """A gloo group, made the usual way."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE), wait_for_workers=False)
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=DEADLINE))


def broadcast_each(group: Any, buffer: Tensor, sizes: list[int]) -> None:  # noqa: ANN401
    """The naive path: one broadcast per tensor."""
    for piece in buffer.split(sizes):
        group.broadcast(piece, 0).wait()


def total(buffer: Tensor) -> int:
    """A sum that changes if any byte does."""
    return int(buffer.view(torch.int64).sum())


def collective_receiver(given: dict[str, Any], orders: Iterator[dict[str, Any]]) -> Iterator[int]:
    """Receives over the path that each order names; answers 0, or for `total` the sum of what it holds."""
    torch.set_num_threads(1)
    target = FlatTarget(sum(given["sizes"]))
    transport = CollectiveTransport(token=TOKEN, deadline=DEADLINE)
    yield 0
    join = next(orders)
    group = naive_group(join["store"], rank=given["rank"], size=given["ranks"])
    with socket.create_connection(("127.0.0.1", join["raw"])) as connection:
        yield 0
        for order in orders:
            held = 0
            match order["way"]:
                case "buckets":
                    transport.fetch(order["place"], target, receiver=given["name"])
                case "each":
                    broadcast_each(group, target.buffer, given["sizes"])
                case "raw":
                    view = target.buffer.numpy().data
                    while view:
                        view = view[connection.recv_into(view) :]
                    connection.sendall(b"\1")
                case "total":  # and clears the buffer
                    held = total(target.buffer)
                    target.buffer.zero_()
            yield held
    transport.close()


def http_sender(given: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Offers weights over HTTP and serves the same bytes on a bare socket."""
    torch.set_num_threads(1)
    transport = HttpTransport(token=TOKEN)
    content = transport.allocate("weights", given["num_bytes"]).random_()
    started = time.perf_counter()
    place = transport.post("weights", {})
    seconds = time.perf_counter() - started
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield {"place": place, "port": listening.getsockname()[1], "post": seconds}
        for _ in orders:  # one order per connection
            connection, _ = listening.accept()
            with connection:
                connection.sendall(content.numpy().data)
            yield {}
    transport.close()
