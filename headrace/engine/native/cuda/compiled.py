"""A model's twin: the same parameters under modules of its own, whose layers are compiled.

Linear layers that read the same input become one matrix product: their weights are adjacent in the arena, and so are the first
matrices of an adapter behind them. Decoder layers share one compilation for all batch sizes. The model itself is unchanged and
can run meanwhile.
"""

from __future__ import annotations

import copy
import operator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
    if (own := adapter_of(twin)) is not None:
        own.settle_whole()
    for product in _products(twin):
        _join(product, arena)
    for path, module in list(twin.named_modules()):
        if _is_gated(module):
            twin.set_submodule(path, _GatedLayers(module))
    return twin


def room_for_adapter(model: PreTrainedModel, places: int) -> dict[str, int]:
    """Rows to leave free behind weights, by name, for the first matrices of so many versions of the model's adapter."""
    return {
        product.weights[-1]: places * sum(len(target.down) for target in product.targets)
        for product in _products(model)
        if product.targets
    }


def attach_cache(model: PreTrainedModel, cache: PagedCache) -> None:
    """Set each layer's keys and values on its attention module, where the attention contexts look for them."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(cache.keys):
            attention = cast("Any", module)
            attention.headrace_keys, attention.headrace_values = cache.keys[layer], cache.values[layer]


class _Part(nn.Module):
    """A linear layer as a slice of a product that the compiler computes once: of layers that read the same input, followed by
    the first matrices of their adapter, version by version."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self._start, self._stop = start, stop
        self.headrace_targets: Sequence[Target] = ()
        self.headrace_target: Target | None = None
        self.headrace_room: Tensor | None = None

    def add_targets(self, targets: Sequence[Target], index: int) -> None:
        """An adapter's targets: those of all the product's layers, of which this one's is at `index`."""
        self.headrace_targets, self.headrace_target = tuple(targets), targets[index]
        rows, ranks = sum(len(target.up) for target in targets), [len(target.down) for target in targets]
        if len(self.weight) > rows:
            self.headrace_room = self.weight[rows:].unflatten(0, (-1, sum(ranks))).split(ranks, dim=1)[index]

    def forward(self, hidden: Tensor) -> Tensor:
        output = F.linear(hidden, self.weight, self.bias)
        by_row = self.headrace_targets[0].adapter.by_row if self.headrace_targets else None
        if by_row is not None:
            output = by_row(output, hidden, self.headrace_targets)
        return output[..., self._start : self._stop]


class _GatedLayers(nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x)): one kernel adds the adapter to the first two and computes what follows."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(layers.get_submodule, ("gate_proj", "up_proj", "down_proj"))

    def forward(self, hidden: Tensor) -> Tensor:
        gate: Any = self.gate_proj
        by_row = gate.headrace_target.adapter.by_row
        if by_row is None:
            inner = F.silu(gate(hidden)) * self.up_proj(hidden)
        else:
            inner = by_row(F.linear(hidden, gate.weight, gate.bias), hidden, gate.headrace_targets, is_gated=True)
        output: Tensor = self.down_proj(inner)
        return output


class _Children(torch.fx.Tracer):
    """Traces a module's own forward pass alone."""

    def is_leaf_module(self, *_: object) -> bool:
        return True


def _is_gated(module: nn.Module) -> bool:
    """Whether it computes what `_GatedLayers` does, with an adapter on layers that are one product."""
    gate, activation = (getattr(module, name, None) for name in ("gate_proj", "act_fn"))
    if not (isinstance(gate, _Part) and len(gate.headrace_targets) == 2 and activation is not None):
        return False
    some = torch.linspace(-8.0, 8.0, 65)
    if not torch.equal(activation(some), F.silu(some)):
        return False
    try:
        graph = _Children().trace(module)
    except torch.fx.proxy.TraceError:  # it branches on its input
        return False
    given, *steps, _ = graph.nodes
    numbers = {node: index for index, node in enumerate([given, *steps])}
    computed = [
        (step.target, [numbers[each] if isinstance(each, torch.fx.Node) else None for each in step.args], step.kwargs)
        for step in steps
    ]
    return computed == [
        ("gate_proj", [0], {}),
        ("act_fn", [1], {}),
        ("up_proj", [0], {}),
        (operator.mul, [2, 3], {}),
        ("down_proj", [4], {}),
    ]


class _Product(NamedTuple):
    """Linear layers of a module that are computed as one product."""

    module: nn.Module
    names: Sequence[str]
    """Of the module's children."""
    weights: Sequence[str]
    """Of their weights, in the model."""
    parts: list[nn.Linear]
    targets: list[Target]
    """Of an adapter: one for each layer, or none."""


def _products(model: PreTrainedModel) -> list[_Product]:
    """Layers that read the same input, and single ones that an adapter targets."""
    found: list[_Product] = []
    for path, module in model.named_modules():
        single = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        for names in (*_TOGETHER, *((name,) for name in list(single))):
            parts = [single[name] for name in names if name in single]
            targets = [target for target in map(target_of, parts) if target is not None]
            are_alike = len({part.bias is None for part in parts}) == 1 and len(targets) in (0, len(parts))
            if len(parts) == len(names) and are_alike and (targets or len(parts) > 1):
                weights = [f"{path}.{name}.weight" for name in names]
                found.append(_Product(module, names, weights, parts, targets))
                for name in names:
                    del single[name]
    return found


def _join(product: _Product, arena: Arena) -> None:
    weight = _joined(arena, product.weights)
    if weight is None or any(part.weight.data_ptr() not in _addresses(weight) for part in product.parts):
        return  # such a part is trained whole
    bias = None
    if product.parts[0].bias is not None:
        bias = _joined(arena, [f"{name.removesuffix('weight')}bias" for name in product.weights])
        if bias is None:
            return
        if len(weight) > len(bias):  # a copy will do: beside an adapter the model's own tensors never change
            bias = torch.cat([bias, bias.new_zeros(len(weight) - len(bias))])
    start = 0
    for index, (name, linear) in enumerate(zip(product.names, product.parts, strict=True)):
        part = _Part(weight, bias, start, start + linear.out_features)
        if product.targets:
            part.add_targets(product.targets, index)
        setattr(product.module, name, part)
        start += linear.out_features


def _addresses(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


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
