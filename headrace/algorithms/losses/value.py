"""PPO with a value head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.algorithms.column_names import RETURNS, VALUES
from headrace.algorithms.losses.declare import needs
from headrace.algorithms.losses.policy import clipped_surrogate

if TYPE_CHECKING:
    from headrace.algorithms.losses.declare import TwoTerms
    from headrace.algorithms.losses.tokens import TokenTensors


@needs(VALUES, RETURNS)
def ppo(
    tokens: TokenTensors,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float = 0.2,
    value_weight: float = 0.5,
) -> TwoTerms:
    """PPO: −min(r A, clip(r) A) + value_weight · ½ max((V − R)², (clip(V, V_old ± value_clip) − R)²).

    V_old and R are the columns `values` and `returns`, which `train.advantage = "gae"` makes.
    """
    assert tokens.values is not None, "call_loss has looked"
    loss, is_clipped = clipped_surrogate(tokens.ratio(), tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    old, returns = tokens.columns[VALUES], tokens.columns[RETURNS]
    near = torch.clamp(tokens.values, old - value_clip, old + value_clip)
    free, clipped = (tokens.values - returns).square(), (near - returns).square()
    value_loss = 0.5 * torch.maximum(free, clipped)
    seen = {
        "clipped": is_clipped,
        "value_loss": value_loss.detach(),
        "value_clipped": (clipped > free).float(),
        "value": tokens.values.detach(),
    }
    return loss, seen, value_weight * value_loss
