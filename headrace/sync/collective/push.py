"""One push of the collective transport, as the sender's thread walks through it: gather, form, broadcast, confirm."""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.sync.collective.group import Group
from headrace.sync.sockets import TICK

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from headrace.sync.collective.channel import Channel, Message
    from headrace.sync.memory import TorchBuffer

_VERDICT_SECONDS = 1.0  # how long the sender waits, after the group failed, to hear which receiver caused it
_LEAVE_SECONDS = 0.5  # how long receivers that were told why a push ended have to hang up
_POLL = 0.002  # seconds between looks at the reports of all receivers
_GONE = "is gone: its connection closed"


@dataclass
class Outgoing:
    """A buffer on offer. `attempt` numbers the posts (0: none yet), to tell this one from earlier ones under the same key."""

    key: str
    buffer: TorchBuffer
    bytes: Tensor
    attempt: int = 0
    written: Any = None  # on a GPU, the event after which the bytes are complete
    ended: str = ""
    is_read: bool = False  # by a push that is running, or that failed and may be reading still
    arrivals: queue.SimpleQueue[Visit] = field(default_factory=queue.SimpleQueue)  # receivers that wait for a push

    def end(self, reason: str) -> None:
        """End a push that runs, and tell receivers that wait for one."""
        self.ended = reason
        with contextlib.suppress(queue.Empty):  # a push takes from it too
            while True:
                visit = self.arrivals.get_nowait()
                visit.send(over=reason)
                visit.channel.close()


@dataclass(eq=False)
class Visit:
    """A receiver's `fetch`: its connection and its reports. `num_written` counts buckets; `lost` is why it will not finish."""

    channel: Channel
    receiver: str
    group: str  # that the receiver has kept
    num_written: int = 0
    is_done: bool = False
    is_confirmed: bool = False
    lost: str = ""
    heard_at: float = field(default_factory=time.monotonic)

    def send(self, **message: object) -> None:
        try:
            self.channel.send(message)
        except OSError:  # closed, or full: the receiver has stopped reading
            self.lost = self.lost or _GONE

    def read(self, seconds: float = 0.0) -> list[Message]:
        """Take in what has come, or comes within `seconds`; return the addresses that the receiver shares with its group."""
        shared = []
        try:
            for message in self.channel.read(seconds):
                self.heard_at = time.monotonic()
                if "value" in message:
                    shared.append(message)
                else:
                    self.take(message)
        except OSError:
            self.lost = self.lost or _GONE
        except (TypeError, ValueError, LookupError) as error:
            self.lost = self.lost or f"does not speak as this run does: {error}"
        return shared

    def take(self, report: Message) -> None:
        self.num_written, self.is_done = int(report["written"]), bool(report["is_done"])
        if report.get("gave_up"):
            self.lost = f"gave up ({report['gave_up']})"


class Push:
    """Raises `SyncError` if a receiver is late, lost or gives up, or if the buffer is freed. `visits` is by receiver."""

    def __init__(self, outgoing: Outgoing, receivers: Sequence[str], *, bucket: int, deadline: float) -> None:
        self._outgoing, self._receivers, self._deadline = outgoing, receivers, deadline
        self._pieces = outgoing.bytes.split(bucket) if outgoing.bytes.numel() else ()
        self._visits: dict[str, Visit] = {}
        self._group: Group | None = None
        self._moved_at = time.monotonic()  # when anything last made progress

    def run(self, last: Group | None, *, device: torch.device, host: str) -> Group | None:
        """`last` is the group of the last push; returns the one to keep for the next."""
        try:
            self._gather()
            if self._pieces:
                self._form(last, device, host)
                self._broadcast()
            while not all(visit.is_confirmed for visit in self._visits.values()):
                time.sleep(_POLL)
                self._check()
            return self._group or last
        except BaseException as error:
            self._break_off(str(error) or type(error).__name__, last)
            raise
        finally:
            for visit in self._visits.values():
                visit.channel.close()

    def _gather(self) -> None:
        """Wait until every receiver has connected. One that arrives does not extend the others' deadline."""
        arrivals = self._outgoing.arrivals
        while len(self._visits) < len(self._receivers):
            self._check()
            with contextlib.suppress(queue.Empty):
                visit = arrivals.get(timeout=TICK)
                visit.read()
                if visit.receiver not in self._receivers:  # it waits for another push
                    arrivals.put(visit)
                    time.sleep(_POLL)
                elif not visit.lost:
                    self._visits[visit.receiver] = visit
                    visit.send(started=True)
        self._moved_at = time.monotonic()

    def _form(self, last: Group | None, device: torch.device, host: str) -> None:
        """Reuse the last push's group if its members are the same, and all have kept it; else form a new one."""
        visits, size = self._visits.values(), len(self._visits) + 1
        if last is not None and last.size == size and all(visit.group == last.id for visit in visits):
            self._group = last
        else:
            if last is not None:
                last.abort("the receivers have changed")

            def share(key: str, value: bytes) -> None:
                for visit in visits:
                    visit.send(key=key, value=value.hex())

            id = secrets.token_hex(8)
            self._group = Group(id, rank=0, size=size, device=device, host=host, deadline=self._deadline, share=share)
        for place, name in enumerate(self._receivers):  # all are invited before they hear of each other's addresses
            self._visits[name].send(group={"id": self._group.id, "rank": place + 1, "size": size})
        if not self._group.is_formed:
            self._group.form(self._check, key=self._outgoing.key)
            self._moved_at = time.monotonic()

    def _broadcast(self) -> None:
        group = self._group
        assert group is not None
        if group.stream is not None:
            group.stream.wait_event(self._outgoing.written)
        try:
            for piece in self._pieces:
                if group.num_in_flight == group.depth:
                    self._finish(group)
                group.start(piece)
            while group.num_in_flight:
                self._finish(group)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            until = time.monotonic() + min(_VERDICT_SECONDS, self._deadline)
            while time.monotonic() < until:  # the receiver that broke the group is about to report it
                time.sleep(_POLL)
                self._check()
            raise SyncError(f"{self._outgoing.key}: the group broke down ({self._standing()}): {error}") from error

    def _finish(self, group: Group) -> None:
        while not group.finish(TICK):
            self._check()
        self._moved_at = time.monotonic()
        self._check()  # it may be given up while buckets still arrive

    def _break_off(self, reason: str, last: Group | None) -> None:
        """Tell the receivers before their group breaks down, so that they learn why."""
        for visit in self._visits.values():
            visit.send(over=reason)
        until = time.monotonic() + _LEAVE_SECONDS
        for visit in self._visits.values():
            while not (visit.lost or visit.is_done or self._is_silent(visit)) and time.monotonic() < until:
                visit.read(TICK)
        for group in {self._group, last}:
            if group is not None:
                group.abort(reason)

    def _check(self) -> None:
        """Read the receivers' reports, pass on the addresses they share, and raise if this push cannot go on."""
        visits, key = self._visits.values(), self._outgoing.key
        for visit in [each for each in visits if not each.is_confirmed]:
            num_written = visit.num_written
            for message in visit.read():
                if self._group is not None:
                    self._group.mailbox.put(str(message["key"]), bytes.fromhex(message["value"]))
                for other in {*visits} - {visit}:
                    other.send(**message)
            if visit.num_written > num_written:
                self._moved_at = visit.heard_at
            if visit.is_done:
                visit.is_confirmed = True
                visit.send(confirmed=True)
        if self._outgoing.ended:
            raise SyncError(f"{key}: {self._outgoing.ended} ({self._standing()})")
        for visit in visits:
            if visit.lost and not visit.is_done:
                done = f"{visit.num_written} of {len(self._pieces)} buckets"
                raise SyncError(f"{key}: receiver {visit.receiver!r} {visit.lost} after {done}")
        waited = time.monotonic() - self._moved_at
        if waited > self._deadline:
            raise SyncError(f"{key}: {self._late()} for {waited:.1f} s ({self._standing()})")

    def _standing(self) -> str:
        if len(self._visits) < len(self._receivers):
            return f"{len(self._visits)} of {len(self._receivers)} receivers are here"
        parts = (f"{name} {self._visits[name].num_written}" for name in self._receivers)
        return f"of {len(self._pieces)} buckets written: {', '.join(parts)}"

    def _late(self) -> str:
        """Name the receivers that never connected, else the silent ones, else those furthest behind."""
        waiting = [visit for visit in self._visits.values() if not visit.is_done]
        silent = [visit for visit in waiting if self._is_silent(visit)]
        least = min((visit.num_written for visit in waiting), default=0)
        if absent := [name for name in self._receivers if name not in self._visits]:
            names, fault = absent, "has not come"
        elif silent:
            names, fault = [visit.receiver for visit in silent], "has not been heard from"
        else:
            names, fault = [visit.receiver for visit in waiting if visit.num_written == least], "has made no progress"
        return f"receiver {', '.join(map(repr, names))} {fault}"

    def _is_silent(self, visit: Visit) -> bool:
        return time.monotonic() - visit.heard_at > self._deadline / 2
