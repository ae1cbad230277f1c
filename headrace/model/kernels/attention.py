"""Attention over packed rows that may share prefixes, and its gradient; launched by `tree_attention`.
Logits and log-sums are in base 2: logits are multiplied by log2 e, after the soft cap if there is one."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.model.kernels.softcap import capped

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(
    pointer, rows, head_offset, row_stride, columns, is_row, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr
):
    """[rows, dim] of one head."""
    at = pointer + rows.to(tl.int64)[:, None] * row_stride + head_offset + columns[None, :]
    if MASKED:
        mask = is_row[:, None]
        if DIM != DIM_PAD:
            mask = mask & (columns[None, :] < DIM)
        return tl.load(at, mask=mask, other=0.0)
    if DIM != DIM_PAD:
        return tl.load(at, mask=columns[None, :] < DIM, other=0.0)
    return tl.load(at)


@triton.jit
def _logits(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Base-2 logits from query times key."""
    return capped(products * scale, softcap) * LOG2E if HAS_SOFTCAP else products * (scale * LOG2E)


@triton.jit
def _sloped(slopes, logits, softcap, HAS_SOFTCAP: tl.constexpr):
    """Gradient through the soft cap. A single `return`, because a Triton function has one return type."""
    if HAS_SOFTCAP:
        ratio = logits / (softcap * LOG2E)
        slopes = slopes * (1.0 - ratio * ratio)
    return slopes


@triton.jit
def _attend(
    result, total, top, query, key, value, positions, rows, is_row, first, start, stop, limit,
    key_stride, value_stride, key_head, value_head, scale, softcap, window,
    IS_DIAGONAL: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows over keys `first + start` to `first + stop`; keys from `first + limit` on do not exist."""
    columns, value_columns = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    for block in range(start, stop, KEYS):
        keys = first + block + tl.arange(0, KEYS)
        is_key = keys < first + limit
        k = _rows(key, keys, key_head, key_stride, columns, is_key, DIM, DIM_PAD, MASKED)
        logits = _logits(tl.dot(query, tl.trans(k), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            sees = is_key[None, :] & is_row[:, None]
            if IS_DIAGONAL:
                sees = sees & (rows[:, None] >= keys[None, :])
            if HAS_WINDOW:
                row_places = tl.load(positions + rows, mask=is_row, other=0)
                key_places = tl.load(positions + keys, mask=is_key, other=0)
                sees = sees & (row_places[:, None] - key_places[None, :] < window)
            logits = tl.where(sees, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.maximum(higher, -1e30)
        kept = tl.exp2(top - base)
        shares = tl.exp2(logits - base[:, None])
        total = total * kept + tl.sum(shares, axis=1)
        v = _rows(value, keys, value_head, value_stride, value_columns, is_key, VALUE_DIM, VALUE_PAD, MASKED)
        result = tl.dot(shares.to(v.dtype), v, result * kept[:, None], input_precision=PRECISION)
        top = higher
    return result, total, top


@triton.jit
def forward_kernel(
    query, key, value, sinks, tiles, positions, out, sums, num_rows,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head."""
    tile, head = tl.program_id(1), tl.program_id(0)
    line = tiles + tile * 5
    first_row, count, own, prefix, prefix_length = (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4)
    )  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < first_row + count
    key_head, value_head = (head // GROUP) * key_head_stride, (head // GROUP) * value_head_stride
    q = _rows(query, rows, head * query_head_stride, query_stride, tl.arange(0, DIM_PAD), is_row, DIM, DIM_PAD, True)
    result = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    if HAS_SINKS:
        top = tl.zeros([ROWS], dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full([ROWS], 1.0, dtype=tl.float32)
    else:
        top = tl.full([ROWS], -float("inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
    before = first_row - own
    # Keys of the prefix: whole blocks need no mask except for a window.
    skipped = 0
    own_skipped = 0
    if HAS_WINDOW:
        lowest = prefix_length + before - window + 1
        skipped = tl.maximum(0, tl.minimum(lowest, prefix_length)) // KEYS * KEYS
        own_skipped = tl.maximum(0, tl.minimum(lowest - prefix_length, before)) // KEYS * KEYS
    whole = tl.maximum(skipped, prefix_length // KEYS * KEYS)
    result, total, top = _attend(
        result, total, top, q, key, value, positions, rows, is_row, prefix, skipped, whole, prefix_length,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result, total, top = _attend(
        result, total, top, q, key, value, positions, rows, is_row, prefix, whole, prefix_length, prefix_length,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result, total, top = _attend(
        result, total, top, q, key, value, positions, rows, is_row, own, own_skipped, before, before,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result, total, top = _attend(
        result, total, top, q, key, value, positions, rows, is_row, own, before, before + count, before + count,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        True, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    total = tl.where(is_row, total, 1.0)
    columns = tl.arange(0, VALUE_PAD)
    at = out + (rows.to(tl.int64)[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
    result = result / total[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (columns[None, :] < VALUE_DIM))
    tl.store(sums + head.to(tl.int64) * num_rows + rows, top + tl.log2(total), mask=is_row)


@triton.jit
def delta_kernel(
    gradient, out, deltas, num_rows, gradient_stride, gradient_head_stride,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Σ gradient · out of each row and head."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, VALUE_PAD)
    mask = (rows < num_rows)[:, None] & (columns[None, :] < VALUE_DIM)
    at = gradient + rows[:, None] * gradient_stride + head * gradient_head_stride + columns[None, :]
    given = tl.load(at, mask=mask, other=0.0)
    held = tl.load(out + (rows[:, None] * HEADS + head) * VALUE_DIM + columns[None, :], mask=mask, other=0.0)
    tl.store(deltas + head * num_rows + rows, tl.sum(given.to(tl.float32) * held.to(tl.float32), axis=1), mask=rows < num_rows)


@triton.jit
def _to_query(
    result, query, given, sums, deltas, key, value, positions, rows, is_row, first, start, stop, limit,
    key_stride, value_stride, key_head, value_head, scale, softcap, window,
    IS_DIAGONAL: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns, value_columns = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    for block in range(start, stop, KEYS):
        keys = first + block + tl.arange(0, KEYS)
        is_key = keys < first + limit
        k = _rows(key, keys, key_head, key_stride, columns, is_key, DIM, DIM_PAD, MASKED)
        v = _rows(value, keys, value_head, value_stride, value_columns, is_key, VALUE_DIM, VALUE_PAD, MASKED)
        logits = _logits(tl.dot(query, tl.trans(k), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        shares = tl.exp2(logits - sums[:, None])
        if MASKED:
            sees = is_key[None, :] & is_row[:, None]
            if IS_DIAGONAL:
                sees = sees & (rows[:, None] >= keys[None, :])
            if HAS_WINDOW:
                row_places = tl.load(positions + rows, mask=is_row, other=0)
                key_places = tl.load(positions + keys, mask=is_key, other=0)
                sees = sees & (row_places[:, None] - key_places[None, :] < window)
            shares = tl.where(sees, shares, 0.0)
        slopes = tl.dot(given, tl.trans(v), input_precision=PRECISION) - deltas[:, None]
        slopes = _sloped(shares * slopes, logits, softcap, HAS_SOFTCAP)
        result = tl.dot(slopes.to(k.dtype), k, result, input_precision=PRECISION)
    return result


@triton.jit
def query_kernel(
    query, key, value, gradient, sums, deltas, tiles, positions, to_query, num_rows,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    gradient_stride, gradient_head_stride, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of queries of one head."""
    tile, head = tl.program_id(1), tl.program_id(0)
    line = tiles + tile * 5
    first_row, count, own, prefix, prefix_length = (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4)
    )  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < first_row + count
    key_head, value_head = (head // GROUP) * key_head_stride, (head // GROUP) * value_head_stride
    q = _rows(query, rows, head * query_head_stride, query_stride, tl.arange(0, DIM_PAD), is_row, DIM, DIM_PAD, True)
    value_columns = tl.arange(0, VALUE_PAD)
    given = _rows(
        gradient, rows, head * gradient_head_stride, gradient_stride, value_columns, is_row, VALUE_DIM, VALUE_PAD, True
    )
    own_sums = tl.load(sums + head.to(tl.int64) * num_rows + rows, mask=is_row, other=0.0)
    own_deltas = tl.load(deltas + head.to(tl.int64) * num_rows + rows, mask=is_row, other=0.0)
    result = tl.zeros([ROWS, DIM_PAD], dtype=tl.float32)
    before = first_row - own
    skipped = 0
    own_skipped = 0
    if HAS_WINDOW:
        lowest = prefix_length + before - window + 1
        skipped = tl.maximum(0, tl.minimum(lowest, prefix_length)) // KEYS * KEYS
        own_skipped = tl.maximum(0, tl.minimum(lowest - prefix_length, before)) // KEYS * KEYS
    whole = tl.maximum(skipped, prefix_length // KEYS * KEYS)
    result = _to_query(
        result, q, given, own_sums, own_deltas, key, value, positions, rows, is_row, prefix, skipped, whole, prefix_length,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result = _to_query(
        result, q, given, own_sums, own_deltas, key, value, positions, rows, is_row, prefix, whole, prefix_length,
        prefix_length,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result = _to_query(
        result, q, given, own_sums, own_deltas, key, value, positions, rows, is_row, own, own_skipped, before, before,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    result = _to_query(
        result, q, given, own_sums, own_deltas, key, value, positions, rows, is_row, own, before, before + count,
        before + count,
        key_stride, value_stride, key_head, value_head, scale, softcap, window,
        True, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, KEYS, PRECISION,
    )  # fmt: skip
    columns = tl.arange(0, DIM_PAD)
    at = to_query + (rows.to(tl.int64)[:, None] * HEADS + head) * DIM + columns[None, :]
    tl.store(at, (result * scale).to(to_query.dtype.element_ty), mask=is_row[:, None] & (columns[None, :] < DIM))


@triton.jit
def _to_keys(
    to_key, to_value, k, v, query, gradient, sums, deltas, positions, keys, is_key, start, stop,
    query_stride, gradient_stride, query_head, gradient_head, scale, softcap, window,
    IS_DIAGONAL: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What rows `start` to `stop` of one head add to the gradients of the keys they see."""
    columns, value_columns = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        is_row = rows < stop
        q = _rows(query, rows, query_head, query_stride, columns, is_row, DIM, DIM_PAD, MASKED)
        given = _rows(gradient, rows, gradient_head, gradient_stride, value_columns, is_row, VALUE_DIM, VALUE_PAD, MASKED)
        if MASKED:
            row_sums = tl.load(sums + rows, mask=is_row, other=0.0)
            row_deltas = tl.load(deltas + rows, mask=is_row, other=0.0)
        else:
            row_sums = tl.load(sums + rows)
            row_deltas = tl.load(deltas + rows)
        logits = _logits(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        shares = tl.exp2(logits - row_sums[None, :])
        if MASKED:
            sees = is_key[:, None] & is_row[None, :]
            if IS_DIAGONAL:
                sees = sees & (rows[None, :] >= keys[:, None])
            if HAS_WINDOW:
                row_places = tl.load(positions + rows, mask=is_row, other=0)
                key_places = tl.load(positions + keys, mask=is_key, other=0)
                sees = sees & (row_places[None, :] - key_places[:, None] < window)
            shares = tl.where(sees, shares, 0.0)
        to_value = tl.dot(shares.to(given.dtype), given, to_value, input_precision=PRECISION)
        slopes = tl.dot(v, tl.trans(given), input_precision=PRECISION) - row_deltas[None, :]
        slopes = _sloped(shares * slopes, logits, softcap, HAS_SOFTCAP)
        to_key = tl.dot(slopes.to(q.dtype), q, to_key, input_precision=PRECISION)
    return to_key, to_value


@triton.jit
def key_kernel(
    query, key, value, gradient, sums, deltas, tiles, positions, to_key, to_value, num_rows,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    gradient_stride, gradient_head_stride, scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of one tile of keys and values of one head, summed over the query heads that read it."""
    tile, head = tl.program_id(1), tl.program_id(0)
    line = tiles + tile * 5
    first_key, count, own_stop, upper, upper_stop = (
        tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3), tl.load(line + 4)
    )  # fmt: skip
    keys = first_key + tl.arange(0, KEYS)
    is_key = keys < first_key + count
    columns, value_columns = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    k = _rows(key, keys, head * key_head_stride, key_stride, columns, is_key, DIM, DIM_PAD, True)
    v = _rows(value, keys, head * value_head_stride, value_stride, value_columns, is_key, VALUE_DIM, VALUE_PAD, True)
    of_key = tl.zeros([KEYS, DIM_PAD], dtype=tl.float32)
    of_value = tl.zeros([KEYS, VALUE_PAD], dtype=tl.float32)
    if HAS_WINDOW:
        own_stop = tl.minimum(own_stop, first_key + KEYS + window)
    below = tl.minimum(own_stop, first_key + KEYS)
    whole = below + tl.maximum(own_stop - below, 0) // ROWS * ROWS
    upper_whole = upper + (upper_stop - upper) // ROWS * ROWS
    for member in range(GROUP):
        reader = head * GROUP + member
        q_head, g_head = reader * query_head_stride, reader * gradient_head_stride
        own_sums, own_deltas = sums + reader.to(tl.int64) * num_rows, deltas + reader.to(tl.int64) * num_rows
        of_key, of_value = _to_keys(
            of_key, of_value, k, v, query, gradient, own_sums, own_deltas, positions, keys, is_key, first_key, below,
            query_stride, gradient_stride, q_head, g_head, scale, softcap, window,
            True, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, ROWS, PRECISION,
        )  # fmt: skip
        of_key, of_value = _to_keys(
            of_key, of_value, k, v, query, gradient, own_sums, own_deltas, positions, keys, is_key, below, whole,
            query_stride, gradient_stride, q_head, g_head, scale, softcap, window,
            False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, ROWS, PRECISION,
        )  # fmt: skip
        of_key, of_value = _to_keys(
            of_key, of_value, k, v, query, gradient, own_sums, own_deltas, positions, keys, is_key, whole, own_stop,
            query_stride, gradient_stride, q_head, g_head, scale, softcap, window,
            False, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, ROWS, PRECISION,
        )  # fmt: skip
        of_key, of_value = _to_keys(
            of_key, of_value, k, v, query, gradient, own_sums, own_deltas, positions, keys, is_key, upper, upper_whole,
            query_stride, gradient_stride, q_head, g_head, scale, softcap, window,
            False, HAS_WINDOW, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, ROWS, PRECISION,
        )  # fmt: skip
        of_key, of_value = _to_keys(
            of_key, of_value, k, v, query, gradient, own_sums, own_deltas, positions, keys, is_key, upper_whole, upper_stop,
            query_stride, gradient_stride, q_head, g_head, scale, softcap, window,
            False, True, HAS_SOFTCAP, HAS_WINDOW, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, ROWS, PRECISION,
        )  # fmt: skip
    lines = keys.to(tl.int64)[:, None] * KV_HEADS + head
    tl.store(
        to_key + lines * DIM + columns[None, :], (of_key * scale).to(to_key.dtype.element_ty),
        mask=is_key[:, None] & (columns[None, :] < DIM),
    )  # fmt: skip
    tl.store(
        to_value + lines * VALUE_DIM + value_columns[None, :], of_value.to(to_value.dtype.element_ty),
        mask=is_key[:, None] & (value_columns[None, :] < VALUE_DIM),
    )  # fmt: skip
