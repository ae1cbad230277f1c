"""What trains. The trainer does not know the algorithm: advantages and per-token weights come in with the batch, and a
loss is a pure function of per-token tensors, named in the batch.

Sums, never means, are taken over tokens; every mean an algorithm wants is in the weights. So the gradient cannot depend
on how rollouts are packed, on the size of a micro-batch or on their order.
"""

from headrace.train.losses import LOSSES, TokenTensors, resolve_loss
from headrace.train.protocol import Trainer
from headrace.train.schedule import learning_rate
from headrace.train.trainer import DeviceTrainer

__all__ = ["LOSSES", "DeviceTrainer", "TokenTensors", "Trainer", "learning_rate", "resolve_loss"]
