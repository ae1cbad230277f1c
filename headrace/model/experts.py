"""A layer's experts as grouped matrix products, one for all experts, whose shapes do not depend on the routing.

Rows are sorted by expert on the device, and the product is told where each expert's rows end. So the host never waits, and a
layer can be compiled and captured. That holds for bfloat16, for which torch has a grouped kernel; in other dtypes torch
multiplies expert by expert, and the host waits. The product is an operator of its own, which the compiler does not look into:
torch's kernel gets the strides it needs, in the forward and the backward pass. The gradient of sorting is sorting back, so
gradients are summed in the same order every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

if TYPE_CHECKING:
    from headrace.lora import Target

NAME = "headrace"


def register() -> None:
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[tokens, hidden], weighted sums of what each token's `chosen` experts, [tokens, top_k], make of it."""
    own: Any = experts
    adapted: dict[str, Target] = getattr(own, "headrace_targets_of_experts", {})
    up = own.gate_up_proj if own.has_gate else own.up_proj
    by_expert, order = chosen.flatten().int().sort(stable=True)
    numbers = torch.arange(len(up), dtype=torch.int32, device=hidden.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=hidden.device))

    def linear(rows: Tensor, name: str, weight: Tensor) -> Tensor:
        product: Tensor = grouped_product(rows, weight if own.is_transposed else weight.transpose(-2, -1), ends)
        target = adapted.get(name)
        for down, up, applies_to in () if target is None else target.adapter.of_experts(target, num_experts=len(weight)):
            added = grouped_product(grouped_product(rows, down, ends), up, ends)
            if applies_to is not None:
                is_applied = torch.zeros(len(hidden), 1, dtype=added.dtype, device=added.device).index_fill(0, applies_to, 1)
                added = added * is_applied[order // chosen.shape[1]]
            product = product + added
        return product + getattr(own, f"{name}_bias")[by_expert] if own.has_bias else product

    rows: Tensor = _Sort.apply(hidden.to(up.dtype), order, back, chosen.shape[1])  # type: ignore[no-untyped-call]
    rows = linear(rows, "gate_up_proj" if own.has_gate else "up_proj", up)
    rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
    rows = _Sort.apply(linear(rows, "down_proj", own.down_proj), back, order, 1)  # type: ignore[no-untyped-call]
    found: Tensor = (rows.view(*chosen.shape, -1).to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1)
    return found.to(hidden.dtype)


class _Sort(torch.autograd.Function):
    """`rows`, each so many `times` in a row, in the order `order`, which `back` undoes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, times: int) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(back)
        ctx.times = times
        return rows.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (back,) = ctx.saved_tensors
        rows = gradient.index_select(0, back)
        return rows if ctx.times == 1 else rows.unflatten(0, (-1, ctx.times)).sum(dim=1), None, None, None


@torch.library.custom_op("headrace::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, out]: each row times its expert's matrix in `weight`, [experts, in, out]. `ends`: int32, where each expert's rows
    end."""
    return F.grouped_mm(rows, weight, offs=ends)


@torch.library.custom_op("headrace::grouped_gradient", mutates_args=())
def grouped_gradient(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """[experts, in, out]: for each expert the sum of the outer products of its rows with their gradients."""
    return F.grouped_mm(rows.t(), gradient, offs=ends)


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@grouped_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ANN401
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
    rows, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    to_rows = grouped_product(gradient, weight.transpose(-2, -1), ends)
    if weight.stride(-1) == 1:
        return to_rows, grouped_gradient(rows, gradient, ends), None
    return to_rows, grouped_gradient(gradient, rows, ends).transpose(-2, -1), None  # in the order of the parameter's memory


grouped_product.register_autograd(_backward, setup_context=_save)
