"""What a kind of buffer says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.staleness import StalenessSettings


class BufferPolicy:
    """One kind of buffer. Each is a subclass in a file of its own, with a line in `kinds.POLICIES`."""

    name: ClassVar[str]
    takes_turns: ClassVar[bool] = False
    """Generation and training take turns: nothing is submitted for the next batch until the last one has been trained."""
    has_depth: ClassVar[bool] = False
    """Whether `buffer.depth` says how many batches may wait."""
    least_lag: ClassVar[int] = 0
    """The smallest staleness.max_lag, where lag is bounded at all, under which this kind can do anything."""
    max_batches: int | None = 1
    """Batches that may wait before submission stops; None: as many as come."""

    def __init__(self, *, depth: int) -> None:
        """`depth`: of `buffer.depth`, or what `auto` makes of staleness.max_lag."""

    def check(self, staleness: StalenessSettings) -> None:
        """Refuse staleness settings that this kind cannot work with."""
        if staleness.is_bounded and staleness.max_lag < self.least_lag:
            raise ConfigError(
                f"buffer.kind = '{self.name}': nothing can run ahead with staleness.max_lag = {staleness.max_lag}; set it to "
                f"{self.least_lag}"
            )
