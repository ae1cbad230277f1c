"""Attention of a packed pass on a GPU: each row attends to its own run of rows, and to the prefix that its run continues.

One kernel forward and two for the gradient support what a trainer meets: packed sequences of any length, siblings that share
the rows of their prompt, grouped heads, windows, soft caps, sinks, and values narrower than keys. A tile of rows lies within
one run, so only tiles on the diagonal or at the end of a run need a mask. For the compiler it is one operator. Imports Triton:
import it only for a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from headrace.model.kernels.attention import delta_kernel, forward_kernel, key_kernel, query_kernel

if TYPE_CHECKING:
    from torch import nn

    from headrace.model.attention import AttentionSpec, Layout
    from headrace.records import Array

TILE = 128  # rows or keys of a tile in the tables; kernels with smaller blocks take it in parts
_DELTA_ROWS = 32
_LEAST_DOT = 16
_NARROW_HEAD = 256  # bytes of one head's row; above it, programs hold fewer rows


class _Blocks(NamedTuple):
    """How a kernel is launched."""

    rows: int  # that a program holds
    keys: int
    warps: int
    stages: int

    def arguments(self) -> dict[str, int]:
        return {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


_NARROW = _Blocks(128, 128, 8, 2), _Blocks(128, 64, 8, 3), _Blocks(64, 128, 8, 2)  # forward; gradients of queries and of keys
_WIDE = _Blocks(64, 32, 4, 2), _Blocks(64, 32, 4, 2), _Blocks(32, 64, 4, 2)
_WIDEST = _Blocks(32, 16, 4, 1), _Blocks(32, 16, 4, 1), _Blocks(16, 32, 4, 1)


def _blocks(query: Tensor) -> tuple[_Blocks, _Blocks, _Blocks]:
    width = _padded(query.shape[-1]) * query.element_size()
    if width > 2 * _NARROW_HEAD:  # float32 heads of 256: larger tiles fit only the largest GPUs' shared memory
        return _WIDEST
    return _WIDE if width > _NARROW_HEAD else _NARROW


def _padded(size: int) -> int:
    return max(_LEAST_DOT, 1 << (size - 1).bit_length())


def _constants(query: Tensor, key: Tensor, value: Tensor, softcap: float, window: int) -> dict[str, Any]:
    dim, value_dim = query.shape[-1], value.shape[-1]
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "DIM": dim,
        "DIM_PAD": _padded(dim),
        "VALUE_DIM": value_dim,
        "VALUE_PAD": _padded(value_dim),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "HAS_SOFTCAP": softcap > 0,
        "HAS_WINDOW": window > 0,
    }


def _last_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


@torch.library.custom_op("headrace::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, row_tiles: Tensor, key_tiles: Tensor, positions: Tensor,
    scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([rows, heads, value dim], [heads, rows] base-2 log-sums). `softcap` and `window`: 0 for none; tables: `make_tables`."""
    query, key, value = _last_contiguous(query, key, value)
    rows, heads = query.shape[:2]
    out = query.new_empty((rows, heads, value.shape[-1]))
    sums = query.new_empty((heads, rows), dtype=torch.float32)
    blocks = _blocks(query)[0]
    forward_kernel[(heads, len(row_tiles) * (TILE // blocks.rows))](
        query, key, value, out if sinks is None else sinks, _split(row_tiles, blocks.rows), positions, out, sums, rows,
        *_strides(query, key, value), scale, softcap, window, HEADS=heads, HAS_SINKS=sinks is not None,
        **_constants(query, key, value, softcap, window), **blocks.arguments(),
    )  # fmt: skip
    return out, sums


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    rows, heads = query.shape[:2]
    return query.new_empty((rows, heads, value.shape[-1])), query.new_empty((heads, rows), dtype=torch.float32)


@torch.library.custom_op("headrace::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out: Tensor, sums: Tensor,
    row_tiles: Tensor, key_tiles: Tensor, positions: Tensor, scale: float, softcap: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value, gradient = _last_contiguous(query, key, value, gradient)
    rows, heads = query.shape[:2]
    kv_heads, constants = key.shape[1], _constants(query, key, value, softcap, window)
    deltas = torch.empty_like(sums)
    delta_kernel[(triton.cdiv(rows, _DELTA_ROWS), heads)](
        gradient, out, deltas, rows, gradient.stride(0), gradient.stride(1), HEADS=heads, VALUE_DIM=constants["VALUE_DIM"],
        VALUE_PAD=constants["VALUE_PAD"], ROWS=_DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    to_query = query.new_empty(query.shape)
    to_key, to_value = key.new_empty(key.shape), value.new_empty(value.shape)
    strides = (*_strides(query, key, value), gradient.stride(0), gradient.stride(1))
    _, of_query, of_key = _blocks(query)
    query_kernel[(heads, len(row_tiles) * (TILE // of_query.rows))](
        query, key, value, gradient, sums, deltas, _split(row_tiles, of_query.rows), positions, to_query, rows,
        *strides, scale, softcap, window, HEADS=heads, **constants, **of_query.arguments(),
    )  # fmt: skip
    key_kernel[(kv_heads, len(key_tiles) * (TILE // of_key.keys))](
        query, key, value, gradient, sums, deltas, _split(key_tiles, of_key.keys), positions, to_key, to_value, rows,
        *strides, scale, softcap, window, KV_HEADS=kv_heads, **constants, **of_key.arguments(),
    )  # fmt: skip
    if sinks is None:
        return to_query, to_key, to_value, query.new_empty(0)
    taken = torch.exp(sinks.float().unsqueeze(1) - sums * float(np.log(2)))
    return to_query, to_key, to_value, -(taken * deltas).sum(dim=1).to(sinks.dtype)


@tree_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rest: Any  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    to_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), to_sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    query, key, value, sinks, row_tiles, key_tiles, positions, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, row_tiles, key_tiles, positions)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    saved = ctx.saved_tensors  # read once: torch 2.11 computes a checkpoint again for it, and refuses to do so twice
    found = tree_attention_backward(gradient, *saved, *ctx.numbers)
    return (*found[:3], found[3] if saved[3] is not None else None, *[None] * 6)


tree_attention.register_autograd(_backward, setup_context=_setup)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _split(tiles: Tensor, size: int) -> Tensor:
    """Split tiles of `TILE` into tiles of `size`; those past the end of a run are empty."""
    parts = TILE // size
    if parts == 1:
        return tiles
    offsets = torch.arange(parts, device=tiles.device, dtype=tiles.dtype).mul(size)
    split = tiles.unsqueeze(1).repeat(1, parts, 1)
    split[..., 0] += offsets
    split[..., 1] = (split[..., 1] - offsets).clamp(0, size)
    return split.reshape(-1, tiles.shape[1])


class KernelContext:
    """The `AttentionContext` of one pass."""

    def __init__(self, layout: Layout, *, device: torch.device) -> None:
        self._tables = [torch.from_numpy(table).to(device) for table in make_tables(layout)]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        numbers = spec.scaling, spec.softcap or 0.0, spec.sliding_window or 0
        out: Tensor = tree_attention(query, key, value, spec.sinks, *self._tables, *numbers)[0]
        return out


def make_tables(layout: Layout) -> tuple[Array, Array, Array]:
    """(tiles of rows [n, 5], tiles of keys [n, 5], position of each row), int32.

    A tile of rows: first row, count, first row of its run, first row and length of its prefix. A tile of keys: first key,
    count, end of its run, first and end of the other rows that see all of it (the branches of a prefix, which follow it).
    """
    lengths, continues = np.asarray(layout.lengths), np.asarray(layout.continues)
    stops = np.cumsum(lengths)
    firsts = stops - lengths
    is_branch = continues >= 0
    prefixes, prefix_lengths = firsts[continues] * is_branch, lengths[continues] * is_branch
    upper_stops = np.zeros_like(stops)
    np.maximum.at(upper_stops, continues[is_branch], stops[is_branch])
    uppers = stops * (upper_stops > 0)
    counts = -(-lengths // TILE)
    owner = np.repeat(np.arange(len(lengths)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    first = firsts[owner] + offset
    held = np.minimum(lengths[owner] - offset, TILE)
    rows = np.stack([first, held, firsts[owner], prefixes[owner], prefix_lengths[owner]], axis=1)
    keys = np.stack([first, held, stops[owner], uppers[owner], upper_stops[owner]], axis=1)
    positions = np.arange(stops[-1]) - np.repeat(firsts - prefix_lengths, lengths)
    return rows.astype(np.int32), keys.astype(np.int32), positions.astype(np.int32)
