"""Compiles decoder layers, forward and backward: once for all layers and any number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.model import has_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECOMPILES = 64


def can_compile(model: PreTrainedModel) -> bool:
    """Models with experts cannot be compiled: how many rows an expert gets is known only at run time."""
    return not has_experts(model)


def compile_layers(model: PreTrainedModel) -> None:
    """Fused operations round like separate ones (`emulate_precision_casts`), so that results match the engine's."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILES)
    base: Any = model.base_model
    for layer in base.layers:
        layer.compile(dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})
    base.norm.compile(dynamic=True)
