"""The recipe's `[buffer]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.buffer.kinds import POLICIES
from headrace.settings import ELASTIC, check

if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = Literal[("auto", *POLICIES)]


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """Where scored groups wait for the trainer."""

    kind: KindName = "auto"
    """`synchronous`: generate, then train, in turn. `one_ahead`, `bounded`: at most one or `depth` batches wait. `stream`: as
    many as fit into `max_gb`. `ring`: `depth` batches, and the oldest group is dropped for a newer one. `reserved`: `depth`
    batches wait or are in flight. `resizable`: as many as the gate lets run ahead at the moment. `auto` follows
    staleness.max_lag: "auto" resizable, 0 synchronous, 1 one_ahead, more bounded."""
    depth: int = 0
    """Batches that may wait in a `bounded`, `ring` or `reserved` buffer."""
    max_gb: float = field(default=8.0, metadata=ELASTIC)
    """GB of waiting groups in memory at which submission stops, of every kind of buffer; a whole batch may always wait. With a
    journal, groups beyond that wait on disk."""
    journal_gb: float = field(default=0.0, metadata=ELASTIC)
    """GB of disk, in RUN/journal, for copies of scored groups that no checkpoint has yet: a run that is killed takes them from
    there when it is resumed, and does not generate them again. 0: no journal."""
    order: Literal["completion", "submission", "window"] = "completion"
    """`completion`: the first to be complete is trained first. `submission`: in the order they were submitted, waiting for the
    slow ones; exact mode needs it. `window`: in that order too, but groups fewer than W after the oldest in flight, if they
    are complete, need not wait for it."""
    window: float = 0.0
    """W as a share of the groups that the gate lets be submitted and untrained; W is at least 1, which is `submission`."""
    unit: Literal["group", "episode", "sample"] = "group"
    """`episode`: each episode enters the buffer as soon as it is scored, without its siblings; for advantages that do not
    compare them. `sample`: the same, where an episode is one rollout."""

    def __post_init__(self) -> None:
        check(0 < self.max_gb < math.inf, "max_gb", self.max_gb, "a number above 0")
        check(0 <= self.journal_gb < math.inf, "journal_gb", self.journal_gb, "a number ≥ 0")
        check(0 <= self.window <= 1, "window", self.window, "a share from 0 to 1")

    @property
    def is_by_episode(self) -> bool:
        """Whether siblings enter the buffer one by one."""
        return self.unit != "group"

    @property
    def wants_one_rollout(self) -> bool:
        """Whether every episode must be one rollout."""
        return self.unit == "sample"

    def window_of(self, slots: int) -> int:
        """W: how many of the oldest groups in `slots` may overtake each other."""
        return max(1, round(self.window * slots))
