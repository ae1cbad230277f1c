"""What happens to rollouts in flight when the weights change.

- `KEEP`: the swap falls between two decode steps; rollouts go on, their later tokens stamped with the newer version and
  drawn over keys and values of the older one. Nothing is wasted and nothing stalls.
- `RETRACT`: as `KEEP`, but keys and values are dropped and each prefix is computed again under the new weights, inside the
  engine: no call ends. What `kv = "recompute"` makes of `KEEP`.
- `DRAIN`: what is in flight finishes first, so that no rollout spans two versions; the engine empties meanwhile.
- `ABORT`: what is in flight ends at once with `finish_reason=ABORT`; each is resumed from its prefix, computed again
  under the new weights.

Beside the interrupt stand two choices about groups that are still unfinished when a batch is taken (`age`): `cancel` gives up
those too old to be trained, and `oversample` begins more than a batch needs and lets the unfinished go on in the next.
What is half finished when a run stops is written with its checkpoint and goes on after a restart (`history`).
"""

import enum

from headrace.partial.age import is_over_age
from headrace.partial.history import goes_on_from, is_resumable, still_history


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


__all__ = ["Interrupt", "goes_on_from", "interrupt_of", "is_over_age", "is_resumable", "still_history"]
