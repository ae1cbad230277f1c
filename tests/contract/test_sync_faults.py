"""What can go wrong with weights on their way, on every transport and with every payload: no engine is on a version it should
not be, the next attempt succeeds, and nothing is left behind. Prints a matrix: `found` where an end raised an error that names
the fault, `recovered` where the transport tells nobody (the run sees that a process ended) and the next attempt succeeded.

A transport inside one process has no ends to kill. Weights on a GPU are tried where there is one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from far import Far, Receiver, Sender, make_sync, packed

from headrace import leftovers
from headrace.errors import SyncError
from headrace.model.weights import named_tensors
from headrace.sync import Lineage, MemoryTransport, TransportConfig, WeightSync, table as sync_table, transport_class

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from headrace.records import WeightUpdate

DEADLINE = 2.0
HAS_GPU = torch.cuda.is_available()
TRANSPORTS = list(sync_table.TRANSPORTS)
BETWEEN = TRANSPORTS[1:]
PAYLOADS = list(sync_table.PAYLOADS)
FOUND: dict[tuple[str, str, str], str] = {}
FAULTS = ["drop", "flip", "reorder", "receiver killed", "sender killed"]


@pytest.fixture(scope="module", autouse=True)
def _printed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if FOUND:
        lines = [f"\n{'transport':20}{'payload':9}" + "".join(f"{fault:>17}" for fault in FAULTS)]
        for transport in TRANSPORTS:
            for payload in PAYLOADS:
                cells = [FOUND.get((transport, payload, fault), "-") for fault in FAULTS]
                lines.append(f"{transport:20}{payload:9}" + "".join(f"{cell:>17}" for cell in cells))
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\n".join(lines))


class Ended:
    """Both ends of one transport with one payload, in this process or with one of them in another."""

    def __init__(self, transport: str, payload: str, folder: Path) -> None:
        self.transport, self.payload, self.folder = transport, payload, folder
        self.ends = TransportConfig(
            transport=transport, folder=str(folder), prefix="headrace-t", host="127.0.0.1", token="t" * 32, deadline=DEADLINE
        )
        self.device = "cuda:0" if transport_class(transport).needs_gpu else "cpu"
        self._far: list[Far] = []
        self._syncs: list[WeightSync] = []

    def sync(self, *, is_sender: bool, name: str) -> WeightSync:
        if self.transport == "memory":
            if not self._syncs:
                self._syncs.append(WeightSync(Lineage("life"), MemoryTransport(), payload=self.payload))
            return self._syncs[0]
        sync = make_sync(self.ends, payload=self.payload, is_sender=is_sender, name=name, device=self.device)
        self._syncs.append(sync)
        return sync

    def sender(self) -> Sender:
        return Sender(self.sync(is_sender=True, name="trainer"), device=self.device)

    def receiver(self) -> Near:
        return Near(Receiver(self.sync(is_sender=False, name="engine-0"), device=self.device))

    def far(self, role: str, *, name: str, slow: float = 0.0) -> Far:
        far = Far(role, self.ends, payload=self.payload, name=name, slow=slow, device=self.device)
        self._far.append(far)
        return far

    def parcel(self, sender: Sender, update: WeightUpdate) -> Tensor | Path:
        """The bytes of an update, where receivers will read them."""
        part = update.parts[0]
        transport = sender.sync._transport
        if self.transport == "files":
            return self.folder / str(part.place["file"])
        if self.transport == "http":
            return transport._buffers.find(part.key).bytes  # type: ignore[attr-defined]
        if self.transport == "collective":
            return transport._outgoing[part.key].bytes  # type: ignore[attr-defined]
        return getattr(transport, "_near", transport).bytes_of(part.key)

    def close(self) -> None:
        for sync in self._syncs:
            sync.close()
        for far in self._far:
            far.close()
        leftovers.remove(self.ends.directory, self.ends.prefix)


class Near:
    """A receiver here, whose load runs beside a sender that must push."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def load(self, update: WeightUpdate, sender: Sender) -> None:
        pushing = Pushing(sender, update, ["engine-0"])
        try:
            self.receiver.load(update)
        finally:
            pushing.join()

    @property
    def held(self) -> tuple[int, list[str]]:
        held = self.receiver.held
        return held["version"], held["sums"]


class Pushing:
    """A sender's `send`, in a thread; nothing to do for transports whose receivers come."""

    def __init__(self, sender: Sender, update: WeightUpdate, receivers: list[str]) -> None:
        self.error: BaseException | None = None

        def push() -> None:
            try:
                sender.sync.send(update, receivers)
            except SyncError as error:
                self.error = error

        self._thread = threading.Thread(target=push)
        self._thread.start()

    def join(self) -> BaseException | None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "a sender waits for ever"
        return self.error


@pytest.fixture
def ended(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ended]:
    transport, payload = request.param
    if transport_class(transport).needs_gpu and not HAS_GPU:
        pytest.skip("needs a GPU")
    open_before = _open_files()
    made = Ended(transport, payload, tmp_path)
    try:
        yield made
    finally:
        made.close()
    gc.collect()
    assert not list(tmp_path.iterdir()), "files or segments are left"
    until = time.monotonic() + 5
    while _open_files() > open_before and time.monotonic() < until:
        time.sleep(0.05)
    assert _open_files() <= open_before, "sockets or files are left open"


def _open_files() -> int:
    """Sockets and files; a GPU's driver opens devices of its own when it is first used."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(not link.startswith(("/dev/nv", "anon_inode:", "pipe:", "/proc/")) for link in links)


def every(transports: list[str]) -> pytest.MarkDecorator:
    cases = [(transport, payload) for transport in transports for payload in PAYLOADS]
    return pytest.mark.parametrize("ended", cases, indirect=True, ids=["-".join(case) for case in cases])


def begun(ended: Ended) -> tuple[Sender, Near]:
    """Both hold version 1, so that with differences the next is one."""
    sender, near = ended.sender(), ended.receiver()
    update = sender.offer(1)
    near.load(update, sender)
    sender.sync.release(update)
    assert near.held == (1, sender.sums)
    return sender, near


def note(ended: Ended, fault: str, error: object) -> None:
    """`error` is what was raised and looked at, or None."""
    FOUND[ended.transport, ended.payload, fault] = "recovered" if error is None else "found"


@every(TRANSPORTS)
def test_a_dropped_tensor(ended):
    sender, near = begun(ended)
    before = near.held
    sender.weights.step(2)
    tensors = list(named_tensors(sender.weights))
    update = sender.sync.offer(2, tensors[:1] + tensors[2:])
    with pytest.raises(SyncError, match=r"version 2.*1 tensors are missing, first") as caught:
        near.load(update, sender)
    sender.sync.abort(update)
    assert near.held == before
    goes_on(sender, near, 3)
    note(ended, "drop", caught.value)


@every(TRANSPORTS)
def test_a_flipped_bit(ended):
    sender, near = begun(ended)
    before = near.held
    update = sender.offer(2)
    assert (update.payload == "delta") == (ended.payload == "delta")
    parcel = ended.parcel(sender, update)
    _flip(parcel)
    with pytest.raises(SyncError, match="version 2") as caught:
        near.load(update, sender)
    _flip(parcel)  # it is whole again, and all the same
    sender.sync.abort(update)
    assert near.held == before
    with pytest.raises(SyncError, match="version 2"):
        near.load(update, sender)  # it was given up: nobody finds it
    assert near.held == before
    goes_on(sender, near, 3)
    note(ended, "flip", caught.value)


def _flip(parcel: Tensor | Path) -> None:
    if isinstance(parcel, torch.Tensor):
        parcel[len(parcel) // 2] ^= 16
    else:
        content = bytearray(parcel.read_bytes())
        content[len(content) * 2 // 3] ^= 16
        parcel.write_bytes(content)


def goes_on(sender: Sender, near: Near, version: int) -> None:
    """The next attempt, which starts clean."""
    update = sender.offer(version)
    near.load(update, sender)
    sender.sync.release(update)
    assert near.held == (version, sender.sums)


@every(TRANSPORTS)
def test_two_updates_in_the_wrong_order(ended):
    sender, near = begun(ended)
    second = sender.offer(2)
    sender.sync.release(second)  # as if some other engine held it
    third = sender.offer(3)
    if ended.payload == "delta":
        with pytest.raises(SyncError, match=r"version 3 is a difference from version 2, and version 1 .* is held") as caught:
            near.receiver.load(third)
        assert near.held[0] == 1
        for update in sender.sync.catch_up(1):
            near.load(update, sender)
        assert near.held[0] == 2
        near.load(third, sender)
    else:
        near.load(third, sender)
        with pytest.raises(SyncError, match="version 2 came late: version 3 is held already") as caught:
            near.receiver.load(second)
    assert near.held == (3, sender.sums)
    note(ended, "reorder", caught.value)


@every(BETWEEN)
def test_a_receiver_that_is_killed_midway(ended):
    sender = ended.sender()
    far = ended.far("receiver", name="engine-0", slow=20.0)
    update = sender.offer(1)
    far.begin("load", update=packed(update))
    pushing = Pushing(sender, update, ["engine-0"])
    assert far.read() == {"midway": True}
    began = time.monotonic()
    far.kill()
    error = pushing.join()
    assert time.monotonic() - began < 2 * DEADLINE + 2
    assert (error is not None) == (ended.transport == "collective"), "who pushes hears of it"
    assert error is None or "engine-0" in str(error)
    sender.sync.abort(update)
    late = ended.far("receiver", name="engine-0")
    assert late.ask("held")["held"]["version"] == 0
    update = sender.offer(1, whole=True)
    pushing = Pushing(sender, update, ["engine-0"])
    answer = late.ask("load", update=packed(update))
    assert pushing.join() is None
    assert answer == {"held": {"lineage": "life", "version": 1, "sums": sender.sums}}
    note(ended, "receiver killed", error)


@pytest.mark.long
@every(BETWEEN)
def test_a_sender_that_is_killed_midway(ended):
    """While it packs; and, where bytes pass between processes that live, while they do."""
    near = ended.receiver()
    far = ended.far("sender", name="trainer", slow=20.0)
    far.begin("offer", version=1)
    assert far.read() == {"midway": True}
    far.kill()
    assert near.held[0] == 0
    leftovers.remove(ended.ends.directory, ended.ends.prefix)
    assert not list(ended.folder.iterdir())
    found = _kill_while_sending(ended) if ended.transport in ("http", "collective") else None
    sender = ended.sender()
    goes_on(sender, near, 1)
    note(ended, "sender killed", found)


def _kill_while_sending(ended: Ended) -> str:
    far, late = ended.far("sender", name="trainer"), ended.far("receiver", name="engine-1", slow=1.5)
    offered = far.ask("offer", version=1)["update"]
    far.begin("send", update=offered, receivers=["engine-1"])
    late.begin("load", update=offered)
    assert late.read() == {"midway": True}
    far.kill()
    answer = late.read()
    assert "version 1" in answer["error"], answer
    assert late.ask("held")["held"]["version"] == 0
    return str(answer["error"])
