"""Records which experts a mixture-of-experts model sends each token to, by hooks on its routers.

A transformers router returns logits, weights and indices; rollouts record the indices as `expert_routing`. The hooks are
installed once per model, so that a model compiled afterwards has them in its graph.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import torch

from headrace.model.load import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    Sink = Callable[[int, Tensor], None]

_ROUTER = re.compile(r"Top[kK]Router$")
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MOST_NARROW = 254  # experts that fit uint8, with 255 for an unknown one


def find_readable_routers(model: PreTrainedModel) -> Routers | None:
    """A model's routers, with hooks on them. None for a dense model, and for routers of an unknown form: such a model is served
    without recording its routing. Call it once per model, before compiling it."""
    found: dict[int, nn.Module] = {}
    for name, block in model.named_modules():
        if "experts" in block._modules:
            routers = [child for child in block.children() if _ROUTER.search(type(child).__name__)]
            layer = _DECODER_LAYER.search(f"{name}.")
            if layer is None or len(routers) != 1:
                return None
            found[int(layer[1])] = routers[0]
    match list({(getattr(router, "top_k", None), getattr(router, "num_experts", None)) for router in found.values()}):
        case [(int(top_k), int(num_experts))]:
            return Routers([found[layer] for layer in sorted(found)], top_k=top_k, num_experts=num_experts)
    return None


class Routers:
    """A model's routers in layer order, and the hooks that see what they choose."""

    def __init__(self, routers: Sequence[nn.Module], *, top_k: int, num_experts: int) -> None:
        self.num_layers = len(routers)  # decoder layers with experts
        self.top_k = top_k  # experts per token in each of them
        self.dtype = torch.uint8 if num_experts <= _MOST_NARROW else torch.int16  # holds an expert's number
        self._sink: Sink | None = None
        for index, router in enumerate(routers):
            router.register_forward_hook(self._hook(index))

    @contextlib.contextmanager
    def recording(self, sink: Sink) -> Iterator[None]:
        """Within it, each router's forward pass calls `sink` with its index among the layers with experts, and the [tokens,
        top_k] indices of the chosen experts, int64 on the model's device.

        `sink` runs inside the pass: in a CUDA graph it must copy the indices to a fixed place and not wait for the device. A
        compiled model is compiled once per sink, so reuse it. Activation checkpointing calls it again for recomputed layers.
        """
        assert self._sink is None, "the routers are being recorded already"
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def _hook(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def record(router: nn.Module, inputs: object, output: object) -> None:
            if self._sink is not None:
                self._sink(index, _indices(router, output, top_k=self.top_k))

        return record


def _indices(router: nn.Module, output: object, *, top_k: int) -> Tensor:
    """The one integer output: most routers return it last, some first."""
    outputs = output if isinstance(output, tuple) else (output,)
    whole = [entry for entry in outputs if isinstance(entry, torch.Tensor) and not entry.dtype.is_floating_point]
    if len(whole) != 1 or whole[0].shape[-1] != top_k:
        raise ModelError(f"{type(router).__name__} does not return the indices of {top_k} experts for each token")
    return whole[0].reshape(-1, top_k)
