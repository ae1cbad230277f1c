"""Models to move: random weights in the shapes of real ones, in the dtypes an engine holds them in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

from headrace.model.arena import held_tensors
from headrace.model.load import served_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "small": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
}


def make_model(shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """In the dtypes an engine would load it in. Every process makes the same tensors of a shape, if not the same numbers."""
    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for _, tensor in held_tensors(model):
        tensor.data = tensor.data.to(served_dtype(model, tensor, dtype))
    model.eval()
    return model
