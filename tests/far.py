"""One end of a weight sync in a process of its own, obeying lines on a socket.

`python far.py PATH` listens at a path and forks a process for everyone who connects, so that none of them waits for imports.
A receiver holds a small set of weights as an engine does: a version is its own only once its receipt matches. A sender makes
versions of the same weights. Either can be slowed, so that a test can come in midway.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from functools import partial
from typing import IO, Any

import torch
from manifests import make_manifest

from headrace.errors import SyncError
from headrace.model.weights import StagedWeights, check_order, named_tensors
from headrace.records import WeightUpdate, frames
from headrace.sync import Lineage, TransportConfig, WeightSync, make_transport, routed, weight_sync as weight_sync_module

LIFE = "life"


class Weights(torch.nn.Module):
    """Two dtypes, odd sizes, more than one piece of any transport's."""

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__()
        for name, shape in {"embed": (701, 513), "up": (640, 511)}.items():
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

    def __init__(self, sync: WeightSync, *, device: str = "cpu") -> None:
        self.sync, self.weights = sync, Weights(device=device)
        self.spare = StagedWeights(self.weights)
        self.lineage, self.version = "", 0

    def load(self, update: WeightUpdate) -> None:
        (update,) = routed(update, [self.sync.relay])
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

    def __init__(self, sync: WeightSync, *, device: str = "cpu") -> None:
        self.sync, self.weights = sync, Weights(device=device)

    def offer(self, version: int, **how: Any) -> WeightUpdate:
        self.weights.step(version)
        return self.sync.offer(version, named_tensors(self.weights), **how)

    @property
    def sums(self) -> list[str]:
        return [str(each) for each in make_manifest(named_tensors(self.weights)).checksums]


def make_sync(ends: TransportConfig, *, payload: str, is_sender: bool, name: str, device: str = "cpu") -> WeightSync:
    transport = make_transport(ends, is_sender=is_sender, device=device)
    return WeightSync(Lineage(LIFE), transport, payload=payload, name=name)


@functools.cache
def _forking() -> str:
    """Where processes are to be had, from one that has imported what they need; it ends with this one."""
    folder = tempfile.mkdtemp(prefix="far-")
    path = f"{folder}/s"
    process = subprocess.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return path


class Far:
    """The near end of such a process."""

    def __init__(
        self, role: str, ends: TransportConfig, *, payload: str, name: str, slow: float = 0.0, device: str = "cpu"
    ) -> None:
        settings = {"role": role, "ends": asdict(ends), "payload": payload, "name": name, "slow": slow, "device": device}
        self._socket = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + 60
        while True:
            try:
                self._socket.connect(_forking())
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.02)
        self._lines = self._socket.makefile("rw")
        self._say(settings)
        self._process = self.read()["process"]
        assert self.read() == {"ready": True}

    def _say(self, value: dict[str, Any]) -> None:
        self._lines.write(json.dumps(value) + "\n")
        self._lines.flush()

    def begin(self, command: str, **arguments: Any) -> None:
        self._say({"command": command, **arguments})

    def read(self) -> Any:
        line = self._lines.readline()
        return json.loads(line) if line else {"gone": True}

    def ask(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.read()

    def kill(self) -> None:
        """As whoever is out of memory is killed; it is gone when this returns."""
        os.kill(self._process, signal.SIGKILL)
        while os.path.exists(f"/proc/{self._process}"):
            time.sleep(0.005)

    def close(self) -> None:
        if os.path.exists(f"/proc/{self._process}"):
            self.ask("close")
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()


def packed(update: WeightUpdate) -> str:
    return frames.encode(update).hex()


def unpacked(text: str) -> WeightUpdate:
    update = frames.decode(bytes.fromhex(text))
    assert isinstance(update, WeightUpdate)
    return update


def _slow_down(seconds: float, say: Any) -> None:
    """Every look at whether an update is still wanted, and every pack, takes a while, and the first of them is told."""
    is_told = threading.Event()
    check, pack = StagedWeights._check_wanted, weight_sync_module._copy

    def midway() -> None:
        if not is_told.is_set():
            is_told.set()
            say({"midway": True})
        time.sleep(seconds)

    def slow_check(spare: StagedWeights, update: WeightUpdate) -> None:
        midway()
        check(spare, update)

    def slow_pack(*arguments: Any) -> None:
        pack(*arguments)
        midway()

    StagedWeights._check_wanted = slow_check  # type: ignore[method-assign]
    weight_sync_module._copy = slow_pack


def serve(lines: IO[str]) -> None:
    """One end, until it is told to close or nobody is there to tell it."""

    def say(answer: dict[str, Any]) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    settings = json.loads(lines.readline())
    say({"process": os.getpid()})
    role = settings["role"]
    if settings["slow"]:
        _slow_down(settings["slow"], say)
    sync = make_sync(
        TransportConfig(**settings["ends"]),
        payload=settings["payload"],
        is_sender=role == "sender",
        name=settings["name"],
        device=settings["device"],
    )
    end = (Sender if role == "sender" else Receiver)(sync, device=settings["device"])
    say({"ready": True})
    for line in lines:
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


def main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries them
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                try:
                    serve(connection.makefile("rw"))
                finally:
                    os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
