"""Sampling tokens; launched, and explained, by `cuda.sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.model import capped


@triton.jit
def _uniform(seed, position):
    """The random number in [0, 1) of (request seed, token position), as `native.sampling.uniform` gives it."""
    state = seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _scaled(logits, temperature, divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr,
            HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """The model's own scaling of logits, then temperature (0 is greedy and leaves them)."""
    x = logits.to(tl.float32)
    if HAS_DIVISOR:
        x = x / divisor
    if HAS_FACTOR:
        x = x * factor
    if HAS_SOFTCAP:
        x = tl.where(x == float("-inf"), x, capped(x, softcap))  # forbidden tokens stay at -inf
    return x / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def chunk_kernel(
    logits, slots, sampling, tops, sums, bests, moments, vocabulary, logits_row,
    divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """One row's maximum, sum of exponentials and best token in one chunk of the vocabulary; with entropies, `moments` gets the
    sum of each exponential times its exponent."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(sampling + tl.load(slots + row).to(tl.int64) * 4)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * logits_row + at, mask=at < vocabulary, other=float("-inf"))
    x = _scaled(x, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
    x = tl.where(at < vocabulary, x, float("-inf"))
    known = tl.where(x == x, x, float("-inf"))  # a NaN shows in the sum; max of NaN is undefined
    top = tl.max(known, axis=0)
    shifted = tl.where(x == float("-inf"), 0.0, tl.exp(x - tl.maximum(top, -1e30)))
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(shifted, axis=0))
    tl.store(bests + row * CHUNKS + chunk, tl.argmax(known, axis=0) + chunk * CHUNK)
    if HAS_ENTROPY:
        exponents = tl.where(x == float("-inf"), 0.0, x - tl.maximum(top, -1e30))  # 0 · -inf is NaN
        tl.store(moments + row * CHUNKS + chunk, tl.sum(shifted * exponents, axis=0))


@triton.jit
def sample_kernel(
    logits, slots, sampling, seeds, lengths, limits, alive, tokens, stops, tops, sums, bests, moments,
    out_tokens, out_logprobs, out_entropies, vocabulary, logits_row, num_stops,
    divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr, STOPS_PAD: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """One row's token (the chunk its random number falls into, then the token in it), and its slot's new state."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(sampling + slot * 4)
    length = tl.load(lengths + slot)
    number = _uniform(tl.load(seeds + slot), length)
    chunk = tl.arange(0, CHUNKS_PAD)
    is_chunk = chunk < CHUNKS
    top_of = tl.load(tops + row * CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
    top = tl.max(top_of, axis=0)
    weights = tl.load(sums + row * CHUNKS + chunk, mask=is_chunk, other=0.0).to(tl.float64)
    gaps = tl.maximum(top_of, -1e30) - tl.maximum(top, -1e30)
    weights = weights * tl.exp(gaps).to(tl.float64)
    total = tl.sum(weights, axis=0)
    reached = tl.cumsum(weights, axis=0)
    goal = number * total
    last = tl.max(tl.where(weights > 0, chunk, 0), axis=0)
    chosen = tl.minimum(tl.sum((reached <= goal).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(chunk < chosen, weights, 0.0), axis=0)
    at = chosen * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * logits_row + at, mask=at < vocabulary, other=float("-inf"))
    x = _scaled(x, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
    x = tl.where(at < vocabulary, x, float("-inf"))
    shares = tl.where(x == float("-inf"), 0.0, tl.exp(x - top)).to(tl.float64)
    inside = tl.cumsum(shares, axis=0) + before
    furthest = tl.max(tl.where(shares > 0, tl.arange(0, CHUNK), 0), axis=0)
    place = tl.minimum(tl.sum((inside <= goal).to(tl.int32), axis=0), furthest)
    sampled = chosen * CHUNK + place
    logit = tl.sum(tl.where(tl.arange(0, CHUNK) == place, x, 0.0), axis=0)
    logprob = logit - top - tl.log(total).to(tl.float32)
    if temperature == 0:
        best_chunk = tl.argmax(top_of, axis=0)
        sampled = tl.load(bests + row * CHUNKS + best_chunk)
        logprob = tl.where(total > 0, 0.0, float("nan"))
    # The slot's new state
    is_alive = tl.load(alive + slot) != 0
    stop = tl.arange(0, STOPS_PAD)
    stop_ids = tl.load(stops + slot * num_stops + stop, mask=stop < num_stops, other=-1)
    is_stop = tl.sum((stop_ids == sampled).to(tl.int32), axis=0) > 0
    goes_on = is_alive & (is_stop == 0) & (length + 1 < tl.load(limits + slot)) & (logprob == logprob)
    if is_alive:
        tl.store(tokens + slot, sampled)
        tl.store(lengths + slot, length + 1)
        tl.store(alive + slot, goes_on.to(tl.int32))
    tl.store(out_tokens + row, tl.where(is_alive, sampled, -1))
    tl.store(out_logprobs + row, logprob)
    if HAS_ENTROPY:  # log Σ exp(x) - Σ p x, with x relative to the row's maximum
        moment = tl.load(moments + row * CHUNKS + chunk, mask=is_chunk, other=0.0).to(tl.float64) * tl.exp(gaps).to(tl.float64)
        entropy = tl.log(total) - tl.sum(moment + weights * gaps.to(tl.float64), axis=0) / total
        tl.store(out_entropies + row, tl.where(temperature == 0, 0.0, entropy).to(tl.float32))


@triton.jit
def _ordered(x):
    """Integers that sort like the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _read(line, at, vocabulary, temperature, divisor, factor, softcap,
          HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # fmt: skip
    """A row's scaled logits; -inf past the vocabulary."""
    x = tl.load(line + at, mask=at < vocabulary, other=float("-inf"))
    x = _scaled(x, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
    return tl.where(at < vocabulary, x, float("-inf"))


@triton.jit
def _weight(line, least, last, is_by_rank, top, vocabulary, temperature, divisor, factor, softcap,
            HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Number of tokens up to (least, last) in the order, or their unnormalised probability."""
    weight = tl.zeros([], tl.float64)
    for start in range(0, vocabulary, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = _read(line, at, vocabulary, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
        order = _ordered(x)
        is_counted = ((order > least) | ((order == least) & (at <= last))) & (x > float("-inf"))
        each = tl.where(is_by_rank, 1.0, tl.exp(x - top))
        weight += tl.sum(tl.where(is_counted, each, 0.0).to(tl.float64), axis=0)
    return weight


@triton.jit
def _shorten(line, goal, is_by_rank, least, last, top, vocabulary, temperature, divisor, factor, softcap,
             HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """The first token in the order to reach the goal, at most (least, last): bisects floats for its logit, then the ids."""
    low, high = least, _ordered(top)
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)
        weight = _weight(line, middle, -1, is_by_rank, top, vocabulary, temperature, divisor, factor, softcap,
                         HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP, CHUNK)  # fmt: skip
        is_less = weight < goal
        high = tl.where(is_less, middle, high)
        low = tl.where(is_less, low, middle + 1)
    first = tl.zeros([], tl.int32)
    final = tl.where(low == least, last, vocabulary - 1)
    while first < final:
        middle = (first + final) // 2
        weight = _weight(line, low, middle, is_by_rank, top, vocabulary, temperature, divisor, factor, softcap,
                         HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP, CHUNK)  # fmt: skip
        is_reached = weight >= goal
        final = tl.where(is_reached, middle, final)
        first = tl.where(is_reached, first, middle + 1)
    return low, first


@triton.jit
def restrict_kernel(
    logits, allowed, slots, sampling, lengths, floors, stops, vocabulary, logits_row, num_stops,
    divisor, factor, softcap, HAS_DIVISOR: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One row: sets what it may not sample to -inf, and `allowed` for the rest."""
    row = tl.program_id(0).to(tl.int64)
    line, slot = logits + row * logits_row, tl.load(slots + row).to(tl.int64)
    temperature, top_k = tl.load(sampling + slot * 4), tl.load(sampling + slot * 4 + 1)
    top_p, min_p = tl.load(sampling + slot * 4 + 2), tl.load(sampling + slot * 4 + 3)
    if tl.load(lengths + slot) < tl.load(floors + slot):  # no stop token yet
        for stop in range(num_stops):
            stop_id = tl.load(stops + slot * num_stops + stop)
            if (stop_id >= 0) & (stop_id < vocabulary):  # a tokenizer may have more ids than the head
                tl.store(line + stop_id, float("-inf"))
        tl.debug_barrier()
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = _read(line, at, vocabulary, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
        top = tl.maximum(top, tl.max(tl.where(x == x, x, float("-inf")), axis=0))
    # The order is (logit falling, id rising). Each cut keeps a prefix of it, which ends at (least, last).
    least, last = tl.full([], -2147483647, tl.int32), tl.zeros([], tl.int32) + vocabulary - 1
    is_random = temperature > 0
    if is_random & (top_k > 0):
        least, last = _shorten(line, top_k.to(tl.float64), True, least, last, top, vocabulary, temperature, divisor, factor,
                               softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP, CHUNK)  # fmt: skip
    if is_random & (top_p < 1):
        kept = _weight(line, least, last, False, top, vocabulary, temperature, divisor, factor, softcap,
                       HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP, CHUNK)  # fmt: skip
        least, last = _shorten(line, kept * top_p.to(tl.float64), False, least, last, top, vocabulary, temperature, divisor,
                               factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP, CHUNK)  # fmt: skip
    lowest = tl.where(is_random & (min_p > 0), tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    for start in range(0, vocabulary, CHUNK):
        at = start + tl.arange(0, CHUNK)
        raw = tl.load(line + at, mask=at < vocabulary, other=float("-inf"))
        x = _scaled(raw, temperature, divisor, factor, softcap, HAS_DIVISOR, HAS_FACTOR, HAS_SOFTCAP)
        order = _ordered(x)
        is_kept = (order > least) | ((order == least) & (at <= last))
        is_kept = is_kept & (x - top >= lowest) & (raw > float("-inf"))
        is_kept = is_kept | ((raw < float("inf")) == 0)  # NaN and infinity are kept: sampling ends a row that has them
        tl.store(allowed + row * vocabulary + at, is_kept, mask=at < vocabulary)
        tl.store(line + at, tl.where(is_kept, raw, float("-inf")), mask=at < vocabulary)
