"""A model's twin: the same parameters under modules of its own, whose layers are compiled.

Linear layers that read the same input become one matrix product (their weights are adjacent in the arena), and decoder layers
share one compilation for all batch sizes. The model itself is unchanged and can run meanwhile.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from headrace.engine.native.cuda import adapters as adapters  # its operator is named below
from headrace.model import adapter_of, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.kv_cache import PagedCache
    from headrace.model import Arena, Target

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children of a module that read the same input
_RECOMPILES = 64


def make_twin(model: PreTrainedModel, arena: Arena) -> PreTrainedModel:
    """A copy of the model's modules over the model's own tensors."""
    adapter = adapter_of(model)
    shared = [*model.parameters(), *model.buffers(), *([] if adapter is None else adapter.parameters())]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    _join_projections(twin, arena)
    return twin


def attach_cache(model: PreTrainedModel, cache: PagedCache) -> None:
    """Set each layer's keys and values on its attention module, where the attention contexts look for them."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(cache.keys):
            attention = cast("Any", module)
            attention.headrace_keys, attention.headrace_values = cache.keys[layer], cache.values[layer]


class _Part(nn.Module):
    """One of several linear layers, as a slice of their joint product, which the compiler computes once."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int, targets: Sequence[Target]) -> None:
        """`targets`: all of them, if an adapter targets them."""
        super().__init__()
        self.headrace_targets = tuple(targets)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self._start, self._stop = start, stop

    def forward(self, hidden: Tensor) -> Tensor:
        output = F.linear(hidden, self.weight, self.bias)
        by_row = self.headrace_targets[0].adapter.by_row if self.headrace_targets else None
        if by_row is not None:
            output = by_row(output, hidden, self.headrace_targets)
        return output[..., self._start : self._stop]


def _join_projections(model: PreTrainedModel, arena: Arena) -> None:
    for path, module in list(model.named_modules()):
        for names in _TOGETHER:
            parts = [getattr(module, name, None) for name in names]
            if all(type(part) is nn.Linear for part in parts):
                _join(module, names, cast("list[nn.Linear]", parts), arena, path)


def _join(module: nn.Module, names: Sequence[str], parts: list[nn.Linear], arena: Arena, path: str) -> None:
    has_bias = [part.bias is not None for part in parts]
    targets = [target for target in map(target_of, parts) if target is not None]
    if len(set(has_bias)) > 1 or len(targets) not in (0, len(parts)):
        return
    weight = _joined(arena, [f"{path}.{name}.weight" for name in names])
    bias = _joined(arena, [f"{path}.{name}.bias" for name in names]) if has_bias[0] else None
    if weight is None or (has_bias[0] and bias is None):
        return
    start = 0
    for name, part in zip(names, parts, strict=True):
        setattr(module, name, _Part(weight, bias, start, start + part.out_features, targets))
        start += part.out_features


def _joined(arena: Arena, names: Sequence[str]) -> Tensor | None:
    return arena.joined(names) if all(name in arena.slots for name in names) else None


class _CommonSubexpressions(CustomGraphPass):
    """Common subexpression elimination: the product behind the `_Part`s is computed once."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        seen: dict[object, torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _PURE:
                continue
            key = (node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


_aten = torch.ops.aten
_PURE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.expand.default,
    _aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.headrace.add_low_rank.default,
}


def _frozen(value: Any) -> Any:  # noqa: ANN401  (a graph's arguments nest)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each) for each in value)
    return value


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each kind of layer once, for any number of rows."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILES)
    # `emulate_precision_casts`: fused operations round where the trainer, which runs them one by one, rounds.
    options = {"post_grad_custom_pre_pass": _CommonSubexpressions(), "combo_kernels": True, "emulate_precision_casts": True}
    base: Any = model.base_model
    for layer in base.layers:
        layer.compile(dynamic=True, fullgraph=True, options=options)
    for name in ("norm", "rotary_emb"):
        module = getattr(base, name, None)
        if isinstance(module, nn.Module):
            module.compile(dynamic=True)


def undo_compile(model: PreTrainedModel) -> None:
    for module in model.modules():
        module._compiled_call_impl = None
