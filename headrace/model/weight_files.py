"""A model's tensors in its safetensors files, read by ranges: each of several ranks reads its share alone."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from headrace.model.arena import held_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

HELD_AS = "headrace_weight_files"  # by a model that was loaded without its weights


class WeightFiles:
    """By the model's own names, where files may have others. Of some tensors transformers makes one, such as the weights of a
    layer's experts: it is made whole to read a range of it."""

    def __init__(
        self, model: PreTrainedModel, paths: Iterable[str | Path], *, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        """`dtypes`: what to round tensors to, by name."""
        self._dtypes = dtypes or {}
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._model, state = model, model.state_dict()
        self._sources: dict[str, list[tuple[str, str | Path, str | None]]] = {}  # name in its file, file, converter's pattern
        prefix, shapes = model.base_model_prefix, dict[str, tuple[int, ...]]()
        files: dict[str, str | Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  (not a dict)
        for key in sorted(files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            self._sources.setdefault(name, []).append((key, files[key], pattern))
        self.used = [each for each in transforms if each.was_used()]
        """What transformers reverts when it saves the model."""
        names = {id(tensor): name for name, tensor in held_tensors(model)}
        state = model.state_dict(keep_vars=True)
        tied = [(name, state[name]) for name in self._sources if name in state and names[id(state[name])] != name]
        self.has_all = all(self._has(name, tensor, shapes) for name, tensor in (*held_tensors(model), *tied)) and all(
            torch.equal(*(self.read(each, 0, tensor.numel()) for each in (name, names[id(tensor)]))) for name, tensor in tied
        )
        """Whether `read` can read every tensor of the model. Transformers does not tie those that differ in the files."""

    def _has(self, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        found = [(shapes[key], pattern) for key, _, pattern in self._sources.get(name, ())]
        if not found or found[0][1] is None:
            return bool(found) and found[0][0] == tensor.shape
        return sum(math.prod(shape) for shape, _ in found) == tensor.numel()

    def read(self, name: str, first: int, stop: int) -> Tensor:
        """Elements of a tensor, in one dimension."""
        found = self._read(name, first, stop)
        return found.to(self._dtypes.get(name, found.dtype))

    def _read(self, name: str, first: int, stop: int) -> Tensor:
        key, path, pattern = self._sources[name][0]
        if pattern is not None:
            return self._converted(name, pattern).reshape(-1)[first:stop]
        with safe_open(path, framework="pt") as file:
            rows = file.get_slice(key)
            shape = rows.get_shape()
            return flat_range(rows, shape, first, stop) if shape else file.get_tensor(key).reshape(1)[first:stop]

    def _converted(self, name: str, pattern: str) -> Tensor:
        converter, sources = copy.deepcopy(self._converters[pattern]), self._sources[name]
        with contextlib.ExitStack() as stack:  # each file is opened once: a layer may have hundreds of experts in it
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {each[1] for each in sources}}
            for key, path, pattern_of_key in sources:
                converter.add_tensor(name, key, pattern_of_key or key, opened[path].get_tensor(key))
        made: Any = converter.convert(name, model=self._model, config=self._model.config)[name]
        return cast("Tensor", made[0] if isinstance(made, list) else made)


def flat_range(rows: Any, shape: list[int], first: int, stop: int) -> Tensor:  # noqa: ANN401  (safetensors' slice)
    """Elements of a tensor in a file, reading only the rows they are in."""
    width = math.prod(shape[1:])
    if stop <= first or not width:
        return torch.zeros(0)
    low, high = first // width, -(-stop // width)
    part: Tensor = rows[low:high]
    return part.reshape(-1)[first - low * width : stop - low * width]


def find_paths(path: str) -> list[str]:
    """The weight files of a folder or of a model on the hub; none if it has none in safetensors."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            return [found] if name == SAFE_WEIGHTS_NAME else list(get_checkpoint_shard_files(path, found)[0])
    return []


def loaded_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What transformers loads each tensor of a new model in, by name: it keeps some float32."""
    kept = list(model._get_dtype_plan(dtype))
    pattern = build_glob_alternation(kept)[0] if kept else None
    return {
        name: tensor.dtype if pattern is None or pattern.search(name) is None else torch.float32
        for name, tensor in held_tensors(model)
    }


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, new modules have parameters without memory, but real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one is itself
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def leave_meta(model: nn.Module) -> None:
    """Replace parameters on the meta device by ones in host memory whose storage has no bytes, and can be given some."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.is_meta:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
                    made[id(old)].untyped_storage().resize_(0)
                module._parameters[name] = made[id(old)]


def take_files(model: PreTrainedModel) -> WeightFiles | None:
    """The files of a model that was loaded without its weights, once; None of any other."""
    found: WeightFiles | None = model.__dict__.pop(HELD_AS, None)
    return found
