"""Attention over the paged cache; launched, and explained, by `cuda.attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.model import capped


@triton.jit
def _softcapped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logit soft-capping, as in Gemma 2."""
    if HAS_SOFTCAP:
        scores = capped(scores, softcap)
    return scores


@triton.jit
def _read_tile(keys, values, line, at, is_read, head, keys_row, keys_head, values_row, values_head,
               DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Keys and values of one head at positions `at` of a rollout with block table `line`; 0 where not read."""
    dim, value_dim = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    blocks = tl.load(line + at // BLOCK, mask=is_read, other=0).to(tl.int64)
    places = (blocks * BLOCK + at % BLOCK)[:, None]
    is_read = is_read[:, None]
    k = tl.load(keys + places * keys_row + head * keys_head + dim[None, :], mask=is_read & (dim < DIM)[None, :], other=0.0)
    v = tl.load(
        values + places * values_row + head * values_head + value_dim[None, :],
        mask=is_read & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    return k, v


@triton.jit
def decode_kernel(
    query, key, value, keys, values, table, slots, positions, sinks, out, part_out, part_top, part_sum,
    scale, softcap, window, table_width,
    query_row, query_head, key_row, key_head, value_row, value_head, keys_row, keys_head, values_row, values_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row's new token in the query heads of one key head, over one split of its keys."""
    row, head, split = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    member, dim, value_dim = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    is_member, is_dim, is_value = member < GROUP, dim < DIM, value_dim < VALUE_DIM
    heads = head * GROUP + member
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + dim[None, :],
        mask=is_member[:, None] & is_dim[None, :],
        other=0.0,
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0)
    top = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    if split == 0:  # the new token: used from registers, stored to the cache
        new_key = tl.load(key + row * key_row + head * key_head + dim, mask=is_dim, other=0.0)
        new_value = tl.load(value + row * value_row + head * value_head + value_dim, mask=is_value, other=0.0)
        block = tl.load(table + slot * table_width + position // BLOCK).to(tl.int64)
        place = block * BLOCK + position % BLOCK
        stored_key, stored_value = new_key.to(keys.dtype.element_ty), new_value.to(values.dtype.element_ty)
        tl.store(keys + place * keys_row + head * keys_head + dim, stored_key, mask=is_dim)
        tl.store(values + place * values_row + head * values_head + value_dim, stored_value, mask=is_value)
        scores = tl.sum(q.to(tl.float32) * stored_key.to(tl.float32)[None, :], axis=1) * scale
        top = _softcapped(scores, softcap, HAS_SOFTCAP)
        total += 1.0
        result += stored_value.to(tl.float32)[None, :]
    q = q.to(keys.dtype.element_ty)
    begin = first // TILE
    tiles = tl.cdiv(position, TILE) - begin
    share = tl.cdiv(tiles, SPLITS)
    for tile in range(begin + split * share, begin + tl.minimum(tiles, (split + 1) * share)):
        at = tile * TILE + tl.arange(0, TILE)
        is_seen = at < position
        if HAS_WINDOW:
            is_seen = is_seen & (at >= first)
        k, v = _read_tile(keys, values, table + slot * table_width, at, is_seen, head, keys_row, keys_head, values_row,
                          values_head, DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, BLOCK)  # fmt: skip
        scores = _softcapped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_seen[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp(top - higher)
        shares = tl.where(is_seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        total = total * kept + tl.sum(shares, axis=1)
        result = result * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    if SPLITS == 1:
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + heads, mask=is_member, other=0.0).to(tl.float32) - top)
        result = result / total[:, None]
        places = (row * HEADS + heads)[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=is_member[:, None] & is_value[None, :])
    else:
        part = (row * HEADS + heads) * SPLITS + split
        tl.store(part_top + part, top, mask=is_member)
        tl.store(part_sum + part, total, mask=is_member)
        places = part[:, None] * VALUE_DIM + value_dim[None, :]
        tl.store(part_out + places, result, mask=is_member[:, None] & is_value[None, :])


@triton.jit
def combine_kernel(
    part_out, part_top, part_sum, sinks, out,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and head, rescaled to their common maximum."""
    row, head = tl.program_id(0), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS_PAD), tl.arange(0, VALUE_PAD)
    is_split, is_dim = split < SPLITS, dim < VALUE_DIM
    part = (row * HEADS + head) * SPLITS + split
    tops = tl.load(part_top + part, mask=is_split, other=-1e30)
    top = tl.max(tops, axis=0)
    weights = tl.where(is_split, tl.exp(tops - top), 0.0)
    total = tl.sum(weights * tl.load(part_sum + part, mask=is_split, other=0.0), axis=0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    parts = tl.load(part_out + part[:, None] * VALUE_DIM + dim[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(out + (row * HEADS + head) * VALUE_DIM + dim, result.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def write_kernel(
    key, value, keys, values, places,
    key_row, key_head, value_row, value_head, keys_row, keys_head, values_row, values_head,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Write one row's key and value to its place."""
    row = tl.program_id(0)
    place = tl.load(places + row).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim, value_dim = tl.arange(0, DIM_PAD)[None, :], tl.arange(0, VALUE_PAD)[None, :]
    is_key, is_value = (head < KV_HEADS) & (dim < DIM), (head < KV_HEADS) & (value_dim < VALUE_DIM)
    k = tl.load(key + row * key_row + head * key_head + dim, mask=is_key, other=0.0)
    v = tl.load(value + row * value_row + head * value_head + value_dim, mask=is_value, other=0.0)
    tl.store(keys + place * keys_row + head * keys_head + dim, k.to(keys.dtype.element_ty), mask=is_key)
    tl.store(values + place * values_row + head * values_head + value_dim, v.to(values.dtype.element_ty), mask=is_value)


@triton.jit
def prefill_kernel(
    query, keys, values, table, tiles, sinks, out,
    scale, softcap, window, table_width,
    query_row, query_head, keys_row, keys_head, values_row, values_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some tokens of a tile, over all keys the last of them sees. A row is a token in one of the query heads of `kv_head`."""
    kv_head, tile_id, offset = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TOKENS
    slot = tl.load(tiles + tile_id * 4).to(tl.int64)
    first_row = tl.load(tiles + tile_id * 4 + 1) + offset
    count = tl.load(tiles + tile_id * 4 + 2) - offset
    first_position = tl.load(tiles + tile_id * 4 + 3) + offset
    if count <= 0:
        return
    token, member = tl.arange(0, TOKENS * GROUP_PAD) // GROUP_PAD, tl.arange(0, TOKENS * GROUP_PAD) % GROUP_PAD
    head, positions = kv_head * GROUP + member, first_position + token
    is_row, dim, value_dim = (token < count) & (member < GROUP), tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + ((first_row + token) * query_row + head * query_head)[:, None] + dim[None, :],
        mask=is_row[:, None] & (dim < DIM)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    top = tl.full([TOKENS * GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([TOKENS * GROUP_PAD], tl.float32)
    result = tl.zeros([TOKENS * GROUP_PAD, VALUE_PAD], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        total += 1.0
    line, last = table + slot * table_width, first_position + tl.minimum(count, TOKENS)
    begin, seen_by_all = 0, (first_position + 1) // TILE  # tiles that every row sees whole need no mask
    if HAS_WINDOW:
        begin, seen_by_all = tl.maximum(first_position + 1 - window, 0) // TILE, 0
    for tile in range(begin, seen_by_all):
        at = tile * TILE + tl.arange(0, TILE)
        k, v = _read_tile(keys, values, line, at, at < last, kv_head, keys_row, keys_head, values_row, values_head,
                          DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, BLOCK)  # fmt: skip
        scores = _softcapped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, HAS_SOFTCAP)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept, shares = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        total = total * kept + tl.sum(shares, axis=1)
        result = result * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    for tile in range(tl.maximum(begin, seen_by_all), tl.cdiv(last, TILE)):
        at = tile * TILE + tl.arange(0, TILE)
        k, v = _read_tile(keys, values, line, at, at < last, kv_head, keys_row, keys_head, values_row, values_head,
                          DIM, DIM_PAD, VALUE_DIM, VALUE_PAD, BLOCK)  # fmt: skip
        is_seen = at[None, :] <= positions[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (positions[:, None] - at[None, :] < window)
        scores = _softcapped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, HAS_SOFTCAP)
        scores = tl.where(is_seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp(top - higher)
        shares = tl.where(is_seen, tl.exp(scores - higher[:, None]), 0.0)
        total = total * kept + tl.sum(shares, axis=1)
        result = result * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    result = result / tl.maximum(total, 1e-30)[:, None]
    places = ((first_row + token) * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :])
