"""How old a token may be, and what is done about it. Three mechanisms, freely combined:

- A `Gate` paces submission by counting. With depth d and B groups a batch, group number n (from 0) is submitted only once the
  engines hold version floor(n / B) − d; if groups are trained in the order they were submitted, group n is trained at version
  floor(n / B), so none of its tokens lags more than d. One number instead of checks per sample.
- A `Rejection` drops a group that is older than `max_lag`, or sampled by weights that a restart discarded. It makes the
  bound hard where groups are trained in the order they finish; with `rejected = "wait"` the trainer waits before it comes to
  that.
- `corrections_of` names the corrections that weight each token by how likely the newer policy is to sample it, or mask
  tokens that are too far off; the corrections themselves are in `headrace.algorithms`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.staleness.controller import LagController, Observation
    from headrace.staleness.gate import (
        START_DEPTH,
        Gate,
        groups_ahead,
        is_automatic,
        make_gate,
        max_untrained_groups,
    )
    from headrace.staleness.lengths import LengthBias
    from headrace.staleness.reject import Rejection
    from headrace.staleness.settings import StalenessSettings, check_correction, check_staleness, corrections_of
else:
    __getattr__ = front_door(__name__)
