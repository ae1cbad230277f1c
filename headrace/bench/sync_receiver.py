"""An engine's end of a weight sync, alone in a process that is told what to do on its input."""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.sync_shapes import make_model
from headrace.model import SpareWeights
from headrace.records import frames
from headrace.sync import Lineage, TransportConfig, WeightSync, make_transport

if TYPE_CHECKING:
    from headrace.model import Arena, Incoming
    from headrace.records import WeightUpdate

LENGTH = struct.Struct("<Q")
"""Of a frame on the pipe."""


def time_copy(into: Arena, source: Arena) -> float:
    """Seconds; on a GPU by its own clock, without what it takes to ask for it."""
    if source.device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        into.copy_from(source)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    started = time.perf_counter()
    into.copy_from(source)
    return time.perf_counter() - started


class Receiver:
    """Holds weights as an engine does, and times what it does about new ones."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.device = torch.device(settings["device"])
        transport = make_transport(TransportConfig(**settings["ends"]), is_sender=False, device=settings["device"])
        self.sync = WeightSync(Lineage("life"), transport, payload=settings["payload"], name=settings["name"])
        self.spare = SpareWeights(make_model(settings["shape"], self.device))
        self._other = self.spare.arena.like()

    def load(self, update: WeightUpdate) -> dict[str, float]:
        """Seconds of each part."""
        started, fetched = time.perf_counter(), 0.0

        def bring(incoming: Incoming) -> None:
            nonlocal fetched
            began = time.perf_counter()
            self.sync.receive(update, incoming)
            fetched = time.perf_counter() - began

        self.spare.receive(update, bring)
        received = time.perf_counter()
        self.spare.exchange()
        self._settle()
        return {"fetch": fetched, "receive": received - started, "swap": time.perf_counter() - received}

    def copy(self) -> dict[str, float]:
        """How long it takes to copy as many bytes from one place to another here."""
        return {"copy": time_copy(self._other, self.spare.arena)}

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    receiver = Receiver(json.loads(source.readline()))

    def answer(value: object) -> None:
        sink.write(json.dumps(value).encode() + b"\n")
        sink.flush()

    answer({"relay": receiver.sync.relay})
    while head := source.read(LENGTH.size):
        order = frames.decode(source.read(*LENGTH.unpack(head)))
        answer(receiver.copy() if order["do"] == "copy" else receiver.load(order["update"]))
    receiver.sync.close()


if __name__ == "__main__":
    main()
