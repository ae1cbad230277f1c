"""One end of a weight sync in a process of its own: `python far.py receiver|sender SETTINGS`, obeying lines on its input.

A receiver holds a small set of weights as an engine does: a version is its own only once its receipt matches. A sender makes
versions of the same weights. Either can be slowed, so that a test can come in midway.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace import wire
from headrace.errors import SyncError
from headrace.model.weights import SpareWeights, check_order, make_manifest, named_tensors
from headrace.sync import Ends, Lineage, WeightSync
from headrace.sync import weight_sync as weight_sync_module
from headrace.types import Payload, WeightUpdate

LIFE = "life"
ADAPTER = {"r": 8, "target_modules": ["up"]}


class Weights(torch.nn.Module):
    """Two dtypes, odd sizes, more than one piece of any transport's."""

    def __init__(self, *, is_adapter: bool = False, device: str = "cpu") -> None:
        super().__init__()
        shapes = {"up": (8, 640), "down": (640, 8)} if is_adapter else {"embed": (701, 513), "up": (640, 511)}
        for name, shape in shapes.items():
            generator = torch.Generator().manual_seed(len(name))
            matrix = torch.randn(shape, generator=generator).mul_(0.02)
            self.register_parameter(name, torch.nn.Parameter(matrix.bfloat16()))
        self.norm = torch.nn.Parameter(torch.ones(37))
        self.to(device)

    @torch.no_grad()
    def step(self, version: int) -> None:
        """What AdamW at a small rate does to bfloat16: one weight in a hundred changes."""
        generator = torch.Generator().manual_seed(version)
        for _, tensor in named_tensors(self):
            is_changed = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor.copy_(torch.where(is_changed.to(tensor.device), tensor * 1.01, tensor))


class Receiver:
    """What an engine does about weights, and nothing else."""

    def __init__(self, sync: WeightSync, *, is_adapter: bool = False, device: str = "cpu") -> None:
        self.sync, self.weights = sync, Weights(is_adapter=is_adapter, device=device)
        self.spare = SpareWeights(self.weights)
        self.lineage, self.version = "", 0

    def load(self, update: WeightUpdate) -> None:
        check_order(update, lineage=self.lineage, version=self.version)
        self.spare.receive(update, partial(self.sync.receive, update))
        self.spare.exchange()
        self.lineage, self.version = update.lineage, update.version

    @property
    def held(self) -> dict[str, Any]:
        sums = [str(each) for each in make_manifest(named_tensors(self.weights)).checksums]
        return {"lineage": self.lineage, "version": self.version, "sums": sums}


class Sender:
    """What a trainer does about weights."""

    def __init__(self, sync: WeightSync, *, is_adapter: bool = False, device: str = "cpu") -> None:
        self.sync, self.weights = sync, Weights(is_adapter=is_adapter, device=device)
        self._adapter = ADAPTER if is_adapter else None

    def offer(self, version: int, **how: Any) -> WeightUpdate:
        self.weights.step(version)
        return self.sync.offer(version, named_tensors(self.weights), adapter=self._adapter, **how)

    @property
    def sums(self) -> list[str]:
        return [str(each) for each in make_manifest(named_tensors(self.weights)).checksums]


def make_sync(ends: Ends, *, payload: str, is_sender: bool, name: str, device: str = "cpu") -> WeightSync:
    is_delta = payload == Payload.DELTA
    transport = ends.make(is_sender=is_sender, device=device)
    return WeightSync(Lineage(LIFE), transport, payload=Payload.DELTA if is_delta else Payload.FULL, name=name)


class Far:
    """The near end of such a process."""

    def __init__(self, role: str, ends: Ends, *, payload: str, name: str, slow: float = 0.0, device: str = "cpu") -> None:
        settings = {"ends": asdict(ends), "payload": payload, "name": name, "slow": slow, "device": device}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == {"ready": True}

    def begin(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"gone": True}

    def ask(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.ask("close")
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        assert self.process.wait(timeout=20) is not None


def packed(update: WeightUpdate) -> str:
    return wire.encode(update).hex()


def unpacked(text: str) -> WeightUpdate:
    update = wire.decode(bytes.fromhex(text))
    assert isinstance(update, WeightUpdate)
    return update


def _slow_down(seconds: float, say: Any) -> None:
    """Every look at whether an update is still wanted, and every pack, takes a while, and the first of them is told."""
    is_told = threading.Event()
    check, pack = SpareWeights._check_wanted, weight_sync_module._pack

    def midway() -> None:
        if not is_told.is_set():
            is_told.set()
            say({"midway": True})
        time.sleep(seconds)

    def slow_check(spare: SpareWeights, update: WeightUpdate) -> None:
        midway()
        check(spare, update)

    def slow_pack(*arguments: Any) -> None:
        pack(*arguments)
        midway()

    SpareWeights._check_wanted = slow_check  # type: ignore[method-assign]
    weight_sync_module._pack = slow_pack


def main(role: str, settings: dict[str, Any]) -> None:
    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    if settings["slow"]:
        _slow_down(settings["slow"], say)
    sync = make_sync(
        Ends(**settings["ends"]),
        payload=settings["payload"],
        is_sender=role == "sender",
        name=settings["name"],
        device=settings["device"],
    )
    is_adapter = settings["payload"] == Payload.ADAPTER
    end = (Sender if role == "sender" else Receiver)(sync, is_adapter=is_adapter, device=settings["device"])
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        command = order["command"]
        try:
            if command == "load":
                assert isinstance(end, Receiver)
                end.load(unpacked(order["update"]))
                say({"held": end.held})
            elif command == "held":
                assert isinstance(end, Receiver)
                say({"held": end.held, "relay": sync.relay})
            elif command == "offer":
                assert isinstance(end, Sender)
                say({"update": packed(end.offer(order["version"]))})
            elif command == "send":
                sync.send(unpacked(order["update"]), order["receivers"])
                say({"sent": True})
            elif command == "close":
                sync.close()
                say({"closed": True})
                return
        except SyncError as error:
            say({"error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
