"""Attention over the paged cache: operators that torch.compile can trace, and the attention contexts that call them.

Keys and values of a layer are [blocks × block size, heads, dim]; a slot's row of the block table lists its blocks.
`decode_attend` serves one new token per row: one kernel reads the row's cached tokens, adds the new one from registers and
writes it to the cache; with too few rows to fill the GPU it also splits over the keys. `prefill_attend` serves runs of new
tokens, which also see what is cached of their rollout.

Both write to the cache without declaring it: the compiler would copy the whole memory that the view belongs to. Nothing else
in a compiled layer reads the cache, and the operator's result is always used, so no call is dropped or reordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from headrace.engine.native.cuda.kernels.attention import combine_kernel, decode_kernel, prefill_kernel, write_kernel

if TYPE_CHECKING:
    from torch import nn

    from headrace.model import AttentionSpec

PREFILL_ROWS = 64  # tokens of one tile; a tile lies within one rollout
_MIN_DOT = 16  # the fewest rows of a matrix product on tensor cores
_WIDE_HEAD = 256  # bytes of one head's key; above it, programs hold fewer rows
_MANY = 256  # from this many rows × key heads, small programs are fastest; below, larger ones over split keys
_MAX_SPLITS = 16


def _padded(size: int) -> int:
    """The next power of two, as Triton requires, and at least `_MIN_DOT`."""
    return max(_MIN_DOT, 1 << (size - 1).bit_length())


def _decode_shape(programs: int) -> tuple[int, int, int, int]:
    """(splits, tile, warps, stages), measured on an H200 with heads of 128 (`headrace bench engine`)."""
    if programs >= _MANY:
        return max(1, 4 * _MANY // programs), 32, 1, 2
    return min(_MAX_SPLITS, max(1, 2 * _MANY // programs)), 64, 4, 2


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
    splits: int = 0,
    tile: int = 64,
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """[rows, heads, value dim] for one new token per row, whose key and value it writes to the cache. `slots` [rows] gives
    each row's line of `table`, `positions` [rows] its new token's position. `splits` 0 chooses the last four arguments."""
    rows, heads, dim = query.shape
    kv_heads, value_dim = value.shape[1], value.shape[2]
    if not splits:
        splits, tile, warps, stages = _decode_shape(rows * kv_heads)
    group = heads // kv_heads
    out = query.new_empty((rows, heads, value_dim), dtype=values.dtype)
    part_out = part_top = part_sum = out
    if splits > 1:
        part_out = out.new_empty((rows, heads, splits, value_dim), dtype=torch.float32)
        part_top = out.new_empty((rows, heads, splits), dtype=torch.float32)
        part_sum = torch.empty_like(part_top)
    given_sinks = out if sinks is None else sinks
    decode_kernel[(kv_heads, rows, splits)](
        query, key, value, keys, values, table, slots, positions, given_sinks, out, part_out, part_top, part_sum,
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window, table.stride(0),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=group, GROUP_PAD=_padded(group), DIM=dim, DIM_PAD=_padded(dim),
        VALUE_DIM=value_dim, VALUE_PAD=_padded(value_dim), BLOCK=block, TILE=tile, SPLITS=splits,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows, heads)](
            part_out, part_top, part_sum, given_sinks, out,
            HEADS=heads, VALUE_DIM=value_dim, VALUE_PAD=_padded(value_dim), SPLITS=splits,
            SPLITS_PAD=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None, num_warps=2,
        )  # fmt: skip
    return out


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
    rows: int = PREFILL_ROWS,
) -> Tensor:
    """[tokens, heads, value dim] for runs of new tokens, whose keys and values it first writes to their flat `places`. `tiles`
    [tiles, 4] int32: slot, first row, number of rows (0: none, at most `rows`), position of the first row."""
    _write_cache(key, value, keys, values, places)
    tokens, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    group = heads // kv_heads
    group_pad = 1 << (group - 1).bit_length()
    is_wide = _padded(dim) * keys.element_size() > _WIDE_HEAD
    most_rows, tile, warps, stages = (64, 32, 4, 2) if is_wide else (128, 64, 8, 3)
    at_once = max(1, min(rows, most_rows // group_pad))
    if at_once * group_pad < _MIN_DOT:
        at_once = _MIN_DOT // group_pad
    out = query.new_zeros((tokens, heads, value_dim), dtype=values.dtype)
    prefill_kernel[(kv_heads, tiles.shape[0], -(-rows // at_once))](
        query, keys, values, table, tiles, out if sinks is None else sinks, out,
        scale, 0.0 if softcap is None else softcap, 0 if window is None else window, table.stride(0),
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=group, GROUP_PAD=group_pad, DIM=dim, DIM_PAD=_padded(dim), VALUE_DIM=value_dim,
        VALUE_PAD=_padded(value_dim), BLOCK=block, TOKENS=at_once, TILE=tile,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _write_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    rows, kv_heads, dim = key.shape
    value_dim = value.shape[2]
    write_kernel[(rows,)](
        key, value, keys, values, places,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        KV_HEADS=kv_heads, HEADS_PAD=triton.next_power_of_2(kv_heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
        VALUE_DIM=value_dim, VALUE_PAD=triton.next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip


@decode_attend.register_fake
@prefill_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return values.new_empty((query.shape[0], query.shape[1], value.shape[2]))


@dataclass
class DecodeContext:
    """One new token per row. Each attention module carries its layer's cache, so one compiled layer serves all."""

    table: Tensor
    slots: Tensor
    positions: Tensor
    places: Tensor
    block: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        cache = module.headrace_keys, module.headrace_values
        bounds = spec.sinks, spec.scaling, spec.softcap, spec.sliding_window, self.block
        attended: Tensor = decode_attend(query, key, value, *cache, self.table, self.slots, self.positions, *bounds)
        return attended


@dataclass
class PrefillContext:
    """Runs of new tokens."""

    table: Tensor
    tiles: Tensor
    places: Tensor
    block: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        cache = module.headrace_keys, module.headrace_values
        bounds = spec.sinks, spec.scaling, spec.softcap, spec.sliding_window, self.block
        attended: Tensor = prefill_attend(query, key, value, *cache, self.table, self.places, self.tiles, *bounds)
        return attended
