"""Up to `buffer.depth` batches wait: evens out batches that take unequally long to generate, but tokens get older."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.policy import BufferPolicy
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.staleness import StalenessSettings


class Bounded(BufferPolicy):
    name = "bounded"
    has_depth = True

    def __init__(self, *, depth: int) -> None:
        self.max_batches = depth

    def check(self, staleness: StalenessSettings) -> None:
        super().check(staleness)
        depth, lag = self.max_batches or 0, staleness.max_lag
        if depth < 1:
            raise ConfigError(f"buffer.depth = {depth}: a bounded buffer holds at least 1 batch")
        if staleness.is_bounded and depth > max(lag, 1):
            raise ConfigError(
                f"buffer.depth = {depth}: a batch that waits so long lags more than staleness.max_lag = {lag}; "
                f"raise max_lag to {depth} or lower the depth"
            )
