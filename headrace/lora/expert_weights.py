"""Adapters of experts: each expert of a layer has matrices of its own, stored as PEFT stores those of a parameter.

transformers keeps the weights of a layer's experts as one parameter with three dimensions. PEFT wraps the experts' module once
for each parameter that is adapted, one wrapper around another: the last parameter's tensors have the module's name, those
before it `.base_layer` behind that, once for each wrapper that is further out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_INNER = ".base_layer"


@dataclass(frozen=True, eq=False)
class ExpertWeight:
    """One such parameter."""

    experts: nn.Module
    path: str
    """Its name in the model."""

    @property
    def parameter(self) -> str:
        """Its name in the experts' module."""
        return self.path.rpartition(".")[2]

    @property
    def weight(self) -> Tensor:
        return self.experts.get_parameter(self.parameter)

    @property
    def is_transposed(self) -> bool:
        """Whether it is [experts, in, out], and not [experts, out, in]."""
        own: Any = self.experts
        return bool(own.is_transposed)

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 2]

    @property
    def out_features(self) -> int:
        return self.weight.shape[2 if self.is_transposed else 1]

    def change(self, down: Tensor, up: Tensor) -> Tensor:
        """What an adapter's tensors add to it, before the scale."""
        down, up = split_experts(down, up, num_experts=self.num_experts)
        found = down @ up
        return found if self.is_transposed else found.transpose(-2, -1)


def split_experts(down: Tensor, up: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """([experts, in, rank], [experts, rank, out]) of stored tensors, [experts · rank, in] and [out, rank · experts]: in the
    first an expert's rows lie together, in the second experts are side by side for each place of the rank."""
    return down.unflatten(0, (num_experts, -1)).transpose(1, 2), up.unflatten(1, (-1, num_experts)).permute(
        2, 1, 0
    ).contiguous()


def find_expert_weights(model: nn.Module, is_wanted: Callable[[str], bool]) -> dict[str, ExpertWeight]:
    """Those of a model whose module's or own name is wanted, by the name that PEFT's tensors for them have."""
    found: dict[str, ExpertWeight] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "is_transposed"):  # transformers marks its modules of experts with it
            continue
        paths = [f"{name}.{each}" for each, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
        wanted = [path for path in paths if is_wanted(name) or is_wanted(path)]
        for place, path in enumerate(wanted):
            found[name + _INNER * (len(wanted) - 1 - place)] = ExpertWeight(module, path)
    return found
