"""Weights over HTTP between two processes, against bare sockets in the same run: a part of `headrace bench sync`.

The bare socket is read into one buffer again and again and its bytes go nowhere. A buffer is checked, and copied to where it
is wanted. Both ways take turns, and the figures are medians.
"""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.table import Row
from headrace.sync import PIECE_BYTES, HttpTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

NUM_BYTES = 270_000_000
ROUNDS = 9


class _Bucket:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.views: Mapping[str, Tensor] = {}
        self._flat = torch.zeros(num_bytes, dtype=torch.uint8)

    def write(self, start: int, piece: Tensor) -> None:
        self._flat[start : start + len(piece)].copy_(piece)

    def check(self) -> None:
        """It never gives up."""


def rows(*, quick: bool = False) -> list[Row]:
    """`quick` moves a tenth of it, and less often."""
    num_bytes, rounds = (NUM_BYTES // 10, 3) if quick else (NUM_BYTES, ROUNDS)
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "headrace.bench.sync_http", str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        try:
            print(token, file=sender.stdin, flush=True)
            return _measure(token, json.loads(sender.stdout.readline()), rounds)
        finally:
            sender.kill()


def _measure(token: str, told: dict[str, Any], rounds: int) -> list[Row]:
    num_bytes = told["place"]["bytes"]
    ends = {name: HttpTransport(token=token, is_relay=name == "relay") for name in ("receiver", "relay")}
    bucket = _Bucket(num_bytes)
    ways: dict[str, Callable[[], None]] = {
        "socket": lambda: _read_bare(told["port"], num_bytes),
        "receiver": lambda: ends["receiver"].fetch(told["place"], bucket, receiver="receiver"),
        "relay": lambda: ends["relay"].fetch(told["place"], bucket, receiver="relay"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    for end in ends.values():
        end.close()
    speeds = {name: num_bytes / 1e9 / statistics.median(times) for name, times in seconds.items()}
    title = f"http, {num_bytes / 1e6:.0f} MB"
    return [
        Row(f"{title} to a receiver", speeds["receiver"], "GB/s", bound=speeds["socket"]),
        Row(f"{title} to a relay", speeds["relay"], "GB/s", bound=speeds["socket"]),
        Row(f"{title} to a receiver, share of a bare socket", speeds["receiver"] / speeds["socket"], "share"),
        Row(f"{title}: sums of all pieces", told["post"] * 1e3, "ms"),
    ]


def _read_bare(port: int, num_bytes: int) -> None:
    buffer = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        left = num_bytes
        while left:
            left -= connection.recv_into(buffer)


def _send(num_bytes: int) -> None:
    """The other process: both ways from the same bytes, until it is killed."""
    transport = HttpTransport(token=sys.stdin.readline().strip())
    content = transport.allocate("parcel", num_bytes).random_()
    began = time.perf_counter()
    place = transport.post("parcel", {})
    passed = time.perf_counter() - began
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(json.dumps({"place": place, "port": listening.getsockname()[1], "post": passed}), flush=True)
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(content.numpy().data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _send(int(sys.argv[1]))
