"""`headrace bench sync`: sending weights from a trainer's process to an engine's, over every transport available here.

The receiver is a child process that does what an engine does: it writes the bytes beside the weights in use, hashes them,
checks them against the manifest and swaps. Transports take turns with a plain copy of as many bytes, and with a bare socket
that carries as many; figures are medians. The model has the shape of Qwen3-0.6B on a GPU and of SmolLM2-135M on a CPU, in
bfloat16.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from headrace.bench import sync_delta
from headrace.bench.child import Child
from headrace.bench.harness import Row, run_parts
from headrace.bench.loads import QWEN3_0_6B, SMALL, SMOLLM2_135M
from headrace.bench.measure import seconds_of, wait
from headrace.lora import Adapter, LoraSettings, find_targets
from headrace.model import Arena, StagedWeights, held_tensors, served_dtype
from headrace.sync import Lineage, TransportConfig, WeightSync, is_pushed, make_transport, shared_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers import PreTrainedModel

    from headrace.bench.harness import Part
    from headrace.model import StagingBuffer
    from headrace.records import WeightUpdate

    Seconds = dict[str, dict[str, float]]
    """By transport and part of a publication: the median."""

SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Qwen3-0.6B": QWEN3_0_6B, "small": SMALL}
_NAME = "engine-0"


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """`--quick` sends a small model. Only on a CPU is the delta of `model` measured."""
    is_on_gpu = torch.cuda.is_available()
    device = "cuda" if is_on_gpu else "cpu"
    parts: dict[str, Part] = {
        "publish": lambda: _publish(device, quick=quick),
        "delta": lambda: [sync_delta.measure(model=None if is_on_gpu else model, quick=quick, device=device)],
    }
    return run_parts("sync", parts, quick=quick, json_file=json_file)


def _publish(device: str, *, quick: bool) -> Iterator[list[Row]]:
    is_on_gpu = device != "cpu"
    shape, rounds = ("small", 3) if quick else ("Qwen3-0.6B", 21) if is_on_gpu else ("SmolLM2-135M", 9)
    transports = ["cuda_ipc", "shared_memory"] if is_on_gpu else ["shared_memory", "files", "http", "collective"]
    with Paths(shape, device, transports) as paths:
        seconds = paths.rounds(rounds)
        by_tensor = seconds_of(paths.copy_through_host, device)
    yield publish_rows(seconds, shape)
    if not is_on_gpu:
        yield shared_memory_rows(seconds["shared_memory"], paths.num_bytes, shape)
        return
    ipc, title = seconds["cuda_ipc"], f"cuda_ipc, {shape}"
    yield [
        Row(f"{title}: of that, received and hashed by the engine", 1e3 * ipc["receive"], "ms"),
        Row(f"{title}: publish, in copies of the weights", ipc["publish"] / ipc["engine's copy"], "×", "≤ 4"),
        Row(f"{title}: tensor by tensor through host memory ÷ publish", by_tensor / ipc["publish"], "×", "≥ 20"),
    ]


def publish_rows(seconds: Seconds, shape: str) -> list[Row]:
    """The time to publish over each transport."""
    rows = []
    for name, parts in seconds.items():
        title = f"{name}, {shape}"
        bound = 1e3 * parts["socket"] if name in ("http", "collective") else None
        rows += [
            Row(f"{title}: publish, receipts included", 1e3 * parts["publish"], "ms"),
            Row(f"{title}: of that, read and hashed by the sender", 1e3 * parts["offer"], "ms"),
            Row(f"{title}: of that, fetched by the engine", 1e3 * parts["fetch"], "ms", bound=bound),
            Row(f"{title}: exchange between two steps", 1e3 * parts["swap"], "ms"),
        ]
    return rows


def shared_memory_rows(seconds: dict[str, float], num_bytes: int, shape: str) -> list[Row]:
    """Write and read speed of shared memory, against a copy in the same process."""
    gigabytes, rows = num_bytes / 1e9, []
    for name, part, copy in (("written", "pack", "sender's copy"), ("read", "fetch", "engine's copy")):
        title, speeds = f"shared_memory, {shape}: {name}", {"copy": gigabytes / seconds[copy]}
        rows.append(Row(title, gigabytes / seconds[part], "GB/s", peers=speeds))
        rows.append(Row(f"{title}, share of a copy's speed", seconds[copy] / seconds[part], "share", "≥ 0.8"))
    return rows


class Paths(contextlib.ExitStack):
    """A sender and a receiving process for each transport, all with the same weights; used in a `with`."""

    def __init__(self, shape: str, device: str, transports: list[str], *, rank: int = 0) -> None:
        """`rank`: of the adapter to send instead of the model; 0 for none."""
        super().__init__()
        self._device, self._transports, self._ends = device, transports, dict[str, tuple[WeightSync, Child]]()
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared_folder()))
        for name in transports:
            ends = TransportConfig(name, folder, f"bench-{name}", "127.0.0.1", secrets.token_hex(16), deadline=60.0)
            how = {"shape": shape, "device": device, "rank": rank}
            settings = {"ends": asdict(ends), "model": how, "threads": torch.get_num_threads()}
            sync = WeightSync(Lineage("life"), make_transport(ends, is_sender=True, device=device))
            self.callback(sync.close)
            child = Child(name, "headrace.bench.sync:engine", settings, log=Path(folder) / f"{name}.log")
            self._ends[name] = sync, self.enter_context(child)
        for _, child in self._ends.values():  # they start in parallel
            child.hear()
        self._arena = Arena.adopt(make_model(shape, device, rank))  # as a trainer's
        self._other = self._arena.like()
        self.num_bytes = self._arena.num_bytes

    def rounds(self, count: int) -> Seconds:
        """The median of each part, after an uncounted round that allocates buffers."""
        seen: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in self._transports}
        for version in range(1, count + 2):
            with torch.no_grad():
                for flat in self._arena.flat.values():
                    flat[::997].mul_(1.01)
            for name in self._transports:
                parts = self._publish(name, version)
                parts["sender's copy"] = time_copy(self._other, self._arena)
                parts["engine's copy"] = self._ends[name][1].ask(None)["copy"]
                parts["socket"] = self._send_all(self._ends[name][1])
                for part, seconds in parts.items():
                    seen[name][part] += [seconds] if version > 1 else []
        return {name: {part: statistics.median(values) for part, values in parts.items()} for name, parts in seen.items()}

    def _publish(self, name: str, version: int) -> dict[str, float]:
        sync, child = self._ends[name]
        read_at = 0.0

        def on_read() -> None:
            nonlocal read_at
            read_at = time.perf_counter()

        wait(self._device)
        started = time.perf_counter()
        update = sync.offer(version, self._arena, on_read=on_read)
        offered = time.perf_counter()
        sending = threading.Thread(target=sync.send, args=(update, [_NAME])) if is_pushed(update) else None
        if sending is not None:
            sending.start()
        parts: dict[str, float] = child.ask(update)
        if sending is not None:
            sending.join()
        ended = time.perf_counter()
        sync.release(update)
        own = {"publish": ended - started - parts["swap"], "offer": offered - started, "pack": read_at - started}
        return {**own, **parts}

    def _send_all(self, child: Child) -> float:
        """Seconds to send as many bytes over a bare socket."""
        content = memoryview(bytearray(self.num_bytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            started = time.perf_counter()
            child.tell(listener.getsockname()[1])
            connection, _ = listener.accept()
            with connection:
                connection.sendall(content)
            child.hear()
        return time.perf_counter() - started

    def copy_through_host(self) -> None:
        """Copy every tensor to host memory and back, one by one."""
        for name, view in self._arena.views.items():
            self._other.views[name].copy_(view.cpu())


def make_model(shape: str, device: str, rank: int = 0) -> nn.Module:
    """Random weights in the dtypes of a bfloat16 engine, or an adapter of this rank for them; all processes have the same
    tensors, not the same values."""
    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta" if rank else device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if rank:
        lora = LoraSettings(rank=rank)
        return Adapter(find_targets(model, lora), lora).to(device)
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
    return seconds_of(lambda: into.copy_from(source))


def engine(given: dict[str, Any], orders: Iterator[WeightUpdate | int | None]) -> Iterator[dict[str, float]]:
    """Runs in a child process: holds weights as an engine does and loads each update. None requests a copy of as many bytes; a
    number, that it receives as many from this port. Answers seconds."""
    torch.set_num_threads(given["threads"])
    device = given["model"]["device"]
    transport = make_transport(TransportConfig(**given["ends"]), is_sender=False, device=device)
    sync = WeightSync(Lineage("life"), transport, name=_NAME)
    spare = StagedWeights(make_model(**given["model"]))
    other = spare.arena.like()
    yield {}
    for order in orders:
        if order is None:
            yield {"copy": time_copy(other, spare.arena)}
        elif isinstance(order, int):
            _receive_all(order, spare.arena.num_bytes)
            yield {}
        else:
            yield _load(sync, spare, order, device)
    sync.close()


def _receive_all(port: int, num_bytes: int) -> None:
    """Read this many bytes from a bare socket, the most that loopback carries."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while num_bytes:
            num_bytes -= connection.recv_into(buffer)


def _load(sync: WeightSync, spare: StagedWeights, update: WeightUpdate, device: str) -> dict[str, float]:
    fetched = 0.0

    def fetch(incoming: StagingBuffer) -> None:
        nonlocal fetched
        fetched = seconds_of(lambda: sync.receive(update, incoming))

    received = seconds_of(lambda: spare.receive(update, fetch))
    return {"fetch": fetched, "receive": received, "swap": seconds_of(spare.exchange, device)}
