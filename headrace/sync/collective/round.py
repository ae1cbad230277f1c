"""What the sender of the collective transport keeps account of: a parcel, a receiver's visit, a push and who is late in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.sync.collective.desk import Line
    from headrace.sync.collective.group import Group


@dataclass
class Parcel:
    """Bytes that are offered under a key."""

    key: str
    buffer: Tensor
    attempt: int = 0
    """Counts posts, so that the place of an earlier one is not taken for this one. 0 before the first."""
    written: Any = None
    """On a GPU, the event after which the bytes are there."""
    ended: str = ""
    num_pushes: int = 0
    """That run or wait for their turn."""
    is_torn: bool = False
    """A transfer of it was broken off, and may still be reading it."""


@dataclass
class Visit:
    """A receiver's fetch, as it tells of itself."""

    number: int
    receiver: str
    key: str
    attempt: int
    heard_at: float
    num_written: int = 0
    """Buckets."""
    is_done: bool = False
    lost: str = ""
    """Why it will not finish."""
    round: Round | None = None
    is_told: bool = False
    """That its round has begun."""
    is_invited: bool = False
    """Into the round's group."""


@dataclass
class Round:
    """One push."""

    parcel: Parcel
    receivers: tuple[str, ...]
    num_buckets: int
    moved_at: float
    """When something last went forward."""
    visits: dict[str, Visit] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    group: Group | None = None
    over: str = ""
    """Why it failed; receivers are told."""

    def check(self, deadline: float) -> None:
        """Raise if this push cannot go on."""
        key = self.parcel.key
        if self.parcel.ended:
            raise SyncError(f"{key}: {self.parcel.ended} ({self.standing()})")
        for visit in self.visits.values():
            if visit.lost and not visit.is_done:
                done = f"{visit.num_written} of {self.num_buckets} buckets"
                raise SyncError(f"{key}: receiver {visit.receiver!r} {visit.lost} after {done}")
        waited = time.monotonic() - self.moved_at
        if waited > deadline:
            raise SyncError(f"{key}: {self._late(deadline)} for {waited:.1f} s ({self.standing()})")

    def standing(self) -> str:
        """How far it is, for a message."""
        if len(self.visits) < len(self.receivers):
            return f"{len(self.visits)} of {len(self.receivers)} receivers are here"
        parts = (f"{name} {self.visits[name].num_written}" for name in self.receivers)
        return f"of {self.num_buckets} buckets written: {', '.join(parts)}"

    def _late(self, deadline: float) -> str:
        """Who, of those that have not finished: those not heard of, else those that are furthest behind."""
        absent = [name for name in self.receivers if name not in self.visits]
        if absent:
            return f"receiver {', '.join(map(repr, absent))} has not come"
        now = time.monotonic()
        waiting = [visit for visit in self.visits.values() if not visit.is_done]
        silent = [visit for visit in waiting if now - visit.heard_at > deadline / 2]
        if silent:
            return f"receiver {', '.join(repr(visit.receiver) for visit in silent)} has not been heard of or gone forward"
        least = min((visit.num_written for visit in waiting), default=0)
        behind = [repr(visit.receiver) for visit in waiting if visit.num_written == least]
        return f"receiver {', '.join(behind)} has not gone forward"
