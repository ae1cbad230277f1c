"""Pure functions from rewards and logprobs to the objective: advantages, losses, corrections, and the KL.

`traits` tells other rooms what they must know about each, without importing torch. To add a loss, write a function and name it
in `LOSSES` (`losses.py`); add a line in `traits.py` if it differs from the defaults.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.algorithms.adaptive_weights import next_entropy_weight, next_kl_weight
    from headrace.algorithms.advantage_estimators import (
        advantages,
        batch_advantages,
        gae,
        normalised,
        sum_of_normalised,
        token_rewards,
        turn_advantages,
        turn_gae,
        turns_of,
    )
    from headrace.algorithms.columns import COMPUTED, ENTROPY, PROXIMAL, REFERENCE, RETURNS, REWARDS, TEACHER, VALUES
    from headrace.algorithms.corrections import BATCH_WIDE, CORRECTIONS
    from headrace.algorithms.group_filters import FilterSettings, unwanted
    from headrace.algorithms.losses import check_loss, columns_to_bring, missing_column, needed_columns, resolve_loss
    from headrace.algorithms.named import NAMED
    from headrace.algorithms.token_objective import Objective, batch_corrections, objective, ratio_base
    from headrace.algorithms.tokens import TokenTensors, ratio_of
    from headrace.algorithms.traits import ADVANTAGES, correction_traits, loss_traits
else:
    __getattr__ = front_door(__name__)
