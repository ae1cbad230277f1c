"""`headrace bench sync`: weights on their way from a trainer's process to an engine's, over every transport there is here.

The receiver is a process of its own that does what an engine does: it writes the bytes beside what it runs, hashes them,
compares them with the manifest and exchanges them. Transports take turns, and a plain copy of as many bytes with them; figures
are medians. On a GPU the model has the shape of Qwen3-0.6B, on a CPU that of SmolLM2-135M, both in bfloat16.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench import sync_collective, sync_delta, sync_http
from headrace.bench.sync_receiver import LENGTH, time_copy
from headrace.bench.sync_shapes import make_model
from headrace.bench.table import Row, report
from headrace.model import Arena, named_tensors
from headrace.records import frames
from headrace.sync import Lineage, TransportConfig, WeightSync, is_pushed, make_transport, shared_folder

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.records import WeightUpdate

_DEADLINE = 60.0
_NAME = "engine-0"
_FLOORS = 4
"""Copies of the weights that a publication to an engine on the same GPU may take."""
_HOST_RATIO = 20


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """Status 1 if a goal is missed; `--quick` sends little, and judges nothing."""
    rows = _on_gpu(quick=quick) if torch.cuda.is_available() else _on_cpu(quick=quick, model=model)
    return report("sync", rows, json_file=json_file, quick=quick)


def _on_cpu(*, quick: bool, model: str | None) -> list[Row]:
    shape, rounds = ("small", 3) if quick else ("SmolLM2-135M", 9)
    with Paths(shape, torch.device("cpu"), ["shared_memory", "files", "http", "collective"]) as paths:
        rows = _published(paths.rounds(rounds), paths.num_bytes, shape)
    rows += sync_collective.rows(quick=quick)
    rows += sync_http.rows(quick=quick)
    return rows + sync_delta.measure(model=model, quick=quick)


def _published(seconds: dict[str, dict[str, float]], num_bytes: int, shape: str) -> list[Row]:
    """Of each transport: all of it; of shared memory also what it is beside a copy."""
    rows = []
    for name, parts in seconds.items():
        title = f"{name}, {shape}"
        rows.append(Row(f"{title}: publish, receipts included", 1e3 * parts["publish"], "ms"))
        rows.append(Row(f"{title}: of that, read and hashed by the sender", 1e3 * parts["offer"], "ms"))
        rows.append(Row(f"{title}: of that, fetched by the engine", 1e3 * parts["fetch"], "ms"))
        rows.append(Row(f"{title}: exchange between two steps", 1e3 * parts["swap"], "ms"))
    shared = seconds["shared_memory"]
    gigabytes = num_bytes / 1e9
    for name, part, copy in (("written", "pack", "copy here"), ("read", "fetch", "copy there")):
        speeds = {"copy": gigabytes / shared[copy]}
        rows.append(Row(f"shared_memory, {shape}: {name}", gigabytes / shared[part], "GB/s", peers=speeds))
        rows.append(
            Row(f"shared_memory, {shape}: {name}, share of a copy's speed", shared[copy] / shared[part], "share", "≥ 0.8")
        )
    return rows


def _on_gpu(*, quick: bool) -> list[Row]:
    shape, rounds = ("small", 3) if quick else ("Qwen3-0.6B", 21)
    device = torch.device("cuda", torch.cuda.current_device())
    with Paths(shape, device, ["cuda_ipc", "shared_memory"], is_home=True) as paths:
        seconds = paths.rounds(rounds)
        by_tensor = paths.through_host()
    ipc = seconds["cuda_ipc"]
    floor, title = ipc["copy there"], f"cuda_ipc, {shape}"
    rows = [
        Row(f"{title}: publish to an engine on the same GPU, receipts included", 1e3 * ipc["publish"], "ms", bound=1e3 * floor),
        Row(f"{title}: that, in copies of the weights", ipc["publish"] / floor, "×", f"≤ {_FLOORS}"),
        Row(f"{title}: of that, hashed by the sender", 1e3 * ipc["offer"], "ms"),
        Row(f"{title}: of that, fetched by the engine", 1e3 * ipc["fetch"], "ms"),
        Row(f"{title}: of that, received and hashed by the engine", 1e3 * ipc["receive"], "ms"),
        Row(f"{title}: exchange between two steps", 1e3 * ipc["swap"], "ms"),
        Row(f"{title}: tensor by tensor through host memory ÷ publish", by_tensor / ipc["publish"], "×", f"≥ {_HOST_RATIO}"),
    ]
    rows += sync_delta.measure(model=None, quick=quick, device=str(device))
    rest = _published({name: parts for name, parts in seconds.items() if name != "cuda_ipc"}, paths.num_bytes, shape)
    return rows + [row for row in rest if "share" not in row.unit and "GB/s" not in row.unit]


class Paths:
    """One sender and one receiver process for each transport, of the same weights."""

    def __init__(self, shape: str, device: torch.device, transports: list[str], *, is_home: bool = False) -> None:
        self._shape, self._device, self._transports, self._is_home = shape, device, transports, is_home
        self._ends: dict[str, tuple[WeightSync, _There]] = {}

    def __enter__(self) -> Paths:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared_folder())
        self.model = make_model(self._shape, self._device)
        for name in self._transports:
            ends = TransportConfig(
                transport=name,
                folder=self._folder.name,
                prefix=f"bench-{name}",
                host="127.0.0.1",
                token=secrets.token_hex(16),
                deadline=_DEADLINE,
            )
            sync = WeightSync(Lineage("life"), make_transport(ends, is_sender=True, device=str(self._device)))
            self._ends[name] = sync, _There(ends, self._shape, self._device)
        if self._is_home:  # the weights lie where the other process can read them
            self._arena = self._ends["cuda_ipc"][0].adopt(self.model)
        else:
            self._arena = Arena.adopt(self.model)
        self._other = self._arena.like()
        self.num_bytes = self._arena.num_bytes
        return self

    def __exit__(self, *_: object) -> None:
        for sync, there in self._ends.values():
            there.close()
            sync.close()
        self._folder.cleanup()

    def rounds(self, count: int) -> dict[str, dict[str, float]]:
        """By transport, the median seconds of each part; the first round makes what is kept for the others."""
        seen: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in self._transports}
        for version in range(1, count + 2):
            self._change()
            for name in self._transports:
                parts = self._publish(name, version)
                parts |= {"copy here": self._copy(), "copy there": self._ends[name][1].ask({"do": "copy"})["copy"]}
                if version > 1:
                    for part, value in parts.items():
                        seen[name][part].append(value)
        return {name: {part: statistics.median(values) for part, values in parts.items()} for name, parts in seen.items()}

    def _publish(self, name: str, version: int) -> dict[str, float]:
        sync, there = self._ends[name]
        is_home = self._is_home and name == "cuda_ipc"
        read_at = 0.0

        def on_read() -> None:
            nonlocal read_at
            read_at = time.perf_counter()

        self._settle()
        started = time.perf_counter()
        update = sync.offer(version, self._arena if self._is_home else named_tensors(self.model), on_read=on_read)
        offered = time.perf_counter()
        parts = there.load(sync, update)
        ended = time.perf_counter()
        sync.release(update)
        pack = 0.0 if is_home else read_at - started
        return {"publish": ended - started - parts["swap"], "offer": offered - started, "pack": pack, **parts}

    def _change(self) -> None:
        with torch.no_grad():
            for flat in self._arena.flat.values():
                flat[::997].mul_(1.01)

    def _copy(self) -> float:
        return time_copy(self._other, self._arena)

    def through_host(self) -> float:
        """Seconds to bring every tensor to the host's memory and back, one after another."""
        self._settle()
        started = time.perf_counter()
        for name, view in self._arena.views.items():
            self._other.views[name].copy_(view.cpu())
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _There:
    """The process that receives."""

    def __init__(self, ends: TransportConfig, shape: str, device: torch.device) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.bench.sync_receiver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        settings = {
            "ends": asdict(ends),
            "shape": shape,
            "device": str(device),
            "payload": "full",
            "name": _NAME,
            "threads": torch.get_num_threads(),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()
        self._is_ready = False

    def load(self, sync: WeightSync, update: WeightUpdate) -> dict[str, float]:
        """What it took there."""
        pushing = None
        if is_pushed(update):
            pushing = threading.Thread(target=sync.send, args=(update, [_NAME]))
            pushing.start()
        parts = self.ask({"do": "load", "update": update})
        if pushing is not None:
            pushing.join()
        return parts

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if not self._is_ready:  # they all begin at once
            self._read()
            self._is_ready = True
        assert self._process.stdin is not None
        frame = frames.encode(order)
        self._process.stdin.write(LENGTH.pack(len(frame)) + frame)
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the receiving process ended; its error is above")
        told: dict[str, Any] = json.loads(line)
        return told
