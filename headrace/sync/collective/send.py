"""The sender's end of the collective transport: parcels, the receivers that have come for them, and the group they form."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.model import allocate_bytes
from headrace.sync.collective.desk import Desk
from headrace.sync.collective.group import Group
from headrace.sync.collective.round import Parcel, Round, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.collective.desk import Line, Message
    from headrace.sync.collective.group import Move

_SLICE = 0.1
"""Seconds between two looks at whether to go on."""
_VERDICT = 1.0
"""Seconds that a group which broke down waits to hear whose fault it was."""


class Sender:
    """One lock guards what the desk's thread and the caller's share; its condition is notified on every message and `free`."""

    def __init__(self, *, token: str, device: torch.device, host: str, deadline: float, bucket: int) -> None:
        self._device, self._host, self._deadline, self._bucket = device, host, deadline, bucket
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        """Held by the push that runs: one at a time."""
        self._parcels: dict[str, Parcel] = {}
        self._spare: Tensor | None = None
        self._visits: dict[Line, Visit] = {}
        self._attempts, self._groups = itertools.count(1), itertools.count(1)
        self._kept: tuple[tuple[Line, ...], Group] | None = None
        self._token = token
        self._desk: Desk | None = None
        self._is_closed = False

    def room(self, key: str, num_bytes: int) -> Tensor:
        with self._changed:
            self._refuse_closed()
            if key in self._parcels:
                raise SyncError(f"{key}: there is a parcel of that name already; free it first")
            memory, self._spare = self._spare, None
            if memory is None or memory.numel() != num_bytes:
                memory = allocate_bytes(num_bytes, self._device)
            parcel = Parcel(key, memory)
            self._parcels[key] = parcel
            return parcel.buffer

    def post(self, key: str) -> dict[str, Plain]:
        with self._changed:
            parcel = self._parcel(key)
            parcel.attempt = next(self._attempts)
            if self._device.type == "cuda":
                parcel.written = torch.cuda.current_stream(self._device).record_event()
            if self._desk is None:
                self._desk = Desk(
                    self._host, token=self._token, on_message=self._on_message, on_gone=self._on_gone, news=self._news
                )
            return {
                "key": key,
                "bytes": parcel.buffer.numel(),
                "bucket": self._bucket,
                "host": self._host,
                "port": self._desk.port,
                "attempt": parcel.attempt,
                "backend": "nccl" if self._device.type == "cuda" else "gloo",
            }

    def push(self, key: str, receivers: Sequence[str]) -> None:
        names = tuple(receivers)
        if len(set(names)) != len(names):
            raise SyncError(f"{key}: two receivers have one name: {', '.join(names)}")
        if not names:
            return
        with self._changed:
            parcel = self._parcel(key)
            if not parcel.attempt:
                raise SyncError(f"{key}: it was not posted")
            parcel.num_pushes += 1
        num_buckets = -(-parcel.buffer.numel() // self._bucket)
        with self._my_turn(parcel):
            turn = Round(parcel, names, num_buckets, moved_at=time.monotonic())
            try:
                self._gather(turn)
                if num_buckets:
                    self._form(turn)
                    self._move(turn)
                self._confirm(turn)
            except BaseException as error:
                self._break_off(turn, str(error) or type(error).__name__)
                raise

    def free(self, key: str) -> None:
        with self._changed:
            parcel = self._parcels.pop(key, None)
            if parcel is None:
                return
            parcel.ended = "it was given up"
            if self._device.type == "cpu" and not parcel.is_torn and not parcel.num_pushes:
                self._spare = parcel.buffer
        self._tell()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for parcel in self._parcels.values():
                parcel.ended = "the sender closed"
        self._tell()
        with self._turn:  # whoever pushes leaves at its next look
            self._discard_group("the sender closed")
        self._parcels.clear()
        self._spare = None
        if self._desk is not None:
            self._desk.close()

    # A push, in order

    @contextlib.contextmanager
    def _my_turn(self, parcel: Parcel) -> Iterator[None]:
        try:
            while not self._turn.acquire(timeout=_SLICE):
                if parcel.ended:
                    raise SyncError(f"{parcel.key}: {parcel.ended}")
            try:
                yield
            finally:
                self._turn.release()
        finally:
            with self._changed:
                parcel.num_pushes -= 1

    def _gather(self, turn: Round) -> None:
        """Wait until each receiver has come. One that comes does not make the others less late."""
        with self._changed:
            while True:
                for line, visit in self._visits.items():
                    is_for_this = (visit.key, visit.attempt) == (turn.parcel.key, turn.parcel.attempt)
                    if is_for_this and visit.round is None and visit.receiver in turn.receivers and not visit.lost:
                        visit.round = turn
                        turn.visits[visit.receiver], turn.lines[visit.receiver] = visit, line
                        self._nudge()
                if len(turn.visits) == len(turn.receivers):
                    turn.moved_at = time.monotonic()
                    return
                turn.check(self._deadline)
                self._changed.wait(_SLICE)

    def _form(self, turn: Round) -> None:
        """Take the group of the last push if its members are the same connections, else a new one."""
        lines = tuple(turn.lines[name] for name in turn.receivers)
        is_new = self._kept is None or self._kept[0] != lines
        if is_new:
            self._discard_group("the receivers have changed")
            group = Group(
                next(self._groups),
                rank=0,
                size=len(lines) + 1,
                device=self._device,
                host=self._host,
                deadline=self._deadline,
                on_set=self._nudge,
            )
            self._kept = (lines, group)
        assert self._kept is not None
        with self._changed:
            turn.group = self._kept[1]
        self._nudge()

        def pump(seconds: float) -> None:
            turn.group.wait_formed(seconds)  # type: ignore[union-attr]
            with self._changed:
                turn.check(self._deadline)

        if is_new:
            turn.group.form(pump, key=turn.parcel.key)
            self._moved(turn)

    def _move(self, turn: Round) -> None:
        group = turn.group
        assert group is not None
        if turn.parcel.written is not None:
            group.stream.wait_event(turn.parcel.written)  # type: ignore[union-attr]
        under_way: collections.deque[Move] = collections.deque()
        try:
            for piece in turn.parcel.buffer.split(self._bucket):
                under_way.append(group.broadcast(piece))
                if len(under_way) == group.depth:
                    self._finish(turn, group, under_way.popleft())
            while under_way:
                self._finish(turn, group, under_way.popleft())
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            self._verdict(turn)
            raise SyncError(f"{turn.parcel.key}: the group broke down ({turn.standing()}): {error}") from error

    def _finish(self, turn: Round, group: Group, move: Move) -> None:
        while not group.done(move, _SLICE):
            with self._changed:
                turn.check(self._deadline)
        self._moved(turn)
        with self._changed:  # buckets may go on and on though the push is given up
            turn.check(self._deadline)

    def _confirm(self, turn: Round) -> None:
        with self._changed:
            while not all(visit.is_done for visit in turn.visits.values()):
                turn.check(self._deadline)
                self._changed.wait(_SLICE)

    def _verdict(self, turn: Round) -> None:
        """A broken group is some receiver's doing, and its line will say so in a moment."""
        until = time.monotonic() + min(_VERDICT, self._deadline)
        with self._changed:
            while time.monotonic() < until:
                turn.check(self._deadline)
                self._changed.wait(_SLICE)

    def _break_off(self, turn: Round, reason: str) -> None:
        with self._changed:
            turn.over = reason
            turn.parcel.is_torn = True
        self._tell()  # before the connections break, so that receivers hear why
        self._discard_group(reason)

    def _discard_group(self, reason: str) -> None:
        if self._kept is not None:
            group, self._kept = self._kept[1], None
            group.abort(reason)
            group.join(self._deadline)

    def _moved(self, turn: Round) -> None:
        with self._changed:
            turn.moved_at = time.monotonic()

    def _parcel(self, key: str) -> Parcel:
        self._refuse_closed()
        if key not in self._parcels:
            raise SyncError(f"{key}: there is no such parcel, or it was given up")
        return self._parcels[key]

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise SyncError("the transport is closed")

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._nudge()

    def _nudge(self) -> None:
        if self._desk is not None:
            self._desk.nudge()

    # What the desk's thread calls

    def _on_message(self, line: Line, message: Message) -> None:
        with self._changed:
            now = time.monotonic()
            visit = self._visits.get(line)
            if visit is None or visit.number != message.get("visit"):
                visit = Visit(
                    number=int(message.get("visit", 0)),
                    receiver=str(message.get("receiver", "")),
                    key=str(message.get("key", "")),
                    attempt=int(message.get("attempt", 0)),
                    heard_at=now,
                )
                self._visits[line] = visit
            visit.heard_at = now
            num_written = int(message.get("written", 0))
            if visit.round is not None and num_written > visit.num_written:
                visit.round.moved_at = now
            visit.num_written = num_written
            visit.is_done = bool(message.get("is_done", False))
            visit.lost = f"gave up ({message['gave_up']})" if message.get("gave_up") else visit.lost
            group = visit.round.group if visit.round is not None else None
            if group is not None and group.number == message.get("group"):
                group.mailbox.put({key: bytes.fromhex(value) for key, value in dict(message.get("values", {})).items()})
            self._changed.notify_all()

    def _on_gone(self, line: Line) -> None:
        with self._changed:
            visit = self._visits.pop(line, None)
            if visit is not None and not visit.lost:
                visit.lost = "is gone: its connection closed"
            self._changed.notify_all()

    def _news(self, line: Line) -> Message | None:
        with self._changed:
            visit = self._visits.get(line)
            if visit is None:
                return {}
            turn = visit.round
            if turn is None:
                parcel = self._parcels.get(visit.key)
                if parcel is not None and parcel.attempt == visit.attempt and not self._is_closed:
                    return None
                return {"over": "the sender closed" if self._is_closed else "it was given up"}
            if visit.is_done:
                return {"is_thanked": True}
            if turn.over:
                return {"over": turn.over}
            return self._joining(line, turn, visit)

    def _joining(self, line: Line, turn: Round, visit: Visit) -> Message | None:
        """Which group to join, once; then what its members have set, as it comes."""
        news: Message = {}
        if not visit.is_told:
            visit.is_told = news["has_begun"] = True
        group = turn.group
        if group is None:
            return news or None
        if line.group != group.number:
            line.group, line.given = group.number, set()
        if not visit.is_invited:
            visit.is_invited = True
            rank = turn.receivers.index(visit.receiver) + 1
            news["group"] = {"number": group.number, "rank": rank, "size": group.size}
        values = {key: value.hex() for key, value in group.mailbox.all().items() if key not in line.given}
        if values:
            line.given |= values.keys()
            news["values"] = values
        return news or None
