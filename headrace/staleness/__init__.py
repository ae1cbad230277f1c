"""How old a token may be, and what is done about it: three means that combine freely.

- `Gate` bounds how far submission runs ahead of training. With depth d and B groups a batch, group number n (from 0) is
  submitted only once version floor(n / B) − d is held; if groups are trained in the order they were submitted, group n
  is trained at version floor(n / B), so none of its tokens lags more than d. One integer, no policing of samples.
- `too_old` rejects a group that holds a token older than `max_lag`, or one of a life of the trainer that is no longer
  history. It makes the bound hard where groups are trained in the order they finish.
- `correct` weighs each token by how likely the newer policy is to have drawn it, or leaves out what is too far off.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.staleness.gate import Gate as Gate
    from headrace.staleness.reject import too_old as too_old
    from headrace.staleness.settings import StalenessSettings as StalenessSettings
else:
    __getattr__ = front_door(__name__)
