"""`python -m headrace.bench.sync_collective_peer NAME`: a receiver of `headrace.bench.sync_collective`, told what to do."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from headrace.sync import CollectiveTransport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DEADLINE = 60.0
TOKEN = "of a benchmark on one host"


class FlatTarget:
    """A `Target` in the host's memory."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.num_bytes = buffer.numel()
        self.views: Mapping[str, Tensor] = {"all": buffer}

    def write(self, start: int, piece: Tensor) -> None:
        self.buffer[start : start + piece.numel()].copy_(piece)

    def check(self) -> None:
        """It is never given up."""


def naive_group(port: int, *, rank: int, size: int) -> Any:  # noqa: ANN401
    """gloo as everybody makes it."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=DEADLINE), wait_for_workers=False)
    return ProcessGroupGloo(store, rank, size, timedelta(seconds=DEADLINE))


def broadcast_each(group: Any, buffer: Tensor, sizes: list[int]) -> None:  # noqa: ANN401
    """The naive path: each tensor by itself, one after another."""
    for piece in buffer.split(sizes):
        group.broadcast(piece, 0).wait()


def receive_raw(connection: socket.socket, buffer: Tensor) -> None:
    view, got = buffer.numpy().data, 0
    while got < len(view):
        got += connection.recv_into(view[got:])
    connection.sendall(b"\1")


def total(buffer: Tensor) -> int:
    """A sum that any changed byte changes, in eights, as they overflow."""
    return int(buffer.view(torch.int64).sum())


class Peer:
    def __init__(self, name: str, *, rank: int, ranks: int, sizes: list[int]) -> None:
        self._name, self._rank, self._ranks, self._sizes = name, rank, ranks, sizes
        self._target = FlatTarget(torch.zeros(sum(sizes), dtype=torch.uint8))
        self._transport = CollectiveTransport(token=TOKEN, deadline=DEADLINE)
        self._group: Any = None
        self._raw: socket.socket | None = None

    def do(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "join":
                self._group = naive_group(command["store"], rank=self._rank, size=self._ranks)
                self._raw = socket.create_connection(("127.0.0.1", command["raw"]))
            case "buckets":
                self._transport.fetch(command["place"], self._target, receiver=self._name)
            case "each":
                broadcast_each(self._group, self._target.buffer, self._sizes)
            case "raw":
                assert self._raw is not None
                receive_raw(self._raw, self._target.buffer)
            case "total":  # told in the answer; then it is forgotten
                self._target.buffer.zero_()

    def close(self) -> None:
        self._transport.close()
        if self._raw is not None:
            self._raw.close()

    def total(self) -> int:
        """Of what has arrived, to be compared with what was sent."""
        return total(self._target.buffer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--sizes", required=True, help="bytes of each tensor, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = Peer(options.name, rank=options.rank, ranks=options.ranks, sizes=json.loads(options.sizes))
    print(json.dumps({"did": "start"}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        arrived = peer.total() if command["do"] == "total" else 0
        peer.do(command)
        print(json.dumps({"did": command["do"], "total": arrived}), flush=True)
    peer.close()


if __name__ == "__main__":
    main()
