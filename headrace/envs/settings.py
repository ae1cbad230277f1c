"""The recipe's `[episode]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.settings import OPERATIONAL, check


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Limits of one episode: an environment's run of one task."""

    timeout: float = field(default=0.0, metadata=OPERATIONAL)
    """Seconds it may take, from its environment's start to its end, except while its first generate call waits for a place at
    the engines. After that it is cancelled and run again, as after any failure of an environment; 0 sets no limit."""

    def __post_init__(self) -> None:
        check(0 <= self.timeout < math.inf, "timeout", self.timeout, "a number of seconds, or 0 for no limit")
