"""What trains. The trainer does not know the algorithm: advantages and per-token weights come in with the batch, and a
loss is a pure function of per-token tensors, named in the batch.

Sums, never means, are taken over tokens; every mean an algorithm wants is in the weights. So the gradient cannot depend
on how rollouts are packed, on the size of a micro-batch or on their order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.train.columns import PROXIMAL
    from headrace.train.losses import LOSSES, TokenTensors, needed_columns, needs, resolve_loss
    from headrace.train.protocol import Trainer
    from headrace.train.schedule import learning_rate
    from headrace.train.trainer import DeviceTrainer

_HOMES = {
    "LOSSES": "losses",
    "TokenTensors": "losses",
    "needed_columns": "losses",
    "needs": "losses",
    "resolve_loss": "losses",
    "Trainer": "protocol",
    "learning_rate": "schedule",
    "DeviceTrainer": "trainer",
    "PROXIMAL": "columns",
}
__all__ = [
    "LOSSES",
    "PROXIMAL",
    "DeviceTrainer",
    "TokenTensors",
    "Trainer",
    "learning_rate",
    "needed_columns",
    "needs",
    "resolve_loss",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Names are fetched when asked for: `headrace` imports this room before the function of the same name is defined,
    and must stay quick to import."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.train.{_HOMES[name]}"), name)
