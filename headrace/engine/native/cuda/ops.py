"""The kernels as operators that torch.compile can trace, and the attention contexts that call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.engine.native.cuda import attention

if TYPE_CHECKING:
    from torch import nn

    from headrace.model import AttentionSpec

_MANY = 256
"""Rows times key heads from which on small programs, many at a time on each processor, are the fastest; with fewer, larger
ones over split keys are."""
_MOST_SPLITS = 16

# Both write to the cache and do not say so: told that an operator changes a view into a larger piece of memory, the compiler
# copies that piece. Nothing else in a compiled layer reads the cache, and what the operator returns is always used.


@torch.library.custom_op("headrace::decode_attend", mutates_args=())
def decode_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    block: int,
) -> Tensor:
    rows, kv_heads = query.shape[0], key.shape[1]
    return attention.decode_attend(
        query,
        key,
        value,
        keys,
        values,
        table,
        slots,
        positions,
        sinks,
        scale=scale,
        softcap=softcap,
        window=window,
        block=block,
        **_shape_of(rows * kv_heads),
    )


def _shape_of(programs: int) -> dict[str, int]:
    """How a decode step is cut into programs; measured on an H200 with heads of 128 (`headrace bench engine`)."""
    if programs >= _MANY:
        return {"splits": max(1, 4 * _MANY // programs), "tile": 32, "warps": 1, "stages": 2}
    return {"splits": min(_MOST_SPLITS, max(1, 2 * _MANY // programs)), "tile": 64, "warps": 4, "stages": 2}


@decode_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    block: int,
) -> Tensor:
    return values.new_empty((query.shape[0], query.shape[1], value.shape[2]))


@torch.library.custom_op("headrace::prefill_attend", mutates_args=())
def prefill_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    places: Tensor,
    tiles: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    block: int,
) -> Tensor:
    attention.write_cache(key, value, keys, values, places)
    return attention.prefill_attend(
        query, keys, values, table, tiles, sinks, scale=scale, softcap=softcap, window=window, block=block
    )


@prefill_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    places: Tensor,
    tiles: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    block: int,
) -> Tensor:
    return values.new_empty((query.shape[0], query.shape[1], value.shape[2]))


@dataclass
class DecodeContext:
    """One new token per row. A layer's part of the cache hangs on its attention module: one compiled layer serves all."""

    table: Tensor
    slots: Tensor
    positions: Tensor
    places: Tensor
    block: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        attended: Tensor = decode_attend(
            query,
            key,
            value,
            module.headrace_keys,
            module.headrace_values,
            self.table,
            self.slots,
            self.positions,
            spec.sinks,
            spec.scaling,
            spec.softcap,
            spec.sliding_window,
            self.block,
        )
        return attended


@dataclass
class PrefillContext:
    """Runs of new tokens."""

    table: Tensor
    tiles: Tensor
    places: Tensor
    block: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        attended: Tensor = prefill_attend(
            query,
            key,
            value,
            module.headrace_keys,
            module.headrace_values,
            self.table,
            self.places,
            self.tiles,
            spec.sinks,
            spec.scaling,
            spec.softcap,
            spec.sliding_window,
            self.block,
        )
        return attended
