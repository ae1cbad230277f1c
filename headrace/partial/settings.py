"""The recipe's `[partial]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.settings import check


@dataclass(frozen=True, kw_only=True)
class PartialSettings:
    """What happens to rollouts in flight when the weights change, and to those unfinished when a batch is whole."""

    interrupt: Literal["keep", "retract", "drain", "abort"] = "keep"
    """`keep`: swap between two decode steps and go on. `retract`: swap, drop keys and values, compute each prefix again and go
    on. `drain`: finish them first. `abort`: stop them, swap, and resume each from its prefix."""
    kv: Literal["keep", "recompute"] = "keep"
    """With `keep`: whether rollouts go on over the keys and values they have, or `recompute` them, which is `retract`."""
    cancel: Literal["never", "over_age"] = "never"
    """`over_age`: give up groups in flight that hold a token too old for every batch to come, and submit others instead.
    `never`: let them finish; staleness.reject drops them then."""
    oversample: float = 1.0
    """Groups submitted for each that a batch needs. A batch is trained as soon as it is whole; the unfinished go on before
    anything new begins. In a synchronous run they are stopped, as `interrupt` says, until the new weights are held."""

    def __post_init__(self) -> None:
        check(1 <= self.oversample < math.inf, "oversample", self.oversample, "a number ≥ 1")
