"""QLoRA: the frozen weights of linear layers in 4 bits (`lora.quantize`), by bitsandbytes.

A weight is held as codes of 4 bits and one scale for every 64 numbers. A layer computes with the 16- or 32-bit numbers that
these stand for, made for each product and dropped after it, in the forward pass and again in the backward pass. A run rounds
the model to such numbers first and keeps that: engines, the reference and merging use it as any other model. Quantizing
numbers that are rounded already gives them back bit by bit, so all compute with the same weights.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.lora.adapter import adapter_of
from headrace.lora.peft_folder import AdapterError
from headrace.lora.settings import FOUR_BITS
from headrace.lora.targets import find_linear_layers, find_whole_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headrace.lora.settings import LoraSettings

BLOCK = 64
"""Numbers that share a scale."""
_FETCHING = "kernels"
"""A package through which bitsandbytes would fetch native code from a hub, if it could import it."""


def find_quantized(model: PreTrainedModel, settings: LoraSettings) -> dict[str, nn.Linear]:
    """The linear layers whose weights are held in 4 bits: all but the head, what is trained whole, and sizes that are no
    multiple of a block."""
    linear = find_linear_layers(model, find_whole_modules(model, settings.whole))
    return {name: module for name, module in linear.items() if module.weight.numel() % BLOCK == 0}


def held_bytes(num_numbers: int) -> int:
    """Of a weight in 4 bits, with its scales."""
    return num_numbers // 2 + 4 * -(-num_numbers // BLOCK)


@torch.no_grad()
def round_weights(model: PreTrainedModel, settings: LoraSettings, *, device: str) -> bool:
    """Round the weights to what 4 bits can hold, in place and in their dtype, computed on `device`. False if they all were such
    numbers already."""
    is_changed = False
    for layer in find_quantized(model, settings).values():
        weight = layer.weight.to(device)
        rounded = _dequantize(*_quantize(weight), weight.shape[1], weight.dtype)
        is_changed = is_changed or not torch.equal(rounded, weight)
        layer.weight.copy_(rounded)
    return is_changed


@torch.no_grad()
def hold_in_four_bits(model: PreTrainedModel, settings: LoraSettings, *, device: str) -> None:
    """Move a rounded model and its adapter to `device`, the weights of linear layers in 4 bits; there they are never all held
    with all digits."""
    for name, layer in find_quantized(model, settings).items():
        weight = layer.weight.to(device)
        codes, scales = _quantize(weight)
        if not torch.equal(_dequantize(codes, scales, weight.shape[1], weight.dtype), weight):
            given = f"lora.quantize = {settings.quantize!r}: {name}.weight of {model.name_or_path}"
            raise AdapterError(
                f"{given} has numbers that 4 bits cannot hold, with which engines would sample; continue an adapter whose run "
                f"had the same lora.quantize, or leave it out"
            )
        del layer.weight
        layer.register_buffer("weight_codes", codes)
        layer.register_buffer("weight_scales", scales)
        cast("Any", layer).weight_dtype = weight.dtype
        layer.__class__ = FourBitLinear
    cast("nn.Module", model).to(device)
    adapter = adapter_of(model)
    if adapter is not None:
        adapter.to(device)


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose weight is codes and scales."""

    weight_codes: Tensor
    weight_scales: Tensor
    weight_dtype: torch.dtype

    def forward(self, hidden: Tensor) -> Tensor:
        given = hidden.to(self.weight_dtype), self.weight_codes, self.weight_scales
        return cast("Tensor", torch.ops.headrace.linear_of_codes(*given, self.bias, self.out_features))


# Operators of their own: a compiler that saw the weights made twice would keep them from forward to backward pass.
@torch.library.custom_op(
    "headrace::linear_of_codes",
    mutates_args=(),
    schema="(Tensor hidden, Tensor codes, Tensor scales, Tensor? bias, SymInt num_outputs) -> Tensor",
)
def _linear(hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    weight = _dequantize(codes, scales, hidden.shape[-1], hidden.dtype)
    return F.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))


@torch.library.custom_op(
    "headrace::linear_of_codes_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor codes, Tensor scales, SymInt num_inputs) -> Tensor",
)
def _linear_backward(gradient: Tensor, codes: Tensor, scales: Tensor, num_inputs: int) -> Tensor:
    return gradient @ _dequantize(codes, scales, num_inputs, gradient.dtype)


@_linear.register_fake
def _(hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], num_outputs))


@_linear_backward.register_fake
def _(gradient: Tensor, codes: Tensor, scales: Tensor, num_inputs: int) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], num_inputs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401  (autograd's context)
    hidden, codes, scales, *_ = inputs
    ctx.save_for_backward(codes, scales)
    ctx.num_inputs = hidden.shape[-1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    codes, scales = ctx.saved_tensors
    return torch.ops.headrace.linear_of_codes_backward(gradient, codes, scales, ctx.num_inputs), None, None, None, None


_linear.register_autograd(_backward, setup_context=_save)


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def _operators() -> Any:  # noqa: ANN401  (torch's operators have no types)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it misses the package hidden from it here
    is_hidden = cast("dict[str, Any]", sys.modules).setdefault(_FETCHING, None) is None
    try:
        import bitsandbytes  # noqa: F401  (defines its operators)
    finally:
        if is_hidden:
            del sys.modules[_FETCHING]
    return torch.ops.bitsandbytes


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(two codes a byte, the scale of each block)."""
    codes, scales = _operators().quantize_4bit(weight.contiguous(), BLOCK, FOUR_BITS, torch.uint8)
    return codes, scales


def _dequantize(codes: Tensor, scales: Tensor, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs]. Asked for as one row: on a CPU bitsandbytes 0.50 gives wrong numbers for rows that do not end with a
    block."""
    flat = _operators().dequantize_4bit(codes, scales, BLOCK, FOUR_BITS, [2 * codes.numel()], dtype)
    return cast("Tensor", flat).view(-1, num_inputs)
