"""The recipe's `[partial]`, and the ways an engine pauses."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from headrace.settings import check


class Interrupt(enum.StrEnum):
    """What an engine does with the rollouts in flight when it pauses; engines implement each."""

    KEEP = "keep"
    RETRACT = "retract"
    DRAIN = "drain"
    ABORT = "abort"
    LEASE = "lease"

    @property
    def waits_for_rollouts(self) -> bool:
        """Whether the pause starts only once every rollout in flight has finished."""
        return self is Interrupt.DRAIN

    @property
    def keeps_kv(self) -> bool:
        """Whether rollouts continue over the KV cache they have, under the new weights too."""
        return self is Interrupt.KEEP


@dataclass(frozen=True, kw_only=True)
class PartialSettings:
    """What happens to rollouts in flight when the weights change, and to those unfinished when a batch is whole."""

    interrupt: Literal["keep", "retract", "drain", "abort", "lease"] = "keep"
    """`keep`: swap the weights between two decode steps and continue. `retract`: swap, drop the KV cache, compute each prefix
    again and continue. `drain`: finish them first. `abort`: stop them, swap, and resume each from its prefix. `lease`, with
    [lora]: each finishes with the version of the adapter it began with, also in later turns, while new ones begin with the
    newest."""
    cancel: Literal["never", "over_age"] = "never"
    """`over_age`: give up groups in flight that hold a token too old for every batch to come, and submit others instead.
    `never`: let them finish; staleness.reject drops them then."""
    oversample: float = 1.0
    """Groups submitted for each that a batch needs. A batch is trained as soon as it is whole; the unfinished continue before
    anything new is started. In a synchronous run they are paused, as `interrupt` says, until the engines hold the new
    weights."""

    def __post_init__(self) -> None:
        check(1 <= self.oversample < math.inf, "oversample", self.oversample, "a number ≥ 1")

    @property
    def pausing(self) -> Interrupt:
        """How engines pause."""
        return Interrupt(self.interrupt)

    @property
    def leases(self) -> bool:
        """Whether rollouts keep the adapter they began with, until their episode ends."""
        return self.pausing is Interrupt.LEASE

    @property
    def cancels(self) -> bool:
        """Whether groups in flight that can no longer be trained are cancelled."""
        return self.cancel == "over_age"

    def extra_groups(self, groups_per_batch: int) -> int:
        """Groups submitted beyond those that batches need."""
        return math.ceil(round(self.oversample * groups_per_batch, 6)) - groups_per_batch
