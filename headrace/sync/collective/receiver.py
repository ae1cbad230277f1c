"""The receiver's end of the collective transport: joins the sender's group, and writes each bucket while the next arrives."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.collective.channel import call
from headrace.sync.collective.group import Group
from headrace.sync.sockets import TICK
from headrace.sync.transport import read_place

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from headrace.records import Plain
    from headrace.sync.collective.channel import Channel, Message
    from headrace.sync.collective.group import Broadcast
    from headrace.sync.transport import Target

_GRACE_SECONDS = 0.5  # time past the deadline for the sender to say who is late: only the sender knows
_VERDICT_SECONDS = 1.0  # how long a receiver waits for the sender to say why the group failed


@dataclass(frozen=True)
class Place:
    key: str
    bytes: int
    bucket: int
    host: str
    port: int
    attempt: int
    backend: str

    @property
    def num_buckets(self) -> int:
        return -(-self.bytes // self.bucket)


class Receiver:
    """Keeps its channel to the sender and its group between fetches."""

    def __init__(self, *, token: str, device: torch.device, deadline: float) -> None:
        self.token, self.device, self.deadline = token, device, deadline
        self.channel: Channel | None = None
        self.group: Group | None = None
        self.is_closed = False
        self._address: tuple[str, int] | None = None
        self._fetching = threading.Lock()  # one fetch at a time
        self._numbers = itertools.count(1)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = read_place(Place, place)
        if there.bytes < 0 or there.bucket < 1:
            raise SyncError(f"{there.key}: {there.bytes} bytes in buckets of {there.bucket} make no sense")
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if there.backend != backend:
            raise SyncError(f"{there.key}: sent over {there.backend}, but {receiver!r} receives on {self.device} ({backend})")
        if there.bytes != target.num_bytes:
            raise SyncError(f"{there.key}: {there.bytes} bytes were posted, {receiver!r} has room for {target.num_bytes}")
        while not self._fetching.acquire(timeout=TICK):
            target.check()
        try:
            _Fetch(self, there, target, receiver, number=next(self._numbers)).run()
        finally:
            self._fetching.release()

    def connected(self, fetch: _Fetch, place: Place) -> Channel:
        """Return the channel to that sender: the open one if it still works, else a new one."""
        if self.channel is None or self._address != (place.host, place.port) or not self._is_up(self.channel):
            self.hang_up("the sender has changed")
            self.channel = call(place.host, place.port, token=self.token, deadline=self.deadline, check=fetch.check)
            self._address = (place.host, place.port)
        return self.channel

    @staticmethod
    def _is_up(channel: Channel) -> bool:
        """Whether the channel still seems open. Drops messages left over from the last fetch."""
        try:
            while channel.receive(0.0) is not None:
                pass
        except (OSError, ValueError):
            return False
        return True

    def hang_up(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.drop_group(reason)

    def drop_group(self, reason: str) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.abort(reason)
            group.join(self.deadline)

    def close(self) -> None:
        self.is_closed = True
        with self._fetching:  # a running fetch fails at its next check
            self.hang_up("the receiver closed")


class _Fetch:
    def __init__(self, end: Receiver, place: Place, target: Target, receiver: str, *, number: int) -> None:
        self._end, self._place, self._target, self._receiver = end, place, target, receiver
        self._number = number
        self._num_written = 0
        self._is_done = self._is_confirmed = False
        self._reported_at = 0.0
        self._moved_at = self._heard_at = time.monotonic()
        self._invitation: Message | None = None
        self._values: dict[str, bytes] = {}  # set by other members, before and while this one joins the group
        self._told: set[str] = set()  # keys of this member's mailbox that were sent to the sender

    def run(self) -> None:
        try:
            self.check()
            self._channel = self._end.connected(self, self._place)
            if self._place.num_buckets:
                while self._invitation is None:
                    self._exchange(TICK)
                self._receive(self._join(self._invitation))
            self._is_done = True
            self._report()
            while not self._is_confirmed:
                self._exchange(TICK)
        except BaseException as error:
            if self._end.channel is not None:  # before aborting the group, so that the sender learns why
                with contextlib.suppress(OSError):
                    self._end.channel.send({**self._progress(), "gave_up": str(error) or type(error).__name__})
            self._end.hang_up(str(error))
            raise

    def check(self) -> None:
        """Raise if the update is no longer wanted."""
        if self._end.is_closed:
            raise SyncError(f"{self._place.key}: the receiver's transport is closed")
        self._target.check()

    def _join(self, invitation: Message) -> Group:
        number = int(invitation["number"])
        known = self._end.group
        if known is not None and known.number == number:
            return known
        self._end.drop_group("the receivers have changed")
        group = self._end.group = Group(
            number,
            rank=int(invitation["rank"]),
            size=int(invitation["size"]),
            device=self._end.device,
            host=self._channel.local_host,
            deadline=self._end.deadline,
        )
        self._told = set()
        group.mailbox.put(self._values)
        group.form(lambda seconds: self._exchange(min(seconds, 0.02)), key=self._place.key)
        return group

    def _receive(self, group: Group) -> None:
        place = self._place
        sizes = [min(place.bucket, place.bytes - start) for start in range(0, place.bytes, place.bucket)]
        buffers, depth = group.staging(sizes[0]), group.depth
        in_flight: collections.deque[Broadcast] = collections.deque()
        try:
            in_flight.extend(group.broadcast(buffers[k % depth][:size]) for k, size in enumerate(sizes[:depth]))
            for k, size in enumerate(sizes):
                broadcast = in_flight.popleft()
                while not group.done(broadcast, TICK):
                    self._exchange(0.0)
                with group.on_stream():
                    self._target.write(k * place.bucket, buffers[k % depth][:size])
                if k + depth < len(sizes):
                    in_flight.append(group.broadcast(buffers[k % depth][: sizes[k + depth]]))
                self._num_written = k + 1
                self._moved_at = time.monotonic()
                self._exchange(0.0)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            until = time.monotonic() + min(_VERDICT_SECONDS, self._end.deadline)
            while time.monotonic() < until:
                self._exchange(TICK)
            raise self._failed(f"the group broke down: {error}") from error

    def _exchange(self, seconds: float) -> None:
        """Report progress, handle a message if one arrives within `seconds`, and raise if the fetch cannot go on."""
        self.check()
        if time.monotonic() - self._reported_at >= TICK or self._new_values():
            self._report()
        try:
            message = self._channel.receive(seconds)
        except OSError as error:
            raise self._failed(f"the sender is gone: {error.strerror or error}") from error
        except ValueError as error:
            raise self._failed(f"the sender does not speak as this run does: {error}") from error
        if message is not None:
            self._heard_at = time.monotonic()
            if message.get("visit") == self._number:
                self._take(message)
        now, deadline = time.monotonic(), self._end.deadline
        if now - self._heard_at > deadline:
            raise self._failed(f"the sender has not answered for {now - self._heard_at:.1f} s")
        if now - self._moved_at > deadline + _GRACE_SECONDS:
            raise self._failed(f"the sender answers, but nothing has come for {now - self._moved_at:.1f} s")

    def _take(self, message: Message) -> None:
        if message.get("over"):
            raise SyncError(f"{self._place.key}: the sender ended it: {message['over']}")
        if message.get("has_started") or message.get("group"):
            self._moved_at = time.monotonic()
        self._invitation = message.get("group") or self._invitation
        self._is_confirmed = bool(message.get("is_confirmed")) or self._is_confirmed
        values = {name.removeprefix("value "): bytes.fromhex(v) for name, v in message.items() if name.startswith("value ")}
        self._values |= values
        group = self._end.group
        if group is not None and self._invitation is not None and group.number == self._invitation["number"]:
            group.mailbox.put(values)

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        try:
            self._channel.send(self._progress())
        except OSError as error:  # also a full socket: the sender has stopped reading
            raise self._failed(f"the sender is gone: {error.strerror or error}") from error

    def _progress(self) -> Message:
        new = self._new_values()
        self._told |= new.keys()
        return {
            "visit": self._number,
            "key": self._place.key,
            "attempt": self._place.attempt,
            "receiver": self._receiver,
            "written": self._num_written,
            "is_done": self._is_done,
            "group": 0 if self._end.group is None else self._end.group.number,
            "values": {key: value.hex() for key, value in new.items()},
        }

    def _new_values(self) -> dict[str, bytes]:
        group = self._end.group
        return {} if group is None else {key: value for key, value in group.mailbox.own().items() if key not in self._told}

    def _failed(self, reason: str) -> SyncError:
        standing = f"{self._num_written} of {self._place.num_buckets} buckets written by {self._receiver!r}"
        return SyncError(f"{self._place.key}: {reason} ({standing})")
