"""The receiver's end of the collective transport: join the group it is told of, write each bucket while the next one comes."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.sync.collective.desk import Caller
from headrace.sync.collective.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from headrace.records import Plain
    from headrace.sync.collective.desk import Message
    from headrace.sync.collective.group import Move
    from headrace.sync.transport import Target

_SLICE = 0.1
"""Seconds between two looks at whether to go on."""
_GRACE = 0.5
"""Seconds past the deadline that a sender which answers is left to say who is late: it knows, a receiver does not."""
_VERDICT = 1.0
"""Seconds that a receiver whose group broke down waits for the sender to say why."""


@dataclass(frozen=True)
class Place:
    """Where a parcel was posted, as `post` gave it."""

    key: str
    bytes: int
    bucket: int
    host: str
    port: int
    attempt: int
    backend: str

    @classmethod
    def read(cls, place: Mapping[str, Plain]) -> Place:
        kinds = {name: int if name in ("bytes", "bucket", "port", "attempt") else str for name in cls.__annotations__}
        wrong = [name for name, kind in kinds.items() if type(place.get(name)) is not kind]
        if wrong:
            raise SyncError(f"the place of a collective parcel lacks {', '.join(wrong)}: {dict(place)!r}")
        values: dict[str, Any] = {name: place[name] for name in kinds}
        if values["bytes"] < 0 or values["bucket"] < 1:
            raise SyncError(f"the place of a collective parcel has no sense: {values['bytes']} bytes by {values['bucket']}")
        return cls(**values)

    @property
    def num_buckets(self) -> int:
        return -(-self.bytes // self.bucket)


class Fetcher:
    """Keeps its line to the sender and its group from one fetch to the next."""

    def __init__(self, *, token: str, device: torch.device, deadline: float) -> None:
        self._token, self.device, self.deadline = token, device, deadline
        self.caller: Caller | None = None
        self.group: Group | None = None
        self.is_closed = False
        self._turn = threading.Lock()
        self._visits = itertools.count(1)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = Place.read(place)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if there.backend != backend:
            raise SyncError(f"{there.key}: sent over {there.backend}, but {receiver!r} receives on {self.device} ({backend})")
        if there.bytes != target.num_bytes:
            raise SyncError(f"{there.key}: {there.bytes} bytes were posted, {receiver!r} has room for {target.num_bytes}")
        while not self._turn.acquire(timeout=_SLICE):
            target.check()
        try:
            _Fetch(self, there, target, receiver, number=next(self._visits)).run()
        finally:
            self._turn.release()

    def call(self, place: Place, check: Callable[[], None]) -> Caller:
        """The line to that sender: the one there is, or a new one."""
        if self.caller is None or self.caller.address != (place.host, place.port) or not self.caller.is_up():
            self.hang_up("the line to the sender changed")
            self.caller = Caller(place.host, place.port, token=self._token, deadline=self.deadline, check=check)
        return self.caller

    def hang_up(self, reason: str) -> None:
        if self.caller is not None:
            self.caller.close()
            self.caller = None
        self.drop_group(reason)

    def drop_group(self, reason: str) -> None:
        if self.group is not None:
            group, self.group = self.group, None
            group.abort(reason)
            group.join(self.deadline)

    def close(self) -> None:
        self.is_closed = True
        with self._turn:  # whoever fetches leaves at its next look
            self.hang_up("the receiver closed")


class _Fetch:
    """One of them."""

    def __init__(self, fetcher: Fetcher, place: Place, target: Target, receiver: str, *, number: int) -> None:
        self._fetcher, self._place, self._target, self._receiver = fetcher, place, target, receiver
        self._number = number
        self._num_written = 0
        self._is_done = self._is_thanked = False
        self._moved_at = time.monotonic()
        self._invitation: Message | None = None
        self._values: dict[str, bytes] = {}
        """Set by the other members of the group, before and while this one forms it."""
        self._told: set[str] = set()
        """Keys that this one has set in the group it forms, and told the sender of."""

    def run(self) -> None:
        try:
            self._check()
            self._caller = self._fetcher.call(self._place, self._check)
            if self._place.num_buckets:
                while self._invitation is None:
                    self._look(_SLICE)
                self._receive(self._join(self._invitation))
            self._is_done = True
            self._ask()  # not after the answer to the last question: the sender waits for this one
            while not self._is_thanked:
                self._look(_SLICE)
        except BaseException as error:
            if self._fetcher.caller is not None:  # before the connections break, so that the sender hears why
                self._fetcher.caller.tell({**self._report(), "gave_up": str(error) or type(error).__name__})
            self._fetcher.hang_up(str(error))
            raise

    def _join(self, invitation: Message) -> Group:
        number = int(invitation["number"])
        known = self._fetcher.group
        if known is not None and known.number == number:
            return known
        self._fetcher.drop_group("the receivers have changed")
        group = self._fetcher.group = Group(
            number,
            rank=int(invitation["rank"]),
            size=int(invitation["size"]),
            device=self._fetcher.device,
            host=self._caller.local_host,
            deadline=self._fetcher.deadline,
        )
        group.mailbox.put(self._values)
        self._told = set()
        group.form(lambda seconds: self._look(min(seconds, 0.02)), key=self._place.key)
        return group

    def _receive(self, group: Group) -> None:
        place = self._place
        sizes = [min(place.bucket, place.bytes - start) for start in range(0, place.bytes, place.bucket)]
        buffers, depth = group.staging(sizes[0]), group.depth
        under_way: collections.deque[Move] = collections.deque()
        try:
            under_way.extend(group.broadcast(buffers[k % depth][:size]) for k, size in enumerate(sizes[:depth]))
            for k, size in enumerate(sizes):
                move = under_way.popleft()
                while not group.done(move, _SLICE):
                    self._look(0.0)
                with group.on_stream():
                    self._target.write(k * place.bucket, buffers[k % depth][:size])
                if k + depth < len(sizes):
                    under_way.append(group.broadcast(buffers[k % depth][: sizes[k + depth]]))
                self._num_written = k + 1
                self._moved_at = time.monotonic()
                self._look(0.0)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            until = time.monotonic() + min(_VERDICT, self._fetcher.deadline)
            while time.monotonic() < until:
                self._look(_SLICE)
            raise SyncError(f"{place.key}: the group broke down ({self._standing()}): {error}") from error

    def _look(self, seconds: float) -> None:
        """Say how far this is, hear the sender's answer if there is one within so long, and whether to go on."""
        self._check()
        if self._caller.may_ask:
            self._ask()
        try:
            answer = self._caller.answer(seconds)
        except SyncError as error:
            raise SyncError(f"{self._place.key}: {error} ({self._standing()})") from error
        if answer is not None:
            self._take(answer)
        now = time.monotonic()
        if self._caller.waited > self._fetcher.deadline:
            raise SyncError(
                f"{self._place.key}: the sender has not answered for {self._caller.waited:.1f} s ({self._standing()})"
            )
        if now - self._moved_at > self._fetcher.deadline + _GRACE:
            late = f"the sender answers, but nothing has come for {now - self._moved_at:.1f} s"
            raise SyncError(f"{self._place.key}: {late} ({self._standing()})")

    def _ask(self) -> None:
        try:
            self._caller.ask(self._report())
        except SyncError as error:
            raise SyncError(f"{self._place.key}: {error} ({self._standing()})") from error

    def _report(self) -> Message:
        report: Message = {
            "visit": self._number,
            "key": self._place.key,
            "attempt": self._place.attempt,
            "receiver": self._receiver,
            "written": self._num_written,
            "is_done": self._is_done,
        }
        group = self._fetcher.group
        if group is not None:
            new = {key: value.hex() for key, value in group.mailbox.own().items() if key not in self._told}
            self._told |= new.keys()
            report |= {"group": group.number, "values": new}
        return report

    def _take(self, answer: Message) -> None:
        if answer.get("over"):
            raise SyncError(f"{self._place.key}: the sender ended it: {answer['over']}")
        if answer.get("has_begun") or answer.get("group"):
            self._moved_at = time.monotonic()
        self._invitation = answer.get("group") or self._invitation
        self._is_thanked = bool(answer.get("is_thanked")) or self._is_thanked
        values = {key: bytes.fromhex(value) for key, value in answer.get("values", {}).items()}
        self._values |= values
        group = self._fetcher.group
        if group is not None and self._invitation is not None and group.number == self._invitation["number"]:
            group.mailbox.put(values)

    def _check(self) -> None:
        if self._fetcher.is_closed:
            raise SyncError(f"{self._place.key}: the receiver's transport is closed")
        self._target.check()

    def _standing(self) -> str:
        return f"{self._num_written} of {self._place.num_buckets} buckets written by {self._receiver!r}"
