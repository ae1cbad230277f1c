"""Two transports against what the loopback carries, on a CPU: the collective to four receivers, and HTTP to one.

The paths of a transport take turns with the same bytes, until every receiver has all of them; figures are medians.
"""

from __future__ import annotations

import functools
import socket
import statistics
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import TCPStore

from headrace.bench.child import Child
from headrace.bench.harness import Row, take_turns
from headrace.bench.loads import SMOLLM2_135M
from headrace.bench.measure import timed
from headrace.bench.sync_child import DEADLINE, TOKEN, FlatTarget, broadcast_each, naive_group, total
from headrace.errors import SyncError
from headrace.sync import PIECE_BYTES, CollectiveTransport, HttpTransport

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RECEIVERS = 4
HTTP_BYTES = 270_000_000


def tensor_bytes() -> list[int]:
    """Tensor sizes of SmolLM2-135M in bfloat16, in the order of its state dict; the head is the embedding."""
    shape = SMOLLM2_135M
    hidden, inner, kv = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"] * shape["num_key_value_heads"]
    square, narrow, wide = hidden * hidden, hidden * kv, hidden * inner
    layer = [square, narrow, narrow, square, wide, wide, wide, hidden, hidden]
    return [2 * count for count in (shape["vocab_size"] * hidden, *layer * shape["num_hidden_layers"], hidden)]


class _Collective:
    """The sender's end of each path to the receivers: gloo in buckets (ours), gloo tensor by tensor, and raw sockets."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._names = [f"receiver-{index}" for index in range(NUM_RECEIVERS)]
        given = {"ranks": NUM_RECEIVERS + 1, "sizes": sizes}
        self._children = [
            Child(name, "headrace.bench.sync_child:collective_receiver", {**given, "name": name, "rank": rank})
            for rank, name in enumerate(self._names, start=1)
        ]
        self._hear()
        self._transport = CollectiveTransport(token=TOKEN, deadline=DEADLINE)
        self._buffer = self._transport.allocate("weights", sum(sizes))
        self._buffer.view(torch.int64).random_()
        self._store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=DEADLINE), wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._tell({"store": self._store.port, "raw": listener.getsockname()[1]})
            self._group = naive_group(self._store.port, rank=0, size=NUM_RECEIVERS + 1)
            self._raw = [listener.accept()[0] for _ in self._names]
        self._hear()

    def _tell(self, order: dict[str, object]) -> None:
        for child in self._children:
            child.tell(order)

    def _hear(self) -> list[int]:
        return [child.hear() for child in self._children]

    def buckets(self) -> None:
        self._tell({"way": "buckets", "place": self._transport.post("weights", {})})
        self._transport.push("weights", self._names)

    def each(self) -> None:
        self._tell({"way": "each"})
        broadcast_each(self._group, self._buffer, self._sizes)

    def raw(self) -> None:
        self._tell({"way": "raw"})

        def send(connection: socket.socket) -> None:
            connection.sendall(self._buffer.numpy().data)
            connection.recv(1)

        threads = [threading.Thread(target=send, args=(connection,)) for connection in self._raw]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def seconds(self, way: Callable[[], None], turn: int) -> float:
        """Until every receiver has all bytes; the first turn, which connects and touches memory, also checks them."""
        started = time.perf_counter()
        way()
        self._hear()
        seconds = time.perf_counter() - started
        if not turn:
            self._tell({"way": "total"})
            if set(self._hear()) != {total(self._buffer)}:
                raise SyncError(f"what {way.__name__} brought is not what was sent")
        return seconds

    def close(self) -> None:
        self._transport.close()
        for connection in self._raw:
            connection.close()
        for child in self._children:
            child.close()


def collective_rows(*, quick: bool) -> list[Row]:
    """Takes about a minute, `quick` 20 s."""
    sizes = tensor_bytes()
    sender = _Collective(sizes)
    ways = {way.__name__: functools.partial(sender.seconds, way) for way in (sender.buckets, sender.each, sender.raw)}
    try:
        seen = take_turns(ways, 3 if quick else 15, warmups=1)
    finally:
        sender.close()
    speed = {name: NUM_RECEIVERS * sum(sizes) / statistics.median(seconds) / 1e9 for name, seconds in seen.items()}
    ratios = [slow / fast for slow, fast in zip(seen["each"], seen["buckets"], strict=True)]
    shares = [bound / ours for bound, ours in zip(seen["raw"], seen["buckets"], strict=True)]
    title = f"{sum(sizes) / 1e6:.0f} MB to {NUM_RECEIVERS} processes, gloo"
    peers = {"tensor by tensor": speed["each"]}
    return [
        Row(f"{title}: delivered", speed["buckets"], "GB/s", bound=speed["raw"], peers=peers),
        Row(f"{title}: tensor by tensor ÷ in buckets, time", statistics.median(ratios), "×"),
        Row(f"{title}: share of what raw sockets carry", statistics.median(shares), "of loopback"),
    ]


def http_rows(*, quick: bool) -> list[Row]:
    """HTTP, which checks the bytes and copies them to their target, against a bare socket that discards them."""
    num_bytes = HTTP_BYTES // 10 if quick else HTTP_BYTES
    receiver, relay = (HttpTransport(token=TOKEN, is_relay=is_relay) for is_relay in (False, True))
    target = FlatTarget(num_bytes)
    with Child("the sender", "headrace.bench.sync_child:http_sender", {"num_bytes": num_bytes}) as sender:
        told = sender.hear()

        def bare() -> None:
            sender.tell(None)
            buffer, left = memoryview(bytearray(PIECE_BYTES)), num_bytes
            with socket.create_connection(("127.0.0.1", told["port"])) as connection:
                while left:
                    left -= connection.recv_into(buffer)

        ways = {
            "socket": timed(bare),
            "receiver": timed(lambda: receiver.fetch(told["place"], target, receiver="receiver")),
            "relay": timed(lambda: relay.fetch(told["place"], target, receiver="relay")),
        }
        seen = take_turns(ways, 3 if quick else 9)
    receiver.close()
    relay.close()
    speeds = {name: num_bytes / 1e9 / statistics.median(seconds) for name, seconds in seen.items()}
    title = f"http, {num_bytes / 1e6:.0f} MB"
    return [
        Row(f"{title} to a receiver", speeds["receiver"], "GB/s", bound=speeds["socket"]),
        Row(f"{title} to a relay", speeds["relay"], "GB/s", bound=speeds["socket"]),
        Row(f"{title} to a receiver, share of a bare socket", speeds["receiver"] / speeds["socket"], "share"),
        Row(f"{title}: sums of all pieces", told["post"] * 1e3, "ms"),
    ]
