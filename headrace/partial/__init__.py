"""What happens to rollouts in flight when the weights change (`Interrupt`).

- `KEEP`: the weights are swapped between two decode steps and rollouts continue; later tokens are stamped with the newer
  version and sampled over the older version's KV cache. Nothing is wasted and nothing stalls.
- `RETRACT`: as `KEEP`, but the KV cache is dropped and each prefix is computed again under the new weights, inside the engine:
  no call ends.
- `DRAIN`: rollouts in flight finish first, so none spans two versions; the engine runs empty meanwhile.
- `ABORT`: rollouts in flight end at once with `finish_reason=ABORT` and are resumed from their prefix, computed again under the
  new weights.
- `LEASE`: rollouts in flight, those between two turns too, finish with the version of the adapter they began with; the engine
  holds it until the last of them ends, and computes several versions in one batch. Only adapters are small enough for that.

Two settings are about groups that are unfinished when a batch is taken (`unfinished`): `cancel` gives up those too old to be
trained, and `oversample` starts more than a batch needs and lets the unfinished continue into the next. Checkpoints include
unfinished rollouts, which are resumed after a restart.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.partial.settings import Interrupt, PartialSettings
    from headrace.partial.unfinished import (
        check_unfinished,
        continues_over_updates,
        engines_take_turns,
        is_continuation,
        is_resumable,
        pauses_unfinished,
        recorded_turn,
        surviving_part,
    )
else:
    __getattr__ = front_door(__name__)
