"""An adapter added to a loaded model: by hooks on the linear layers it targets, and where experts compute (`model/experts.py`).

The adapter is no part of the model: the model's tensors, their names and their memory stay as they are, and the adapter's can
be published, saved and optimized alone.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from headrace.lora.peft_folder import AdapterError, read_tensors, write_folder
from headrace.lora.targets import ExpertWeight, WholeModule, find_targets, split_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.lora.settings import LoraSettings
    from headrace.lora.targets import Adapted

    AddByRow = Callable[..., Tensor]
    """From the output of layers that read the same input, side by side, that input and their targets to the output with the
    adapter; with `is_gated=True` to silu of the first layer's times the second's."""
    Applied = tuple[Mapping[str, Tensor] | None, Tensor | None]
    """An adapter's tensors by name, None for its own; and the numbers of the rows they apply to, or None for all. A row may be
    named more than once, and counts once."""

_HELD_AS = "headrace_adapter"
_OF_ALL: Sequence[Applied] = ((None, None),)


@dataclass(eq=False)
class Target:
    """A linear layer, or a weight of experts, and its matrices. Layers of one shape differ in the tensors alone, so they share
    one compilation."""

    adapter: Adapter
    name: str
    down: Tensor
    up: Tensor
    versions: tuple[Tensor, Tensor] | None = None
    """Several versions of both, stacked, where an engine applies them by row."""


@dataclass(eq=False)
class Copy:
    """The adapter's parameters of a module that is trained whole, by their names in the module."""

    name: str
    own: dict[str, Tensor]


class Adapter(nn.Module):
    """Two matrices for each target, `NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank], with PEFT's names;
    those of experts have the rank of all experts together (`split_experts`). Beside these, the parameters of modules that are
    trained whole."""

    def __init__(self, targets: Mapping[str, Adapted], settings: LoraSettings, *, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.expert_weights = [each.path for each in targets.values() if isinstance(each, ExpertWeight)]
        self._whole = {name: each.module for name, each in targets.items() if isinstance(each, WholeModule)}
        draws = torch.Generator().manual_seed(seed)
        for name, target in targets.items():
            if isinstance(target, WholeModule):
                values = {each: parameter.detach().clone() for each, parameter in target.parameters().items()}
            else:
                values = {each: torch.zeros(shape) for each, shape in self.shapes({name: target}, settings).items()}
                bound = 1 / math.sqrt(target.in_features)  # PEFT's: kaiming_uniform_(a=√5)
                values[f"{name}.lora_A.weight"].uniform_(-bound, bound, generator=draws)
                weight = target.weight  # may wait in its file, on no device yet
                values = {each: value.to(weight.dtype) for each, value in values.items()}
                values = values if weight.is_meta else {each: value.to(weight.device) for each, value in values.items()}
            for path, value in values.items():
                parent, _, last = path.rpartition(".")
                _nested(self, parent).register_parameter(last, nn.Parameter(value))
        self.own: dict[str, Tensor] = dict(self.named_parameters())
        self._applied = _OF_ALL
        self.by_row: AddByRow | None = None
        """Adds to each row of a pass its own version, instead of what `applying` says."""

    @staticmethod
    def shapes(targets: Mapping[str, Adapted], settings: LoraSettings) -> dict[str, tuple[int, ...]]:
        """Of the tensors of an adapter that is not made yet, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, target in targets.items():
            if isinstance(target, WholeModule):
                found |= {each: tuple(parameter.shape) for each, parameter in target.parameters().items()}
                continue
            ranks = settings.rank * (target.num_experts if isinstance(target, ExpertWeight) else 1)
            found[f"{name}.lora_A.weight"] = ranks, target.in_features
            found[f"{name}.lora_B.weight"] = target.out_features, ranks
        return found

    @property
    def beyond_linear(self) -> str:
        """What it has besides matrices for linear layers, as the setting that asks for it; empty if nothing."""
        if self.expert_weights:
            return f"lora.targets names {self.expert_weights[0]!r}, a weight of experts"
        return f"lora.whole names {next(iter(self._whole))!r}" if self._whole else ""

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
        base = str(Path(base).resolve()) if Path(base).is_dir() else base
        write_folder(folder, self.settings, tensors, base=base, expert_weights=self.expert_weights)

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

    def narrow(self, model: PreTrainedModel, dtype: torch.dtype) -> Adapter:
        """Convert it in place to what it is beside a model that is narrowed to `dtype`, and was so already."""
        own = {name: parameter.dtype for name, parameter in model.named_parameters()}  # modules trained whole keep their names
        for name, parameter in self.own.items():
            parameter.data = parameter.data.to(own.get(name, dtype))
        return self

    def hook(self, adapted: Adapted, name: str) -> None:
        """Add the adapter's output to a layer's, or put its copy of a module in the module's place."""
        if isinstance(adapted, WholeModule):
            own = {each: self.own[f"{name}.{each}"] for each, _ in adapted.module.named_parameters()}
            cast("Any", adapted.module).headrace_copy = Copy(name, own)
            adapted.module.register_forward_hook(self._replace, with_kwargs=True)
            return
        down, up = (self.own[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        target = Target(self, name, down, up)
        if isinstance(adapted, ExpertWeight):
            cast("Any", adapted.experts).__dict__.setdefault("headrace_targets_of_experts", {})[adapted.parameter] = target
        else:
            cast("Any", adapted).headrace_target = target
            adapted.register_forward_hook(_add)

    def add(self, output: Tensor, hidden: Tensor, target: Target) -> Tensor:
        """What a layer gives for `hidden`, from what it gives without the adapter."""
        if self.by_row is not None:
            return self.by_row(output, hidden, (target,))
        for down, up, rows in self._matrices(target):
            given = hidden if rows is None else hidden.index_select(-2, rows)
            added = F.linear(F.linear(given, down), up) * self.settings.scale
            if rows is None:
                output = output + added
            else:
                output.index_copy_(-2, rows, output.index_select(-2, rows) + added)
        return output

    def settle_whole(self) -> None:
        """Give modules that are trained whole the adapter's parameters for good, in a model whose adapter is never off."""
        for module in self._whole.values():
            for each, parameter in cast("Any", module).headrace_copy.own.items():
                parent, _, last = each.rpartition(".")
                setattr(module.get_submodule(parent), last, parameter)
            del cast("Any", module).headrace_copy

    def replacing(self, module: nn.Module) -> Mapping[str, Tensor]:
        """What to use instead of a module's own parameters now; empty if these."""
        copy: Copy | None = getattr(module, "headrace_copy", None)
        if copy is None or not self._applied:
            return {}
        ((tensors, rows),) = self._applied
        assert rows is None, "a module that is trained whole has one version in a batch"
        return copy.own if tensors is None else {each: tensors[f"{copy.name}.{each}"] for each in copy.own}

    def _replace(self, module: nn.Module, inputs: tuple[Any, ...], more: dict[str, Any], output: Any) -> Any:  # noqa: ANN401
        given = self.replacing(module)
        if not given:
            return output
        with self.off():  # or this hook would call itself
            return torch.func.functional_call(module, dict(given), inputs, more)

    def of_experts(self, target: Target, *, num_experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Of each version that is applied: [experts, in, rank] and [experts, rank, out], scaled, and the rows it applies to.
        Zeros fill the rank up to a multiple of 8: grouped products need strides of 16 bytes."""
        missing = -self.settings.rank % 8
        for down, up, rows in self._matrices(target):
            of_down, of_up = split_experts(down, up * self.settings.scale, num_experts=num_experts)
            yield (F.pad(of_down, (0, missing)), F.pad(of_up, (0, 0, 0, missing)), rows) if missing else (of_down, of_up, rows)

    def _matrices(self, target: Target) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for tensors, rows in self._applied:
            down, up = target.down, target.up
            if tensors is not None:
                down, up = (tensors[f"{target.name}.{part}.weight"] for part in ("lora_A", "lora_B"))
            yield down, up, rows


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
    targets = find_targets(model, settings)
    adapter = Adapter(targets, settings, seed=seed)
    if adapter.expert_weights and getattr(model.config, "_experts_implementation", None) != "headrace":  # nothing would add it
        raise AdapterError(
            f"lora.targets names {adapter.expert_weights[0]!r}: experts can have adapters where they run as grouped products, "
            f"which they do not with exact = true; leave them out, or set exact = false"
        )
    if tensors is not None:
        adapter.fill(tensors)
    model.requires_grad_(False)
    for name, target in targets.items():
        adapter.hook(target, name)
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
    for name, target in find_targets(model, adapter.settings).items():
        if isinstance(target, WholeModule):
            for path, parameter in target.parameters().items():
                parameter.copy_(adapter.own[path])
            continue
        down, up = (adapter.own[f"{name}.{part}.weight"].float() for part in ("lora_A", "lora_B"))
        if isinstance(target, ExpertWeight):
            target.weight.add_(target.change(down, up), alpha=adapter.settings.scale)
            del cast("Any", target.experts).headrace_targets_of_experts[target.parameter]
        else:
            target.weight.add_(up @ down, alpha=adapter.settings.scale)
            del cast("Any", target).headrace_target
    adapter.turn_off()  # modules that were trained whole use their own parameters again
    del model.__dict__[_HELD_AS]


def _nested(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made where it is missing."""
    for part in path.split("."):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    return root
