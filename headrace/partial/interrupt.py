"""The ways an engine pauses."""

from __future__ import annotations

import enum


class Interrupt(enum.StrEnum):
    """What an engine does with the rollouts in flight when it pauses; engines implement each."""

    KEEP = "keep"
    RETRACT = "retract"
    DRAIN = "drain"
    ABORT = "abort"

    @property
    def waits_for_rollouts(self) -> bool:
        """Whether the pause starts only once every rollout in flight has finished."""
        return self is Interrupt.DRAIN

    @property
    def keeps_kv(self) -> bool:
        """Whether rollouts continue over the KV cache they have, under the new weights too."""
        return self is Interrupt.KEEP
