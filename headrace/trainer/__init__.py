"""What trains. The trainer does not know the algorithm: advantages and per-token weights come in with the batch, and a
loss is a pure function of per-token tensors, named in the batch.

Sums, never means, are taken over tokens; every mean an algorithm wants is in the weights. So the gradient cannot depend
on how rollouts are packed, on the size of a micro-batch or on their order.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.trainer.frozen_model import FrozenModel
    from headrace.trainer.local import LocalTrainer
    from headrace.trainer.memory_prediction import TrainerMemory, predict_memory
    from headrace.trainer.protocol import PolicyTrainer, Published, Superseded
    from headrace.trainer.remote import RemoteTrainer
    from headrace.trainer.schedule import learning_rate
    from headrace.trainer.settings import TrainSettings
    from headrace.trainer.trainer import DeviceTrainer
else:
    __getattr__ = front_door(__name__)
