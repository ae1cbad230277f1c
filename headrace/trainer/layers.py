"""How the decoder layers run: compiled, recomputed in the backward pass, or with their activations on the host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model import Arena

_RECOMPILES = 64
_WORTH_MOVING = 1 << 20  # bytes; smaller tensors stay


def compile_all(model: PreTrainedModel) -> None:
    """Compile forward and backward, once for all layers and any number of rows. Fused operations round like separate ones
    (`emulate_precision_casts`), so that results match the engine's."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILES)
    base: Any = model.base_model
    for layer in base.layers:
        layer.compile(dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})
    base.norm.compile(dynamic=True)


def recompute(model: PreTrainedModel) -> None:
    """Save only the input of each decoder layer, and recompute the layer in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    base: Any = model.base_model
    for layer in base.layers:
        layer.training = True  # transformers checkpoints only layers in training mode; submodules stay in eval, without dropout


def saved_tensors(weights: Arena, *, on_host: bool) -> contextlib.AbstractContextManager[object]:
    """Context for a forward pass: decides where what it saves for the backward pass is kept."""
    return OnHost(weights.holds) if on_host and weights.device.type == "cuda" else contextlib.nullcontext()


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Copies saved tensors, except weights, to pinned host memory in a side stream, and back for the backward pass."""

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._stream, self._is_weight = torch.cuda.Stream(), is_weight
        super().__init__(self._put_away, self._bring_back)

    def _put_away(self, tensor: Tensor) -> Any:  # noqa: ANN401  (autograd passes it to `_bring_back`)
        is_small = tensor.numel() * tensor.element_size() < _WORTH_MOVING
        if is_small or self._is_weight(tensor) or not tensor.is_cuda or not tensor.is_contiguous():
            return tensor
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            home.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return home, self._stream.record_event(), tensor.device

    def _bring_back(self, kept: Any) -> Tensor:  # noqa: ANN401
        if isinstance(kept, torch.Tensor):
            return kept
        home, event, device = kept
        torch.cuda.current_stream().wait_event(event)
        found: Tensor = home.to(device, non_blocking=True)
        return found
