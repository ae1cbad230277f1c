"""The collective transport on CPU: gloo in buckets against gloo tensor by tensor, and against what the loopback carries.

Four receivers are processes of their own and keep their connections, as engines do. In each round the three ways take their
turn with the same bytes, from the call until every receiver has all of them; what arrived is summed and compared. The figures
are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import TCPStore

from headrace.bench.sync_collective_peer import DEADLINE, TOKEN, broadcast_each, naive_group, total
from headrace.bench.table import Row, show
from headrace.errors import SyncError
from headrace.sync import CollectiveTransport

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RECEIVERS = 4


def tensor_bytes(*, num_layers: int = 30) -> list[int]:
    """Of SmolLM2-135M in bf16, in the order of its state; the head is the embedding."""
    hidden, heads, kv_heads, intermediate, vocabulary = 576, 9, 3, 1536, 49152
    kv = hidden // heads * kv_heads
    square, narrow, wide = hidden * hidden, hidden * kv, hidden * intermediate
    layer = [square, narrow, narrow, square, wide, wide, wide, hidden, hidden]
    return [2 * count for count in (vocabulary * hidden, *layer * num_layers, hidden)]


class _Receivers:
    """The processes, and one word to or from all of them."""

    def __init__(self, sizes: list[int]) -> None:
        self.names = [f"receiver-{index}" for index in range(NUM_RECEIVERS)]
        command = [sys.executable, "-m", "headrace.bench.sync_collective_peer"]
        self._processes = [
            subprocess.Popen(
                [*command, name, "--rank", str(rank), "--ranks", str(NUM_RECEIVERS + 1), "--sizes", json.dumps(sizes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(self.names, start=1)
        ]

    def tell(self, do: str, **more: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            process.stdin.flush()

    def wait(self) -> list[dict[str, Any]]:
        answers = []
        for process, name in zip(self._processes, self.names, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SyncError(f"{name} of the benchmark ended with status {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


class _Ways:
    """The sender's end of each."""

    def __init__(self, receivers: _Receivers, sizes: list[int], *, bucket: int | None) -> None:
        self._receivers, self._sizes = receivers, sizes
        self._transport = CollectiveTransport(token=TOKEN, deadline=DEADLINE, bucket=bucket)
        self.buffer = self._transport.allocate("weights", sum(sizes))
        self.buffer.view(torch.int64).random_()
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE), wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            receivers.tell("join", store=store.port, raw=listener.getsockname()[1])
            self._group = naive_group(store.port, rank=0, size=NUM_RECEIVERS + 1)
            self._raw = [listener.accept()[0] for _ in receivers.names]
        receivers.wait()
        self._store = store

    def buckets(self) -> None:
        place = self._transport.post("weights", {})
        self._receivers.tell("buckets", place=place)
        self._transport.push("weights", self._receivers.names)

    def each(self) -> None:
        self._receivers.tell("each")
        broadcast_each(self._group, self.buffer, self._sizes)

    def raw(self) -> None:
        self._receivers.tell("raw")
        view = self.buffer.numpy().data
        threads = [threading.Thread(target=_send_raw, args=(connection, view)) for connection in self._raw]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def seconds(self, way: Callable[[], None]) -> float:
        """Until every receiver has said that it has all of it."""
        began = time.perf_counter()
        way()
        self._receivers.wait()
        return time.perf_counter() - began

    def check(self, name: str) -> None:
        """Whether all receivers hold what was sent; then they forget it."""
        self._receivers.tell("total")
        expected = total(self.buffer)
        if any(answer["total"] != expected for answer in self._receivers.wait()):
            raise SyncError(f"what {name} brought is not what was sent")

    def close(self) -> None:
        self._transport.close()
        for connection in self._raw:
            connection.close()


def _send_raw(connection: socket.socket, view: memoryview) -> None:
    connection.sendall(view)
    connection.recv(1)


def rows(*, quick: bool = False, bucket: int | None = None) -> list[Row]:
    """About 20 s, or a minute."""
    sizes = tensor_bytes()
    num_rounds = 3 if quick else 15
    receivers = _Receivers(sizes)
    try:
        receivers.wait()
        ways = _Ways(receivers, sizes, bucket=bucket)
        try:
            taken = _rounds(ways, num_rounds)
        finally:
            ways.close()
    finally:
        receivers.close()
    return _figures(taken, sum(sizes))


def _rounds(ways: _Ways, num_rounds: int) -> dict[str, list[float]]:
    """Round 0 forms groups and touches memory; it is checked and not counted."""
    each_way: dict[str, Callable[[], None]] = {"buckets": ways.buckets, "each": ways.each, "raw": ways.raw}
    taken: dict[str, list[float]] = {name: [] for name in each_way}
    for number in range(num_rounds + 1):
        for name, way in each_way.items():
            seconds = ways.seconds(way)
            if number == 0:
                ways.check(name)
            else:
                taken[name].append(seconds)
    return taken


def _figures(taken: dict[str, list[float]], num_bytes: int) -> list[Row]:
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    speed = {name: NUM_RECEIVERS * num_bytes / seconds / 1e9 for name, seconds in median.items()}
    ratios = [slow / fast for slow, fast in zip(taken["each"], taken["buckets"], strict=True)]
    shares = [bound / ours for bound, ours in zip(taken["raw"], taken["buckets"], strict=True)]
    size = f"{num_bytes / 1e6:.0f} MB to {NUM_RECEIVERS} processes, gloo"
    peers = {"tensor by tensor": speed["each"]}
    return [
        Row(f"{size}: delivered", speed["buckets"], "GB/s", bound=speed["raw"], peers=peers),
        Row(f"{size}: tensor by tensor ÷ in buckets, time", statistics.median(ratios), "×"),
        Row(f"{size}: share of what raw sockets carry", statistics.median(shares), "of loopback"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bucket", type=int, help="bytes")
    options = parser.parse_args()
    show("sync", rows(quick=options.quick, bucket=options.bucket))


if __name__ == "__main__":
    main()
