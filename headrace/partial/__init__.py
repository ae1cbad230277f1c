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

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.partial.age import is_over_age as is_over_age
    from headrace.partial.history import (
        goes_on_from as goes_on_from,
        is_resumable as is_resumable,
        still_history as still_history,
    )
    from headrace.partial.interrupt import Interrupt as Interrupt, interrupt_of as interrupt_of
    from headrace.partial.settings import PartialSettings as PartialSettings
else:
    __getattr__ = front_door(__name__)
