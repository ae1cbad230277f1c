"""The receiver's end of the collective transport: joins the sender's group, and writes each bucket while the next arrives."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import LinkError, SyncError
from headrace.sync.collective.channel import call
from headrace.sync.collective.group import Group
from headrace.sync.sockets import TICK

if TYPE_CHECKING:
    from headrace.sync.collective.channel import Message
    from headrace.sync.collective.transport import CollectiveTransport
    from headrace.sync.transport import Target

_GRACE_SECONDS = 0.5  # time past the deadline for the sender to say who is late: only the sender knows
_MOST_REPORTS = 200  # per deadline. A sender reads none before its push; a full socket would look like a sender that is gone.
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


class Fetch:
    """One fetch has one connection to the sender. It reports as it goes, and is told which group to join: `end` keeps it."""

    def __init__(self, end: CollectiveTransport, place: Place, target: Target, receiver: str) -> None:
        backend = "nccl" if end.device.type == "cuda" else "gloo"
        if place.bytes < 0 or place.bucket < 1:
            raise SyncError(f"{place.key}: {place.bytes} bytes in buckets of {place.bucket} make no sense")
        if place.backend != backend:
            raise SyncError(f"{place.key}: sent over {place.backend}, but {receiver!r} receives on {end.device} ({backend})")
        if place.bytes != target.num_bytes:
            raise SyncError(f"{place.key}: {place.bytes} bytes were posted, {receiver!r} has room for {target.num_bytes}")
        self._end, self._place, self._target, self._receiver = end, place, target, receiver
        self.sender = place.host, place.port
        self._sizes = [min(place.bucket, place.bytes - start) for start in range(0, place.bytes, place.bucket)]
        self._num_written = 0
        self._is_done = self._is_confirmed = False
        self._reported_at = 0.0
        self._group: Group | None = None  # that the sender has invited this receiver to

    def run(self) -> None:
        self._moved_at = time.monotonic()
        self._check()
        place, end = self._place, self._end
        channel = call(place.host, place.port, token=end.token, deadline=end.deadline, check=self._check)
        with contextlib.closing(channel) as self._channel:
            try:
                if self._sizes:
                    while self._group is None:
                        self._exchange(TICK)
                    if not self._group.is_formed:
                        self._group.form(lambda: self._exchange(0.0), key=place.key)
                    self._receive(self._group)
                self._is_done, self._reported_at = True, 0.0
                while not self._is_confirmed:
                    self._exchange(TICK)
            except BaseException as error:
                with contextlib.suppress(OSError):  # the sender learns why before the group is aborted
                    channel.send({**self._progress(), "gave_up": str(error) or type(error).__name__})
                raise

    def _check(self) -> None:
        """Raise if the update is no longer wanted."""
        if self._end.is_closed:
            raise SyncError(f"{self._place.key}: the receiver's transport is closed")
        self._target.check()

    def _join(self, id: str, rank: int, size: int) -> Group:
        end, kept = self._end, self._kept
        if kept is None or kept.id != id:
            end.drop_group(self.sender, "the receivers have changed")
            host = self._channel.local_host
            kept = Group(id, rank=rank, size=size, device=end.device, host=host, deadline=end.deadline, share=self._share)
            end.groups[self.sender] = kept
        return kept

    @property
    def _kept(self) -> Group | None:
        return self._end.groups.get(self.sender)

    def _share(self, key: str, value: bytes) -> None:
        with contextlib.suppress(OSError):  # `_exchange` notices it too
            self._channel.send({"key": key, "value": value.hex()})

    def _receive(self, group: Group) -> None:
        sizes, depth = self._sizes, group.depth
        buffers = group.staging(sizes[0])
        try:
            for place, size in enumerate(sizes[:depth]):
                group.start(buffers[place][:size])
            for place, size in enumerate(sizes):
                while not group.finish(TICK):
                    self._exchange(0.0)
                with group.on_stream():
                    self._target.write(place * self._place.bucket, buffers[place % depth][:size])
                if place + depth < len(sizes):
                    group.start(buffers[place % depth][: sizes[place + depth]])
                self._num_written = place + 1
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
        """Report progress, handle what arrives within `seconds`, and raise if the fetch cannot go on."""
        self._check()
        try:
            if time.monotonic() - self._reported_at >= max(TICK, self._end.deadline / _MOST_REPORTS):
                self._reported_at = time.monotonic()
                self._channel.send(self._progress())
            for message in self._channel.read(seconds):
                self._take(message)
                if self._is_confirmed:
                    break
        except OSError as error:  # also a full socket: the sender has stopped reading
            raise self._failed(f"the sender is gone: {error.strerror or error}", LinkError) from error
        except ValueError as error:
            raise self._failed(f"the sender does not speak as this run does: {error}") from error
        waited = time.monotonic() - self._moved_at
        if waited > self._end.deadline + _GRACE_SECONDS:
            raise self._failed(f"nothing has come from the sender for {waited:.1f} s", LinkError)

    def _take(self, message: Message) -> None:
        if "over" in message:
            raise SyncError(f"{self._place.key}: the sender ended it: {message['over']}")
        if "value" in message:
            if self._group is not None:
                self._group.mailbox.put(message["key"], bytes.fromhex(message["value"]))
            return
        self._moved_at = time.monotonic()
        self._is_confirmed = "confirmed" in message
        if "group" in message:
            self._group = self._join(**message["group"])

    def _progress(self) -> Message:
        return {
            "key": self._place.key,
            "attempt": self._place.attempt,
            "receiver": self._receiver,
            "group": "" if self._kept is None else self._kept.id,
            "written": self._num_written,
            "is_done": self._is_done,
        }

    def _failed(self, reason: str, kind: type[SyncError] = SyncError) -> SyncError:
        standing = f"{self._num_written} of {len(self._sizes)} buckets written by {self._receiver!r}"
        return kind(f"{self._place.key}: {reason} ({standing})")
