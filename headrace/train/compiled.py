"""Each decoder layer compiled, forward and backward, once for all layers and any number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECOMPILES = 64


def can_compile(model: PreTrainedModel) -> bool:
    """Whether every layer is plain attention and a dense block: what flash kernels serve, and no experts."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return kinds == {"full_attention"} and getattr(text, "attn_logit_softcapping", None) is None and not has_experts


def compile_layers(model: PreTrainedModel) -> None:
    """Rounded where an engine rounds: what is fused keeps no more digits than what is computed step by step."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILES)
    base: Any = model.base_model
    for layer in base.layers:
        layer.compile(dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})
    base.norm.compile(dynamic=True)
