"""An adapter added to a loaded model, by hooks on the linear layers it targets.

The adapter is no part of the model: the model's tensors, their names and their memory stay as they are, and the adapter's can
be published, saved and optimized alone.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from headrace.lora.peft_folder import AdapterError, read_tensors, write_folder
from headrace.lora.settings import ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.lora.settings import LoraSettings

    AddByRow = Callable[[Tensor, Tensor, Sequence["Target"]], Tensor]
    """From the output of layers that read the same input, side by side, and that input, to the output with the adapter."""
    Applied = tuple[Mapping[str, Tensor] | None, Tensor | None]
    """An adapter's tensors by name, None for its own; and the rows they apply to: [tokens, 1] of 0 and 1, or None for all."""

_HELD_AS = "headrace_adapter"
_OF_ALL: Sequence[Applied] = ((None, None),)


@dataclass(eq=False)
class Target:
    """A linear layer and its matrices. Layers of one shape differ in the tensors alone, so they share one compilation."""

    adapter: Adapter
    name: str
    down: Tensor
    up: Tensor
    versions: tuple[Tensor, Tensor] | None = None
    """Several versions of both, stacked, where an engine applies them by row."""


class Adapter(nn.Module):
    """Two matrices for each target, `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank], with PEFT's names."""

    def __init__(self, targets: Mapping[str, nn.Linear], settings: LoraSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        draws = torch.Generator().manual_seed(seed)
        for name, linear in targets.items():
            down = torch.empty(settings.rank, linear.in_features)
            bound = 1 / math.sqrt(linear.in_features)  # PEFT's: kaiming_uniform_(a=√5)
            parts = {
                "lora_A": down.uniform_(-bound, bound, generator=draws),
                "lora_B": torch.zeros(linear.out_features, settings.rank),
            }
            for part, values in parts.items():
                weight = nn.Parameter(values.to(linear.weight.device, linear.weight.dtype))
                _nested(self, f"{name}.{part}").register_parameter("weight", weight)
        self.own: dict[str, Tensor] = dict(self.named_parameters())
        self._applied = _OF_ALL
        self.by_row: AddByRow | None = None
        """Adds to each row of a pass its own version, instead of what `applying` says."""

    @staticmethod
    def shapes(targets: Mapping[str, nn.Linear], settings: LoraSettings) -> dict[str, tuple[int, ...]]:
        """Of the tensors of an adapter that is not made yet, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, linear in targets.items():
            found[f"{name}.lora_A.weight"] = settings.rank, linear.in_features
            found[f"{name}.lora_B.weight"] = linear.out_features, settings.rank
        return found

    @contextlib.contextmanager
    def applying(self, applied: Sequence[Applied]) -> Iterator[None]:
        """Within it, forward passes use these tensors instead of the adapter's own: none, or those of other versions too."""
        before, self._applied = self._applied, applied
        try:
            yield
        finally:
            self._applied = before

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the model is the one without an adapter."""
        return self.applying(())

    def turn_off(self) -> None:
        """From now on, the model is the one without an adapter."""
        self._applied = ()

    def write(self, folder: Path, tensors: Mapping[str, Tensor], *, base: str) -> None:
        """Write these values of its tensors as a PEFT folder; `base` is the model it was added to."""
        write_folder(folder, self.settings, tensors, base=str(Path(base).resolve()) if Path(base).is_dir() else base)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The values in a PEFT folder, if they are of this adapter's tensors."""
        tensors = read_tensors(folder)
        self._check(tensors)
        return tensors

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self._check(tensors)
        for name, own in self.own.items():
            own.copy_(tensors[name])

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name in sorted({*self.own, *tensors}):
            if name not in self.own or name not in tensors:
                where = "it lacks" if name not in tensors else "this model has no layer for"
                raise AdapterError(f"the adapter was made for another base model or other targets: {where} {name!r}")
            found, wanted = list(tensors[name].shape), list(self.own[name].shape)
            if found != wanted:
                raise AdapterError(f"the adapter was made for another base model: {name!r} is {found} there, and {wanted} here")

    def hook(self, linear: nn.Linear, name: str) -> None:
        """Add the adapter's output to a layer's."""
        down, up = (self.own[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        cast("Any", linear).headrace_target = Target(self, name, down, up)
        linear.register_forward_hook(_add)

    def add(self, output: Tensor, hidden: Tensor, target: Target) -> Tensor:
        """What a layer gives for `hidden`, from what it gives without the adapter."""
        if self.by_row is not None:
            return self.by_row(output, hidden, (target,))
        for tensors, rows in self._applied:
            down, up = target.down, target.up
            if tensors is not None:
                down, up = (tensors[f"{target.name}.{part}.weight"] for part in ("lora_A", "lora_B"))
            added = F.linear(F.linear(hidden, down), up) * self.settings.scale
            output = output + (added if rows is None else added * rows.to(added.dtype))
        return output


def _add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    target = target_of(module)
    return output if target is None else target.adapter.add(output, inputs[0], target)  # None once it is merged


def target_of(module: nn.Module) -> Target | None:
    """A layer's part of the adapter."""
    found: Target | None = getattr(module, "headrace_target", None)
    return found


def add_adapter(
    model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0, tensors: Mapping[str, Tensor] | None = None
) -> Adapter:
    """Add an adapter to a model and freeze the model's own weights. `tensors`: the adapter's, by name; without them it starts
    as one that changes nothing."""
    assert adapter_of(model) is None, "the model has an adapter already"
    targets = find_targets(model, settings.targets)
    adapter = Adapter(targets, settings, seed=seed)
    if tensors is not None:
        adapter.fill(tensors)
    model.requires_grad_(False)
    for name, linear in targets.items():
        adapter.hook(linear, name)
    model.__dict__[_HELD_AS] = adapter  # not as a submodule, which would make its tensors the model's
    return adapter


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that was added to a model."""
    found: Adapter | None = model.__dict__.get(_HELD_AS)
    return found


@torch.no_grad()
def merge_adapter(model: PreTrainedModel) -> None:
    """Add a model's adapter to the weights of the layers it targets, and take it off the model. Exact in float32 alone: in
    bfloat16 the sum drops most of a small update."""
    adapter = adapter_of(model)
    assert adapter is not None, "there is nothing to merge"
    for name in find_targets(model, adapter.settings.targets):
        down, up = (adapter.own[f"{name}.{part}.weight"].float() for part in ("lora_A", "lora_B"))
        linear = model.get_submodule(name)
        linear.get_parameter("weight").add_(up @ down, alpha=adapter.settings.scale)
        del cast("Any", linear).headrace_target
    del model.__dict__[_HELD_AS]


def find_targets(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers that an adapter targets, by name."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head}
    if tuple(targets) == (ALL,):
        return linear
    found: dict[str, nn.Linear] = {}
    for target in targets:
        matched = {name: module for name, module in linear.items() if name == target or name.endswith(f".{target}")}
        if not matched:
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = ", ".join(difflib.get_close_matches(target, known, n=3, cutoff=0.0))
            others = [name for name, _ in model.named_parameters() if target in name.split(".")]
            reason = f"{others[0]!r} is no linear layer" if others else "the model has no such layer"
            raise AdapterError(
                f"lora.targets = {target!r}: {reason}; linear layers are called {', '.join(known)} (nearest: {near})"
            )
        found |= matched
    return {name: linear[name] for name in linear if name in found}


def _nested(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made where it is missing."""
    for part in path.split("."):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    return root
