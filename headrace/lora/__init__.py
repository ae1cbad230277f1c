"""Low-rank adapters: train a few small matrices beside frozen weights, and send only those to the engines.

An adapter adds scale · B A x to the output of each linear layer it targets (`adapter`). Engine and trainer add it in the same
place of the same model, so their numbers agree as they do without one. It is stored as PEFT stores it (`peft_folder`): what is
written here loads in `peft` and in vLLM, and a folder written by `peft` can be trained further. With the adapter off the model
is the one training started from, which makes it its own reference. The trainer can hold the frozen weights in 4 bits
(`four_bits`).
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.lora.adapter import Adapter, Target, adapter_of, add_adapter, merge_adapter, target_of
    from headrace.lora.four_bits import find_quantized, has_bitsandbytes, held_bytes, hold_in_four_bits, round_weights
    from headrace.lora.peft_folder import KEPT_BASE, AdapterError, base_of, read_settings, read_tensors, write_folder
    from headrace.lora.settings import FOUR_BITS, LoraSettings
    from headrace.lora.targets import find_targets
else:
    __getattr__ = front_door(__name__)
