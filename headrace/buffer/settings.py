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
    many as fit into `max_gb`. `auto` follows staleness.max_lag: 0 synchronous, 1 one_ahead, more bounded."""
    depth: int = 0
    """Batches that may wait in a `bounded` buffer."""
    max_gb: float = field(default=8.0, metadata=ELASTIC)
    """GB of waiting groups at which submission stops, of every kind of buffer; a whole batch may always wait."""
    order: Literal["completion", "submission"] = "completion"
    """`submission` trains groups in the order they were submitted, waiting for the slow ones; exact mode needs it."""

    def __post_init__(self) -> None:
        check(0 < self.max_gb < math.inf, "max_gb", self.max_gb, "a number above 0")
