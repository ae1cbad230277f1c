"""Advantages: how much better a rollout did than its siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.types import Array


def advantages(rewards: Sequence[float], *, kind: str) -> Array:
    """One per sibling. `group`: (r − mean) ÷ std; `group_mean`: r − mean; `leave_one_out`: r − mean of the others."""
    values = np.asarray(rewards, dtype=np.float64)
    centred: Array = values - values.mean()
    if kind == "group":
        spread = float(values.std())
        centred = centred / spread if spread > 1e-8 else np.zeros_like(centred)
    elif kind == "leave_one_out":
        centred = centred * len(values) / max(len(values) - 1, 1)
    elif kind != "group_mean":
        raise ValueError(f"train.advantage = {kind!r}: must be group, group_mean or leave_one_out")
    return centred.astype(np.float32)
