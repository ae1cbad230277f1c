"""What the sender knows of a push: which receivers have come, how far each is, and who is late."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.sync.buffers import TorchBuffer
    from headrace.sync.collective.channel import Channel
    from headrace.sync.collective.group import Group


@dataclass
class Outgoing:
    """Bytes that are offered under a key."""

    key: str
    buffer: TorchBuffer
    bytes: Tensor
    attempt: int = 0
    """Counts posts, so that the place of an earlier post under the same key is not taken for this one. 0 before the first."""
    written: Any = None
    """On a GPU, the event after which the bytes are there."""
    ended: str = ""
    num_pushes: int = 0
    """Running, or waiting for their turn."""
    is_torn: bool = False
    """A push of it failed, and may still be reading the bytes."""


@dataclass
class Visit:
    """A receiver's `fetch`, by what it has reported."""

    number: int
    channel: Channel
    receiver: str
    key: str
    attempt: int
    heard_at: float
    num_written: int = 0
    """Buckets."""
    is_done: bool = False
    lost: str = ""
    """Why it will not finish."""
    push: Push | None = None
    told: set[str] = field(default_factory=set)
    """What the receiver has been told already."""


@dataclass
class Push:
    """One broadcast of one buffer."""

    outgoing: Outgoing
    receivers: tuple[str, ...]
    num_buckets: int
    moved_at: float
    """When anything last made progress."""
    visits: dict[str, Visit] = field(default_factory=dict)
    """By receiver."""
    group: Group | None = None
    failure: str = ""
    """Receivers are told."""

    def check(self, deadline: float) -> None:
        """Raise if this push cannot go on."""
        key = self.outgoing.key
        if self.outgoing.ended:
            raise SyncError(f"{key}: {self.outgoing.ended} ({self.standing()})")
        for visit in self.visits.values():
            if visit.lost and not visit.is_done:
                done = f"{visit.num_written} of {self.num_buckets} buckets"
                raise SyncError(f"{key}: receiver {visit.receiver!r} {visit.lost} after {done}")
        waited = time.monotonic() - self.moved_at
        if waited > deadline:
            raise SyncError(f"{key}: {self._late(deadline)} for {waited:.1f} s ({self.standing()})")

    def standing(self) -> str:
        """How far it is, for error messages."""
        if len(self.visits) < len(self.receivers):
            return f"{len(self.visits)} of {len(self.receivers)} receivers are here"
        parts = (f"{name} {self.visits[name].num_written}" for name in self.receivers)
        return f"of {self.num_buckets} buckets written: {', '.join(parts)}"

    def _late(self, deadline: float) -> str:
        """Who holds it up: receivers that have not come, else those not heard from, else those furthest behind."""
        absent = [name for name in self.receivers if name not in self.visits]
        if absent:
            return f"receiver {', '.join(map(repr, absent))} has not come"
        now = time.monotonic()
        waiting = [visit for visit in self.visits.values() if not visit.is_done]
        silent = [visit for visit in waiting if now - visit.heard_at > deadline / 2]
        if silent:
            return f"receiver {', '.join(repr(visit.receiver) for visit in silent)} has not been heard from"
        least = min((visit.num_written for visit in waiting), default=0)
        behind = [repr(visit.receiver) for visit in waiting if visit.num_written == least]
        return f"receiver {', '.join(behind)} has made no progress"
