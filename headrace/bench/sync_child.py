"""The receiving process of `headrace bench sync`, and what it shares with the sender."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

from headrace.bench.loads import QWEN3_0_6B, SMALL, SMOLLM2_135M
from headrace.bench.measure import wait
from headrace.model import StagedWeights, held_tensors, served_dtype
from headrace.sync import Lineage, TransportConfig, WeightSync, make_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from headrace.model import Arena, StagingBuffer
    from headrace.records import WeightUpdate

SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Qwen3-0.6B": QWEN3_0_6B, "small": SMALL}
DEADLINE = 60.0


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


def engine(given: dict[str, Any], orders: Iterator[WeightUpdate | int | None]) -> Iterator[dict[str, float]]:
    """Holds weights as an engine does and loads each update. None requests a copy of as many bytes; a number, that it receives
    as many from this port. Answers seconds."""
    torch.set_num_threads(given["threads"])
    transport = make_transport(TransportConfig(**given["ends"]), is_sender=False, device=given["device"])
    sync = WeightSync(Lineage("life"), transport, name=given["name"])
    spare = StagedWeights(make_model(given["shape"], given["device"]))
    other = spare.arena.like()
    yield {}
    for order in orders:
        if order is None:
            yield {"copy": time_copy(other, spare.arena)}
        elif isinstance(order, int):
            _receive_all(order, spare.arena.num_bytes)
            yield {}
        else:
            yield _load(sync, spare, order, given["device"])
    sync.close()


def _receive_all(port: int, num_bytes: int) -> None:
    """Read as many bytes as there are from a bare socket, the most that loopback carries."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while num_bytes:
            num_bytes -= connection.recv_into(buffer)


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
