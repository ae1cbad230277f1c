"""Models to move: random weights in the shapes of real ones, in the dtypes an engine holds them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from headrace.bench.engine_loads import QWEN3_0_6B, SMALL, SMOLLM2_135M
from headrace.model import held_tensors, served_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = {"SmolLM2-135M": SMOLLM2_135M, "Qwen3-0.6B": QWEN3_0_6B, "small": SMALL}


def make_model(shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """In the dtypes an engine would load it in. Every process makes the same tensors of a shape, if not the same numbers."""
    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, tensor in held_tensors(model):
        tensor.data = tensor.data.to(served_dtype(model, name, tensor, dtype))
    model.eval()
    return model
