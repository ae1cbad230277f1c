"""The recipe's `[buffer]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.buffer.kinds import POLICIES

if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = Literal[("auto", *POLICIES)]


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """Where scored groups wait for the trainer."""

    kind: KindName = "auto"
    """`synchronous`: generate, then train, in turn. `one_ahead`, `bounded`: at most one or `depth` batches wait. `stream`: no
    bound of its own. `auto` follows staleness.max_lag: 0 synchronous, 1 one_ahead, more bounded."""
    depth: int = 0
    """Batches that may wait in a `bounded` buffer."""
    order: Literal["completion", "submission"] = "completion"
    """`submission` trains groups in the order they were submitted, waiting for the slow ones; exact mode needs it."""
