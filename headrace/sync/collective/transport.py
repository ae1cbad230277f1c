"""The collective transport: one buffer to many receivers by broadcasts over NCCL (GPU) or gloo (CPU), in buckets.

The transport has its own process group; a trainer's groups are not touched. The sender is rank 0, the receivers of a push are
the other ranks. A few buckets are in flight at a time: a receiver writes one to its target while the next ones arrive.
The group is reused while the receivers stay the same. After any failure both ends drop it, and the next push forms a new one.

    sender                                    receiver
    allocate, post ── place, by the caller ─► fetch
    push: gathers ◄─── "I am here" ────────── (control connection: `channel.py`)
          forms   ───  rank, size ──────────►
          buckets ═══  group ═══════════════► writes, and reports several times a second
          returns ◄─── "I have it" ──────────

Neither end waits longer than `deadline` without progress. The sender hears from all receivers, so its error names the late
ones, and it passes the error on to them. Both ends of a control connection prove that they know the run's token without
sending it; the group's own connections, like all of torch.distributed's, trust the network.
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.sync.collective.channel import accept
from headrace.sync.memory import Spare, TorchBuffer
from headrace.sync.sockets import TICK, Server
from headrace.sync.transport import Transport

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.collective.channel import Channel, Message
    from headrace.sync.collective.group import Group
    from headrace.sync.transport import Target, TransportConfig

GPU_BUCKET = 64 << 20  # bytes
CPU_BUCKET = 4 << 20
_VERDICT_SECONDS = 1.0  # how long the sender waits, after the group failed, to hear which receiver caused it
_GONE = "is gone: its connection closed"


@dataclass
class _Outgoing:
    """A buffer on offer. `attempt` numbers the posts (0: none yet), to tell this one from earlier ones under the same key."""

    key: str
    buffer: TorchBuffer
    bytes: Tensor
    attempt: int = 0
    written: Any = None  # on a GPU, the event after which the bytes are complete
    ended: str = ""
    is_read: bool = False  # by a push that is running, or that failed and may be reading still


@dataclass(eq=False)
class _Visit:
    """A receiver's `fetch` as reported to the sender. `num_written` counts buckets; `lost` is why it will not finish."""

    channel: Channel
    receiver: str = ""
    key: str = ""
    attempt: int = 0
    group: str = ""  # that the receiver has kept
    num_written: int = 0
    is_done: bool = False
    lost: str = ""
    heard_at: float = 0.0
    push: _Push | None = None

    def send(self, **message: object) -> None:
        try:
            self.channel.send(message)
        except OSError:  # closed, or full: the receiver has stopped reading
            self.lost = self.lost or _GONE


@dataclass
class _Push:
    """One broadcast of one buffer. `visits` is by receiver; `moved_at` is when anything last made progress."""

    outgoing: _Outgoing
    receivers: tuple[str, ...]
    num_buckets: int
    deadline: float
    visits: dict[str, _Visit] = field(default_factory=dict)
    group: Group | None = None
    moved_at: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise if this push cannot go on."""
        key = self.outgoing.key
        if self.outgoing.ended:
            raise SyncError(f"{key}: {self.outgoing.ended} ({self.standing()})")
        for visit in self.visits.values():
            if visit.lost and not visit.is_done:
                done = f"{visit.num_written} of {self.num_buckets} buckets"
                raise SyncError(f"{key}: receiver {visit.receiver!r} {visit.lost} after {done}")
        waited = time.monotonic() - self.moved_at
        if waited > self.deadline:
            raise SyncError(f"{key}: {self._late()} for {waited:.1f} s ({self.standing()})")

    def standing(self) -> str:
        """Describe the progress, for error messages."""
        if len(self.visits) < len(self.receivers):
            return f"{len(self.visits)} of {len(self.receivers)} receivers are here"
        parts = (f"{name} {self.visits[name].num_written}" for name in self.receivers)
        return f"of {self.num_buckets} buckets written: {', '.join(parts)}"

    def _late(self) -> str:
        """Name the receivers that never connected, else the silent ones, else those furthest behind."""
        waiting = [visit for visit in self.visits.values() if not visit.is_done]
        silent = [visit for visit in waiting if time.monotonic() - visit.heard_at > self.deadline / 2]
        least = min((visit.num_written for visit in waiting), default=0)
        if absent := [name for name in self.receivers if name not in self.visits]:
            names, fault = absent, "has not come"
        elif silent:
            names, fault = [visit.receiver for visit in silent], "has not been heard from"
        else:
            names, fault = [visit.receiver for visit in waiting if visit.num_written == least], "has made no progress"
        return f"receiver {', '.join(map(repr, names))} {fault}"


class CollectiveTransport(Transport):
    """Both ends use the same kind of device. Only the sender listens, from its first post on. One lock guards what callers and
    connection threads share; every change notifies its condition."""

    name = "collective"
    crosses_hosts = True
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

        from headrace.sync.collective.receiver import Receiver

        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._token, self._device, self._host, self._deadline = token, device, host, deadline
        self._bucket = bucket or (GPU_BUCKET if device.type == "cuda" else CPU_BUCKET)
        self._changed = threading.Condition(threading.RLock())
        self._pushing = threading.Lock()  # one push at a time
        self._outgoing: dict[str, _Outgoing] = {}
        self._spare = Spare(lambda num_bytes: TorchBuffer(num_bytes, device))
        self._visits: set[_Visit] = set()
        self._attempts = itertools.count(1)
        self._group: Group | None = None  # of the last push
        self._server: Server | None = None
        self._is_closed = False
        self._receiver = Receiver(token=token, device=device, deadline=deadline)
        atexit.register(self.close)  # while ending backend threads may still need the interpreter

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> CollectiveTransport:
        return cls(token=config.token, device=device, host=config.host, deadline=config.deadline)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        self._receiver.fetch(place, target, receiver=receiver)

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            if key in self._outgoing:
                raise SyncError(f"{key}: it is on offer already; free it first")
            buffer = self._spare.take(num_bytes)
            self._outgoing[key] = _Outgoing(key, buffer, buffer.tensor[:num_bytes])
            return self._outgoing[key].bytes

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        import torch

        with self._changed:
            outgoing = self._find(key)
            outgoing.attempt = next(self._attempts)
            if self._device.type == "cuda":
                outgoing.written = torch.cuda.current_stream(self._device).record_event()
            if self._server is None:
                self._server = Server(self._host, serve=self._serve, name="headrace-collective")
            return {
                "key": key,
                "bytes": outgoing.bytes.numel(),
                "bucket": self._bucket,
                "host": self._host,
                "port": self._server.port,
                "attempt": outgoing.attempt,
                "backend": "nccl" if self._device.type == "cuda" else "gloo",
            }

    def free(self, key: str) -> None:
        with self._changed:
            outgoing = self._outgoing.pop(key, None)
            if outgoing is not None:
                outgoing.ended = "it was given up"
                if self._device.type == "cpu" and not outgoing.is_read:
                    self._spare.give(outgoing.buffer)
                self._changed.notify_all()

    def close(self) -> None:
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            for outgoing in self._outgoing.values():
                outgoing.ended = "the sender closed"
        with self._pushing:  # a running push fails at its next check
            self._discard_group("the sender closed")
        self._outgoing.clear()
        self._spare.clear()
        if self._server is not None:
            self._server.close()
        self._receiver.close()

    def push(self, key: str, receivers: Sequence[str]) -> None:
        names = tuple(receivers)
        if len(set(names)) != len(names):
            raise SyncError(f"{key}: two receivers have one name: {', '.join(names)}")
        if not names:
            return
        with self._changed:
            outgoing = self._find(key)
            if not outgoing.attempt:
                raise SyncError(f"{key}: it was not posted")
        while not self._pushing.acquire(timeout=TICK):
            if outgoing.ended:
                raise SyncError(f"{key}: {outgoing.ended}")
        push = _Push(outgoing, names, -(-outgoing.bytes.numel() // self._bucket), self._deadline)
        try:
            outgoing.is_read = True
            self._wait(push, lambda: self._are_here(push))
            push.moved_at = time.monotonic()
            if push.num_buckets:
                self._broadcast(push, self._form(push))
            self._wait(push, lambda: all(visit.is_done for visit in push.visits.values()))
            outgoing.is_read = False
        except BaseException as error:
            for visit in push.visits.values():  # before the group is aborted, so that receivers learn why
                visit.send(over=str(error) or type(error).__name__)
            self._discard_group(str(error))
            raise
        finally:
            self._pushing.release()

    # A push, step by step

    def _wait(self, push: _Push, is_over: Callable[[], bool]) -> None:
        with self._changed:
            push.check()
            while not is_over():
                self._changed.wait(TICK)
                push.check()

    def _are_here(self, push: _Push) -> bool:
        """Whether every receiver has connected. One that arrives does not extend the others' deadline."""
        wanted = (push.outgoing.key, push.outgoing.attempt)
        for visit in self._visits:
            is_free = visit.push is None and not visit.lost
            if is_free and (visit.key, visit.attempt) == wanted and visit.receiver in push.receivers:
                visit.push = push
                push.visits[visit.receiver] = visit
                visit.send(started=True)
        return len(push.visits) == len(push.receivers)

    def _form(self, push: _Push) -> Group:
        """Reuse the last push's group if its members are the same, and all have kept it; else form a new one."""
        from headrace.sync.collective.group import Group

        visits, kept = push.visits.values(), self._group
        if kept is not None and kept.size == len(visits) + 1 and all(visit.group == kept.id for visit in visits):
            push.group = kept
        else:
            self._discard_group("the receivers have changed")

            def share(key: str, value: bytes) -> None:
                for visit in visits:
                    visit.send(key=key, value=value.hex())

            push.group = self._group = Group(
                secrets.token_hex(8),
                rank=0,
                size=len(visits) + 1,
                device=self._device,
                host=self._host,
                deadline=self._deadline,
                share=share,
            )
        with self._changed:  # every member has its invitation before it hears of another's address
            for place, name in enumerate(push.receivers):
                push.visits[name].send(group={"id": push.group.id, "rank": place + 1, "size": push.group.size})
        if not push.group.is_formed:
            push.group.form(push.check, key=push.outgoing.key)
            push.moved_at = time.monotonic()
        return push.group

    def _broadcast(self, push: _Push, group: Group) -> None:
        if group.stream is not None:
            group.stream.wait_event(push.outgoing.written)
        try:
            for piece in push.outgoing.bytes.split(self._bucket):
                if group.num_in_flight == group.depth:
                    self._finish(push, group)
                group.start(piece)
            while group.num_in_flight:
                self._finish(push, group)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            until = time.monotonic() + min(_VERDICT_SECONDS, self._deadline)
            self._wait(push, lambda: time.monotonic() > until)  # the receiver that broke the group is about to report it
            raise SyncError(f"{push.outgoing.key}: the group broke down ({push.standing()}): {error}") from error

    def _finish(self, push: _Push, group: Group) -> None:
        while not group.finish(TICK):
            push.check()
        push.moved_at = time.monotonic()
        push.check()  # it may be given up while buckets still arrive

    def _discard_group(self, reason: str) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.abort(reason)

    def _find(self, key: str) -> _Outgoing:
        if key not in self._outgoing:
            raise SyncError(f"{key}: it is not on offer, or was given up")
        return self._outgoing[key]

    # Receivers, each in a thread of its own

    def _serve(self, connection: socket.socket, is_closed: threading.Event) -> None:
        channel = accept(connection, token=self._token, is_closed=is_closed)
        if channel is None:
            return
        visit = _Visit(channel)
        try:
            while True:
                message = channel.receive(TICK)
                with self._changed:
                    if message is not None:
                        self._hear(visit, message)
                    if visit.push is None and (over := self._over(visit)):
                        return visit.send(over=over)
                    if visit.push is not None and visit.is_done:
                        return visit.send(confirmed=True)
        except (TypeError, ValueError, LookupError):
            return  # not one of our receivers
        finally:
            with self._changed:
                self._visits.discard(visit)
                visit.lost = visit.lost or _GONE
                self._changed.notify_all()

    def _hear(self, visit: _Visit, message: Message) -> None:
        visit.heard_at = time.monotonic()
        push = visit.push
        if "value" in message:
            if push is not None and push.group is not None:
                push.group.mailbox.put(str(message["key"]), bytes.fromhex(message["value"]))
                for other in push.visits.values():
                    if other is not visit:
                        other.send(**message)
            return
        visit.receiver, visit.key, visit.attempt = str(message["receiver"]), str(message["key"]), int(message["attempt"])
        visit.group, visit.is_done = str(message["group"]), bool(message["is_done"])
        if push is not None and int(message["written"]) > visit.num_written:
            push.moved_at = visit.heard_at
        visit.num_written = int(message["written"])
        if message.get("gave_up"):
            visit.lost = f"gave up ({message['gave_up']})"
        self._visits.add(visit)
        self._changed.notify_all()

    def _over(self, visit: _Visit) -> str:
        """Why a receiver that waits for a push need not wait."""
        if self._is_closed:
            return "the sender closed"
        outgoing = self._outgoing.get(visit.key)
        is_offered = outgoing is not None and outgoing.attempt == visit.attempt
        return "" if is_offered or not visit.key else "it was given up"
