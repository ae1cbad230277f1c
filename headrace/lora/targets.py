"""What an adapter can target: linear layers, weights of experts, and modules that are trained whole beside it.

transformers keeps the weights of a layer's experts as one parameter with three dimensions, of which each expert gets matrices
of its own. PEFT wraps the experts' module once for each parameter that is adapted, one wrapper around another: the last
parameter's tensors have the module's name, those before it `.base_layer` behind that, once for each wrapper that is further
out. Of a module trained whole the adapter holds a copy of the parameters: PEFT's `modules_to_save`.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from headrace.lora.peft_folder import AdapterError
from headrace.lora.settings import ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.lora.settings import LoraSettings

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


@dataclass(frozen=True, eq=False)
class WholeModule:
    module: nn.Module
    name: str

    def parameters(self) -> dict[str, Tensor]:
        """By their names in the adapter, which are those in the model."""
        return {f"{self.name}.{each}": parameter for each, parameter in self.module.named_parameters()}


Adapted: TypeAlias = "nn.Linear | ExpertWeight | WholeModule"


def find_whole_modules(model: PreTrainedModel, wanted: Sequence[str]) -> dict[str, WholeModule]:
    """Those that `lora.whole` names, by name."""
    found: dict[str, WholeModule] = {}
    modules = {name: module for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = ends[0].weight is ends[1].weight
    for target in wanted:
        matched = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matched:
            near = ", ".join(difflib.get_close_matches(target, {name.rpartition(".")[2] for name in modules}, n=3, cutoff=0.0))
            raise AdapterError(f"lora.whole = {target!r}: the model has no such module (nearest: {near})")
        if is_tied and any(modules[name] in ends for name in matched):
            raise AdapterError(f"lora.whole = {target!r}: the model's head is tied to its embedding; leave it out")
        found |= {name: WholeModule(modules[name], name) for name in matched}
    return found


def find_linear_layers(model: PreTrainedModel, whole: Iterable[str]) -> dict[str, nn.Linear]:
    """All but the head and what is in modules that are trained whole, by name."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}
    return {name: module for name, module in linear.items() if not _is_within(name, whole)}


def find_targets(model: PreTrainedModel, settings: LoraSettings) -> dict[str, Adapted]:
    """The linear layers and weights of experts that an adapter targets, and the modules that are trained whole, by name."""
    targets, whole = settings.targets, find_whole_modules(model, settings.whole)
    linear = find_linear_layers(model, whole)
    found: set[str] = set()
    for target in targets:
        is_meant = functools.partial(_names, target)
        matched = list(linear) if target == ALL else [name for name in linear if is_meant(name)]
        if not matched and not find_expert_weights(model, is_meant):
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = ", ".join(difflib.get_close_matches(target, known, n=3, cutoff=0.0))
            others = [name for name, _ in model.named_parameters() if target in name.split(".")]
            reason = f"{others[0]!r} is no linear layer" if others else "the model has no such layer"
            raise AdapterError(
                f"lora.targets = {target!r}: {reason}; linear layers are called {', '.join(known)} (nearest: {near})"
            )
        found.update(matched)
    experts = find_expert_weights(
        model, lambda name: any(_names(target, name) for target in targets) and not _is_within(name, whole)
    )
    return {**{name: linear[name] for name in linear if name in found}, **experts, **whole}


def _is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether it is one of these modules or a part of one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _names(target: str, name: str) -> bool:
    """Whether a target, which may be the last parts of a name, means this one."""
    return name == target or name.endswith(f".{target}")
