"""What happens to rollouts in flight when the weights change.

- `KEEP`: the swap falls between two decode steps; rollouts go on, their later tokens stamped with the newer version and
  drawn over keys and values of the older one. Nothing is wasted and nothing stalls.
- `RETRACT`: as `KEEP`, but keys and values are dropped and each prefix is computed again under the new weights, inside the
  engine: no call ends. What `kv = "recompute"` makes of `KEEP`.
- `DRAIN`: what is in flight finishes first, so that no rollout spans two versions; the engine empties meanwhile.
- `ABORT`: what is in flight ends at once with `finish_reason=ABORT`; each is resumed from its prefix, computed again
  under the new weights.
"""

import enum


class Interrupt(enum.StrEnum):
    """How an engine pauses."""

    KEEP = "keep"
    RETRACT = "retract"
    DRAIN = "drain"
    ABORT = "abort"


def interrupt_of(name: str, *, kv: str) -> Interrupt:
    """The interrupt of `partial.interrupt` and `partial.kv`."""
    interrupt = Interrupt(name)
    return Interrupt.RETRACT if interrupt is Interrupt.KEEP and kv == "recompute" else interrupt


__all__ = ["Interrupt", "interrupt_of"]
