"""The collective transport: one buffer to many receivers by broadcasts over NCCL (GPU) or gloo (CPU), in buckets.

The transport has its own process group; a trainer's groups are not touched. The sender is rank 0, the receivers of a push are
the other ranks. A few buckets are in flight at a time: a receiver writes one to its target while the next ones arrive.
The group is reused while the receivers stay the same. After any failure both ends drop it, and the next push forms a new one.

    sender                                    receiver
    allocate, post ── place, by the caller ─► fetch
    push: gathers ◄─── "I am here" ────────── (control connection: `channel.py`)
          forms   ───  rank, size ──────────►
          buckets ═══  group ═══════════════► writes, and reports as it goes
          returns ◄─── "I have it" ──────────

Neither end waits longer than `deadline` without progress. The sender hears from all receivers, so its error names the late
ones, and it passes the error on to them. Both ends of a control connection prove that they know the run's token without
sending it; the group's own connections, like all of torch.distributed's, trust the network.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import threading
import weakref
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.collective.channel import accept
from headrace.sync.memory import Spare, TorchBuffer
from headrace.sync.sockets import TICK, Server
from headrace.sync.transport import Transport, read_place

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.collective.group import Group
    from headrace.sync.collective.push import Outgoing
    from headrace.sync.transport import Target, TransportConfig

GPU_BUCKET = 64 << 20  # bytes
CPU_BUCKET = 4 << 20


class CollectiveTransport(Transport):
    """Both ends use the same kind of device. Only the sender listens, from its first post on: a thread for each receiver that
    connects authenticates it, and leaves the rest to the thread that pushes."""

    name = "collective"
    needs_gpu_per_end = True
    is_pushed = True
    listens = True

    def __init__(
        self,
        *,
        token: str,
        device: torch.device | str = "cpu",
        deadline: float = 60.0,
        host: str = "127.0.0.1",
        bucket: int | None = None,
    ) -> None:
        """`host` is the address at which receivers reach the sender; the sender's `bucket` (bytes) applies to both ends."""
        import torch

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.token, self.device, self.deadline, self._host = token, device, deadline, host
        self._bucket = bucket or (GPU_BUCKET if device.type == "cuda" else CPU_BUCKET)
        self._outgoing: dict[str, Outgoing] = {}
        self._lock = threading.Lock()  # of the line above
        self._pushing = threading.Lock()  # one push at a time
        self._spare = Spare(lambda num_bytes: TorchBuffer(num_bytes, device))
        self._attempts = itertools.count(1)
        self._group: Group | None = None  # of the last push
        self._server: Server | None = None
        self.groups: dict[tuple[str, int], Group] = {}  # at a receiver, by the sender's address: kept between fetches
        self._fetching = threading.Lock()  # one fetch at a time
        self.is_closed = False
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # while ending backend threads may still need the interpreter

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> CollectiveTransport:
        return cls(token=config.token, device=device, host=config.host, deadline=config.deadline)

    def prepare(self, places: Sequence[Mapping[str, Plain]]) -> None:
        """Leave the groups with other senders: they are gone."""
        senders = {(place.get("host"), place.get("port")) for place in places}
        with self._fetching:
            for sender in self.groups.keys() - senders:
                self.drop_group(sender, "another sender took its place")

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        from headrace.sync.collective.receiver import Fetch, Place

        fetch = Fetch(self, read_place(Place, place), target, receiver)
        while not self._fetching.acquire(timeout=TICK):
            target.check()
        try:
            fetch.run()
        except BaseException as error:
            self.drop_group(fetch.sender, str(error))
            raise
        finally:
            self._fetching.release()

    def drop_group(self, sender: tuple[str, int], reason: str) -> None:
        group = self.groups.pop(sender, None)
        if group is not None:
            group.abort(reason)

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        from headrace.sync.collective.push import Outgoing

        with self._lock:
            if self.is_closed:
                raise SyncError("the transport is closed")
            if key in self._outgoing:
                raise SyncError(f"{key}: it is on offer already; free it first")
            buffer = self._spare.take(num_bytes)
            self._outgoing[key] = Outgoing(key, buffer, buffer.tensor[:num_bytes])
            return self._outgoing[key].bytes

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        import torch

        outgoing = self._find(key)
        outgoing.attempt = next(self._attempts)
        if self.device.type == "cuda":
            outgoing.written = torch.cuda.current_stream(self.device).record_event()
        if self._server is None:
            self._server = Server(self._host, serve=self._serve, name="headrace-collective")
        return {
            "key": key,
            "bytes": outgoing.bytes.numel(),
            "bucket": self._bucket,
            "host": self._host,
            "port": self._server.port,
            "attempt": outgoing.attempt,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
        }

    def push(self, key: str, receivers: Sequence[str]) -> None:
        from headrace.sync.collective.push import Push

        if len(set(receivers)) != len(receivers):
            raise SyncError(f"{key}: two receivers have one name: {', '.join(receivers)}")
        if not receivers:
            return
        outgoing = self._find(key)
        if not outgoing.attempt:
            raise SyncError(f"{key}: it was not posted")
        while not self._pushing.acquire(timeout=TICK):
            if outgoing.ended:
                raise SyncError(f"{key}: {outgoing.ended}")
        try:
            outgoing.is_read = True
            last, self._group = self._group, None
            push = Push(outgoing, receivers, bucket=self._bucket, deadline=self.deadline)
            self._group = push.run(last, device=self.device, host=self._host)
            outgoing.is_read = False
        finally:
            self._pushing.release()

    def free(self, key: str) -> None:
        with self._lock:
            outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            outgoing.end("it was given up")
            if self.device.type == "cpu" and not outgoing.is_read:
                self._spare.give(outgoing.buffer)

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        with self._lock:
            self.is_closed = True
            ended, self._outgoing = self._outgoing, {}
        for outgoing in ended.values():
            outgoing.end("the sender closed")
        with self._pushing:  # a running push fails at its next check
            if self._group is not None:
                self._group.abort("the sender closed")
                self._group = None
        self._spare.clear()
        if self._server is not None:
            self._server.close()
        with self._fetching:  # a running fetch fails at its next check
            for sender in list(self.groups):
                self.drop_group(sender, "the receiver closed")

    def _find(self, key: str) -> Outgoing:
        if key not in self._outgoing:
            raise SyncError(f"{key}: it is not on offer, or was given up")
        return self._outgoing[key]

    def _serve(self, connection: socket.socket, is_closed: threading.Event) -> None:
        """Authenticate a receiver, and let it wait for the push of the buffer that it wants."""
        from headrace.sync.collective.push import Visit

        channel = accept(connection, token=self.token, is_closed=is_closed)
        if channel is None:
            return
        report = None
        while report is None and not is_closed.is_set():
            report = channel.receive(TICK)
        if report is None:
            return
        visit = Visit(channel, receiver=str(report["receiver"]), group=str(report["group"]))
        visit.take(report)
        with self._lock:
            outgoing = self._outgoing.get(str(report["key"]))
            if outgoing is None or outgoing.attempt != report["attempt"]:
                return visit.send(over="it was given up")
            channel.keep()
            outgoing.arrivals.put(visit)


def _close(transport: weakref.ref[CollectiveTransport]) -> None:
    """Close a transport at exit, unless nobody holds it any more."""
    if (held := transport()) is not None:
        held.close()
