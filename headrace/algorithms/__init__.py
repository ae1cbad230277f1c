"""Pure functions that turn rewards and logprobs into a gradient's weights: advantages, losses, corrections, and the KL.

`traits` says what other rooms must know of each by its name, without importing torch. To add a loss: a function and a line in
the table of `losses.py`, and a line in `traits.py` where it differs from the usual.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.algorithms.advantage_estimators import (
        advantages as advantages,
        batch_advantages as batch_advantages,
        gae as gae,
        normalised as normalised,
        token_rewards as token_rewards,
    )
    from headrace.algorithms.columns import (
        COMPUTED as COMPUTED,
        PROXIMAL as PROXIMAL,
        REFERENCE as REFERENCE,
        RETURNS as RETURNS,
        REWARDS as REWARDS,
        TEACHER as TEACHER,
        VALUES as VALUES,
    )
    from headrace.algorithms.corrections import (
        BATCH_WIDE as BATCH_WIDE,
        CORRECTIONS as CORRECTIONS,
        MASKS as MASKS,
        importance_weights as importance_weights,
    )
    from headrace.algorithms.losses import (
        columns_to_bring as columns_to_bring,
        missing_column as missing_column,
        needed_columns as needed_columns,
        resolve_loss as resolve_loss,
    )
    from headrace.algorithms.token_objective import (
        Objective as Objective,
        batch_correction as batch_correction,
        objective as objective,
        ratio_base as ratio_base,
    )
    from headrace.algorithms.tokens import TokenTensors as TokenTensors, ratio_of as ratio_of
    from headrace.algorithms.traits import (
        ADVANTAGES as ADVANTAGES,
        correction_traits as correction_traits,
        loss_traits as loss_traits,
    )
else:
    __getattr__ = front_door(__name__)
