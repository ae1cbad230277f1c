"""Training. The trainer does not know the algorithm: the batch brings advantages and per-token weights, and names the loss,
a pure function of per-token tensors.

The trainer sums over tokens and never takes a mean; any mean that an algorithm wants is in the weights. So the gradient does
not depend on packing, on the size of a micro-batch or on the order of rollouts.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.trainer.frozen_model import FrozenModel
    from headrace.trainer.local import LocalTrainer
    from headrace.trainer.memory_prediction import TrainerMemory, predict_memory
    from headrace.trainer.parallel import ParallelSettings
    from headrace.trainer.parameter_groups import ParameterSettings, match_parameters
    from headrace.trainer.protocol import PolicyTrainer, Published, Superseded
    from headrace.trainer.ranks import RankError, Ranks
    from headrace.trainer.remote import RemoteTrainer
    from headrace.trainer.schedule import learning_rate
    from headrace.trainer.settings import TrainSettings
    from headrace.trainer.trainer import DeviceTrainer
else:
    __getattr__ = front_door(__name__)
