"""The sender's end of the collective transport: the buffers on offer, the connected receivers, and their group."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.sync.buffers import Spare, TorchBuffer
from headrace.sync.collective.channel import accept
from headrace.sync.collective.group import Group
from headrace.sync.collective.progress import Outgoing, Push, Visit
from headrace.sync.sockets import TICK, Server

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.collective.channel import Channel, Message
    from headrace.sync.collective.group import Broadcast

_VERDICT_SECONDS = 1.0  # how long the sender waits, after the group failed, to hear which receiver caused it

_GONE = "is gone: its connection closed"


class Sender:
    """One lock guards the state shared by callers and connection threads; every change notifies its condition."""

    def __init__(self, *, token: str, device: torch.device, host: str, deadline: float, bucket: int) -> None:
        self._token, self._device, self._host = token, device, host
        self._deadline, self._bucket = deadline, bucket
        self._changed = threading.Condition(threading.RLock())
        self._pushing = threading.Lock()  # one push at a time
        self._outgoing: dict[str, Outgoing] = {}
        self._spare = Spare(lambda num_bytes: TorchBuffer(num_bytes, device))
        self._visits: dict[Channel, Visit] = {}
        self._attempts, self._numbers = itertools.count(1), itertools.count(1)
        self._kept: tuple[tuple[Channel, ...], Group] | None = None  # the last push's members and group
        self._server: Server | None = None
        self._is_closed = False

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        with self._changed:
            self._refuse_closed()
            if key in self._outgoing:
                raise SyncError(f"{key}: it is on offer already; free it first")
            buffer = self._spare.take(num_bytes)
            self._outgoing[key] = Outgoing(key, buffer, buffer.tensor[:num_bytes])
            return self._outgoing[key].bytes

    def post(self, key: str) -> dict[str, Plain]:
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
            outgoing.num_pushes += 1
        with self._my_turn(outgoing):
            push = Push(outgoing, names, -(-outgoing.bytes.numel() // self._bucket), moved_at=time.monotonic())
            try:
                self._gather(push)
                if push.num_buckets:
                    self._broadcast(push, self._form(push))
                self._confirm(push)
            except BaseException as error:
                self._break_off(push, str(error) or type(error).__name__)
                raise

    def free(self, key: str) -> None:
        with self._changed:
            outgoing = self._outgoing.pop(key, None)
            if outgoing is None:
                return
            outgoing.ended = "it was given up"
            if self._device.type == "cpu" and not outgoing.is_torn and not outgoing.num_pushes:
                self._spare.give(outgoing.buffer)
            self._tell()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for outgoing in self._outgoing.values():
                outgoing.ended = "the sender closed"
            self._tell()
        with self._pushing:  # a running push fails at its next check
            self._discard_group("the sender closed")
        self._outgoing.clear()
        self._spare.clear()
        if self._server is not None:
            self._server.close()

    # A push, step by step

    @contextlib.contextmanager
    def _my_turn(self, outgoing: Outgoing) -> Iterator[None]:
        try:
            while not self._pushing.acquire(timeout=TICK):
                if outgoing.ended:
                    raise SyncError(f"{outgoing.key}: {outgoing.ended}")
            try:
                yield
            finally:
                self._pushing.release()
        finally:
            with self._changed:
                outgoing.num_pushes -= 1

    def _gather(self, push: Push) -> None:
        """Wait until every receiver has connected. One that arrives does not extend the others' deadline."""
        wanted = (push.outgoing.key, push.outgoing.attempt)
        with self._changed:
            while True:
                for visit in self._visits.values():
                    is_for_this = (visit.key, visit.attempt) == wanted and visit.push is None and not visit.lost
                    if is_for_this and visit.receiver in push.receivers:
                        visit.push = push
                        push.visits[visit.receiver] = visit
                self._tell()
                if len(push.visits) == len(push.receivers):
                    push.moved_at = time.monotonic()
                    return
                self._wait(push)

    def _form(self, push: Push) -> Group:
        """Reuse the last push's group if its members are the same connections, else form a new one."""
        members = tuple(push.visits[name].channel for name in push.receivers)
        is_new = self._kept is None or self._kept[0] != members
        if is_new:
            self._discard_group("the receivers have changed")
            group = Group(
                next(self._numbers),
                rank=0,
                size=len(members) + 1,
                device=self._device,
                host=self._host,
                deadline=self._deadline,
                on_set=self._tell,
            )
            self._kept = (members, group)
        assert self._kept is not None
        group = self._kept[1]
        with self._changed:
            push.group = group
            self._tell()

        def pump(seconds: float) -> None:
            group.wait_formed(seconds)
            self._check(push)

        if is_new:
            group.form(pump, key=push.outgoing.key)
            push.moved_at = time.monotonic()
        return group

    def _broadcast(self, push: Push, group: Group) -> None:
        if push.outgoing.written is not None:
            group.stream.wait_event(push.outgoing.written)  # type: ignore[union-attr]
        in_flight: collections.deque[Broadcast] = collections.deque()
        try:
            for piece in push.outgoing.bytes.split(self._bucket):
                in_flight.append(group.broadcast(piece))
                if len(in_flight) == group.depth:
                    self._finish(push, group, in_flight.popleft())
            while in_flight:
                self._finish(push, group, in_flight.popleft())
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            until = time.monotonic() + min(_VERDICT_SECONDS, self._deadline)
            with self._changed:
                while time.monotonic() < until:  # the receiver that broke the group is about to report it
                    self._wait(push)
            raise SyncError(f"{push.outgoing.key}: the group broke down ({push.standing()}): {error}") from error

    def _finish(self, push: Push, group: Group, broadcast: Broadcast) -> None:
        while not group.done(broadcast, TICK):
            self._check(push)
        push.moved_at = time.monotonic()
        self._check(push)  # it may be given up while buckets still arrive

    def _confirm(self, push: Push) -> None:
        with self._changed:
            while not all(visit.is_done for visit in push.visits.values()):
                self._wait(push)

    def _wait(self, push: Push) -> None:
        """Wait for a change, with the lock held; raise if the push cannot go on."""
        push.check(self._deadline)
        self._changed.wait(TICK)

    def _check(self, push: Push) -> None:
        with self._changed:
            push.check(self._deadline)

    def _break_off(self, push: Push, reason: str) -> None:
        with self._changed:
            push.failure = reason
            push.outgoing.is_torn = True
            self._tell()  # before aborting the group, so that receivers learn why
        self._discard_group(reason)

    def _discard_group(self, reason: str) -> None:
        if self._kept is not None:
            group, self._kept = self._kept[1], None
            group.abort(reason)
            group.join(self._deadline)

    def _find(self, key: str) -> Outgoing:
        self._refuse_closed()
        if key not in self._outgoing:
            raise SyncError(f"{key}: it is not on offer, or was given up")
        return self._outgoing[key]

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise SyncError("the transport is closed")

    # Receivers

    def _serve(self, connection: socket.socket, is_closed: threading.Event) -> None:
        channel = accept(connection, token=self._token, is_closed=is_closed)
        if channel is None:
            return
        try:
            while not is_closed.is_set():
                message = channel.receive(TICK)
                if message is not None:
                    with self._changed:
                        visit = self._hear(channel, message)
                        channel.send({"visit": visit.number, **self._news(visit)})
        except (TypeError, ValueError, LookupError):
            return  # not one of our receivers
        finally:
            with self._changed:
                lost = self._visits.pop(channel, None)
                if lost is not None:
                    lost.lost = lost.lost or _GONE
                self._changed.notify_all()

    def _hear(self, channel: Channel, message: Message) -> Visit:
        now = time.monotonic()
        visit = self._visits.get(channel)
        if visit is None or visit.number != message["visit"]:
            receiver, key, attempt = str(message["receiver"]), str(message["key"]), int(message["attempt"])
            visit = self._visits[channel] = Visit(int(message["visit"]), channel, receiver, key, attempt, heard_at=now)
        visit.heard_at = now
        num_written = int(message["written"])
        if visit.push is not None and num_written > visit.num_written:
            visit.push.moved_at = now
        visit.num_written, visit.is_done = num_written, bool(message["is_done"])
        if message.get("gave_up"):
            visit.lost = f"gave up ({message['gave_up']})"
        group = visit.push.group if visit.push is not None else None
        if group is not None and group.number == message.get("group") and message["values"]:
            group.mailbox.put({key: bytes.fromhex(value) for key, value in dict(message["values"]).items()})
            self._tell()
        self._changed.notify_all()
        return visit

    def _tell(self) -> None:
        """Wake waiting threads and send each receiver its news. Any thread may call this, after any change."""
        with self._changed:
            self._changed.notify_all()
            for channel, visit in self._visits.items():
                news = self._news(visit)
                if news:
                    try:
                        channel.send({"visit": visit.number, **news})
                    except OSError:  # closed, or full: the receiver has stopped reading
                        visit.lost = visit.lost or _GONE

    def _news(self, visit: Visit) -> Message:
        """Return the facts not yet sent to this receiver; each is sent once."""
        facts: Message = {}
        push = visit.push
        if push is None:
            outgoing = self._outgoing.get(visit.key)
            if self._is_closed or outgoing is None or outgoing.attempt != visit.attempt:
                facts["over"] = "the sender closed" if self._is_closed else "it was given up"
        elif visit.is_done:
            facts["is_confirmed"] = True
        elif push.failure:
            facts["over"] = push.failure
        else:
            facts["has_started"] = True
            if push.group is not None:
                rank = push.receivers.index(visit.receiver) + 1
                facts["group"] = {"number": push.group.number, "rank": rank, "size": push.group.size}
                facts |= {f"value {key}": value.hex() for key, value in push.group.mailbox.all().items()}
        news = {name: fact for name, fact in facts.items() if name not in visit.told}
        visit.told |= news.keys()
        return news
