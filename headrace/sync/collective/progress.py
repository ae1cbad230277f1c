"""What the sender knows about a push: which receivers have connected, how far each is, and which are late."""

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
    """A buffer on offer. `attempt` numbers the posts (0: none yet), to tell this one from earlier ones under the same key."""

    key: str
    buffer: TorchBuffer
    bytes: Tensor
    attempt: int = 0
    written: Any = None  # on a GPU, the event after which the bytes are complete
    ended: str = ""
    num_pushes: int = 0  # running or queued
    is_torn: bool = False  # a push failed, and may still be reading the bytes


@dataclass
class Visit:
    """A receiver's `fetch` as reported to the sender. `num_written` counts buckets; `lost` is why it will not finish."""

    number: int
    channel: Channel
    receiver: str
    key: str
    attempt: int
    heard_at: float
    num_written: int = 0
    is_done: bool = False
    lost: str = ""
    push: Push | None = None
    told: set[str] = field(default_factory=set)  # names of the facts already sent to the receiver


@dataclass
class Push:
    """One broadcast of one buffer. `visits` is by receiver; `failure` is sent to the receivers."""

    outgoing: Outgoing
    receivers: tuple[str, ...]
    num_buckets: int
    moved_at: float  # when anything last made progress
    visits: dict[str, Visit] = field(default_factory=dict)
    group: Group | None = None
    failure: str = ""

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
        """Describe the progress, for error messages."""
        if len(self.visits) < len(self.receivers):
            return f"{len(self.visits)} of {len(self.receivers)} receivers are here"
        parts = (f"{name} {self.visits[name].num_written}" for name in self.receivers)
        return f"of {self.num_buckets} buckets written: {', '.join(parts)}"

    def _late(self, deadline: float) -> str:
        """Name the receivers that never connected, else the silent ones, else those furthest behind."""
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
