"""Records which experts a mixture-of-experts model sends each token to, by hooks on its routers.

A transformers router returns logits, weights and indices; rollouts record the indices as `expert_routing`. `Routers` installs
the hooks when it is made, once per model, so that a model compiled afterwards has them in its graph.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from headrace.model.load import ModelError
from headrace.records import unknown_expert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    Sink = Callable[[int, Tensor], None]

_ROUTER = re.compile(r"Top[kK]Router$")
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MOST_NARROW = 254  # experts that fit uint8, with 255 for an unknown one


def find_routers(model: PreTrainedModel) -> Routers | None:
    """A model's routers, with hooks on them; None for a dense model. Call it once per model, before compiling it."""
    return Routers(model) if any(True for _ in _expert_blocks(model)) else None


def find_readable_routers(model: PreTrainedModel) -> Routers | None:
    """`find_routers`, but None also if they cannot be read: the model is served without recording its routing."""
    routers = find_routers(model)
    return routers if routers is not None and routers.num_layers else None


class Routers:
    """A model's routers in layer order, and the hooks that see what they choose. If one of them is of an unknown form,
    `num_layers` is 0 and `recording` raises with its name; the model can still run."""

    num_layers: int  # decoder layers with experts
    layers: tuple[int, ...]  # their indices
    top_k: int  # experts per token in each of them
    num_experts: int  # experts in each of them
    dtype: torch.dtype  # the narrowest that holds an expert's number: uint8 or int16

    def __init__(self, model: PreTrainedModel) -> None:
        self._sink: Sink | None = None
        routers, self._refusal = _readable_routers(model)
        self.layers = tuple(router.layer for router in routers)
        self.num_layers = len(routers)
        self.top_k = routers[0].top_k if routers else 0
        self.num_experts = routers[0].num_experts if routers else 0
        self.dtype = torch.uint8 if self.num_experts <= _MOST_NARROW else torch.int16
        for index, router in enumerate(routers):
            router.module.register_forward_hook(self._hook(index))

    @property
    def unknown_expert(self) -> int:
        """The value of an unknown expert in a record of `dtype`."""
        return unknown_expert(str(self.dtype).removeprefix("torch."))

    @contextlib.contextmanager
    def recording(self, sink: Sink) -> Iterator[None]:
        """Within it, each router's forward pass calls `sink` with its index among the layers with experts, and the [tokens,
        top_k] indices of the chosen experts, int64 on the model's device.

        `sink` runs inside the pass: in a CUDA graph it must copy the indices to a fixed place and not wait for the device. A
        compiled model is compiled once per sink, so reuse it. Activation checkpointing calls it again for recomputed layers.
        """
        if self._refusal is not None:
            raise ModelError(self._refusal)
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


def _readable_routers(model: PreTrainedModel) -> tuple[list[_Router], str | None]:
    """The routers of all expert blocks in layer order; or none, and why, if one is of an unknown form."""
    found: list[_Router] = []
    for name, block in _expert_blocks(model):
        routers = [child for child in block.children() if _ROUTER.search(type(child).__name__)]
        layer = _DECODER_LAYER.search(f"{name}.")
        sizes = [getattr(router, size, None) for router in routers for size in ("top_k", "num_experts")]
        match layer, sizes:
            case re.Match(), [int(top_k), int(num_experts)]:
                found.append(_Router(int(layer[1]), routers[0], top_k=top_k, num_experts=num_experts))
            case _:
                return [], f"{_named(model)}: {name} ({type(block).__name__}) has no router that is known; {_WITHOUT}"
    if len({(router.top_k, router.num_experts) for router in found}) > 1:
        return [], f"{_named(model)}: its layers differ in how many experts they have or choose; {_WITHOUT}"
    return sorted(found, key=attrgetter("layer")), None


@dataclass(frozen=True)
class _Router:
    layer: int
    module: nn.Module
    top_k: int
    num_experts: int


_WITHOUT = "its expert routing cannot be recorded"


def _expert_blocks(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the modules that hold experts."""
    for name, module in model.named_modules():
        if "experts" in module._modules:
            yield name, module


def _named(model: PreTrainedModel) -> str:
    return f"model {model.config.name_or_path or type(model).__name__!r} ({model.config.model_type})"


def _indices(router: nn.Module, output: object, *, top_k: int) -> Tensor:
    """The one integer output: most routers return it last, some first."""
    outputs = output if isinstance(output, tuple) else (output,)
    whole = [entry for entry in outputs if isinstance(entry, torch.Tensor) and not entry.dtype.is_floating_point]
    if len(whole) != 1 or whole[0].shape[-1] != top_k:
        raise ModelError(f"{type(router).__name__} does not return the indices of {top_k} experts for each token; {_WITHOUT}")
    return whole[0].reshape(-1, top_k)
