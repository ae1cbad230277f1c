"""The base class of buffer kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.staleness import StalenessSettings


class BufferPolicy:
    """One kind of buffer. Each is a subclass in its own file, listed in `kinds.POLICIES`."""

    name: ClassVar[str]
    takes_turns: ClassVar[bool] = False
    """Generation and training take turns: nothing is submitted for the next batch until the previous one has been trained."""
    has_depth: ClassVar[bool] = False
    """Whether `buffer.depth` says how many batches may wait."""
    least_lag: ClassVar[int] = 0
    """The smallest staleness.max_lag, if lag is bounded, that this kind works with."""
    max_batches: int | None = 1
    """Batches that may wait before submission stops; None: any number."""

    def __init__(self, *, depth: int) -> None:
        """`depth` is `buffer.depth`, or staleness.max_lag if the kind is `auto`."""

    def check(self, staleness: StalenessSettings) -> None:
        """Refuse staleness settings that this kind cannot work with."""
        if staleness.is_bounded and staleness.max_lag < self.least_lag:
            raise ConfigError(
                f"buffer.kind = '{self.name}': nothing can run ahead with staleness.max_lag = {staleness.max_lag}; set it to "
                f"{self.least_lag}"
            )
