"""Hypothesis strategies for valid records of the contract, and the settings property tests run under.

The shape of a record (turns, calls, lengths, which optional fields it has) is drawn, so that it shrinks; the numbers in
its arrays come from a generator seeded with one draw, so that making one is quick.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings, strategies as st

from headrace.records import (
    Batch,
    Call,
    Episode,
    FinishReason,
    InfraAbort,
    Invalid,
    Part,
    Rollout,
    Sampling,
    SamplingMask,
    Scored,
    Source,
    TensorInfo,
    WeightUpdate,
)

# No deadline: the machines tests run on are shared, and a slow example is not a wrong one.
quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

names = st.text(st.characters(categories=["L", "N", "S"], exclude_characters="$"), min_size=1, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 2e9)
seeds = st.integers(0, 2**32 - 1)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | numbers | st.text(max_size=6)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
tasks = st.dictionaries(names, plain, max_size=3)
outcomes = st.one_of(
    st.none(), st.builds(Scored, numbers), st.builds(Invalid, st.text(max_size=6)), st.builds(InfraAbort, st.text(max_size=6))
)
array_dtypes = st.sampled_from(["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])


@st.composite
def arrays(draw: st.DrawFn, *, length: int | None = None) -> np.ndarray:
    """Any array that travels, NaNs included; its first dimension is `length` where that is given."""
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    if length is not None:
        shape = [length, *shape]
    dtype = np.dtype(draw(array_dtypes))
    random = np.random.default_rng(draw(seeds))
    if dtype.kind == "b":
        return random.integers(0, 2, size=shape).astype(bool)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(random.bytes(size), dtype=dtype).reshape(shape)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    max_tokens = draw(st.integers(1, 64))
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=2))),
        stop=tuple(draw(st.just([]) | st.lists(st.text(min_size=1, max_size=4), max_size=2))),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@st.composite
def rollouts(draw: st.DrawFn, *, id: str | None = None, group: str | None = None, parent: str | None = None) -> Rollout:
    """Several turns of template, sampled (in one call or resumed in more) and tool tokens, with optional extras."""
    random = np.random.default_rng(draw(seeds))
    kinds: list[Source] = [Source.PROMPT] * draw(st.integers(0, 4))
    calls: list[Call] = []
    for _ in range(draw(st.integers(0, 3))):
        kinds += [Source.TEMPLATE] * draw(st.integers(0, 2))
        for part in reversed(range(draw(st.integers(1, 2)))):
            start = len(kinds)
            kinds += [Source.SAMPLED] * draw(st.integers(0, 4))
            reason = FinishReason.ABORT if part else draw(st.sampled_from(list(FinishReason)))
            calls.append(
                Call(
                    start=start,
                    stop=len(kinds),
                    engine=draw(names),
                    sampling=draw(samplings()),
                    finish_reason=reason,
                    started=draw(times),
                    finished=draw(times),
                )
            )
        kinds += [Source.TOOL] * draw(st.integers(0, 2))
    length = len(kinds)
    source = np.array(kinds, dtype=np.int8)
    sampled = source == Source.SAMPLED
    return Rollout(
        id=id if id is not None else draw(names),
        episode=draw(names),
        group=group if group is not None else draw(names),
        index=draw(st.integers(0, 1000)),
        policy=draw(names),
        lineage=draw(st.sampled_from(["", "a1b2"])),
        parent=None if parent is None else (parent, draw(st.integers(0, length))),
        token_ids=random.integers(0, 2**31, size=length, dtype=np.int64).astype(np.int32),
        source=source,
        loss_mask=sampled & random.integers(0, 2, size=length).astype(bool),
        logprobs=np.where(sampled, -random.exponential(size=length), 0).astype(np.float32),
        versions=np.where(sampled, 7 + np.cumsum(random.integers(0, 2, size=length)), -1).astype(np.int32),
        calls=tuple(calls),
        finish_reason=calls[-1].finish_reason if calls else None,
        expert_routing=draw(st.none() | _routing(length)),
        sampling_mask=_mask(random, calls, length),
        rewards=draw(st.dictionaries(names, numbers, max_size=2)),
        step_rewards=_step_rewards(draw, length),
        columns=draw(st.dictionaries(names, arrays(length=length), max_size=2)),
        outcome=draw(outcomes),
    )


@st.composite
def _routing(draw: st.DrawFn, length: int) -> np.ndarray:
    shape, is_wide = (length, draw(st.integers(0, 2)), draw(st.integers(1, 2))), draw(st.booleans())
    routing = np.random.default_rng(draw(seeds)).integers(0, 100, size=shape).astype(np.int16 if is_wide else np.uint8)
    routing[-1:] = -1 if is_wide else 255
    return routing


def _step_rewards(draw: st.DrawFn, length: int) -> tuple[tuple[int, float], ...]:
    if not length:
        return ()
    return tuple(draw(st.lists(st.tuples(st.integers(0, length - 1), numbers), max_size=2)))


def _mask(random: np.random.Generator, calls: list[Call], length: int) -> SamplingMask | None:
    """Rows for the tokens that were drawn from a part of the vocabulary; None where none was."""
    rows = [np.zeros(0, dtype=np.int32)] * length
    for call in calls:
        if call.sampling.is_truncated:
            for index in range(call.start, call.stop):
                rows[index] = random.integers(0, 1000, size=random.integers(1, 4)).astype(np.int32)
    return SamplingMask.from_rows(rows) if any(len(row) for row in rows) else None


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """None, one, or a rollout and its forks."""
    group = draw(names)
    members = []
    for number in range(draw(st.integers(0, 3))):
        members.append(draw(rollouts(id=f"r{number}", group=group, parent="r0" if number else None)))
    return Episode(
        id=draw(names),
        group=group,
        task=draw(tasks),
        rollouts=tuple(members),
        environment=draw(names),
        started=draw(times),
        finished=draw(times),
        attempts=draw(st.integers(1, 3)),
        outcome=draw(outcomes),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    members = draw(st.lists(rollouts(), max_size=3))
    random = np.random.default_rng(draw(seeds))
    constants = st.dictionaries(names, numbers, max_size=2)
    return Batch(
        rollouts=tuple(members),
        advantages=tuple(random.normal(size=len(rollout)).astype(np.float32) for rollout in members),
        weights=tuple(random.uniform(size=len(rollout)).astype(np.float32) for rollout in members),
        loss=draw(st.sampled_from(["grpo", "my.module:loss"])),
        constants=draw(constants),
        corrections=draw(st.dictionaries(st.sampled_from(["tis", "opsm", "m2po"]), constants)),
        kl=draw(st.sampled_from(["none", "k1", "k3"])),
        kl_weight=draw(st.floats(0, 2)),
        version=draw(st.integers(0, 1000)),
    )


@st.composite
def weight_updates(draw: st.DrawFn) -> WeightUpdate:
    payload = draw(st.sampled_from(["full", "adapter", "delta"]))
    version = draw(st.integers(1, 10**6))
    tensor = st.builds(
        TensorInfo,
        name=names,
        shape=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        num_bytes=st.integers(0, 2**40),
        checksum=st.integers(0, 2**64 - 1),
    )
    part = st.builds(
        Part,
        transport=names,
        key=names,
        place=tasks,
        num_bytes=st.integers(0, 2**40),
        ranges=st.lists(
            st.tuples(names, st.integers(0, 9), st.integers(10, 10**9)), min_size=1, max_size=3, unique_by=lambda each: each[0]
        ).map(tuple),
    )
    return WeightUpdate(
        policy=draw(names),
        lineage=draw(names),
        version=version,
        base_version=draw(st.integers(0, version - 1)) if payload == "delta" else None,
        payload=payload,
        adapter=draw(tasks) if payload == "adapter" else None,
        manifest=tuple(draw(st.lists(tensor, max_size=3))),
        parts=tuple(draw(st.lists(part, min_size=2, max_size=3))),
    )


small_records = st.one_of(weight_updates(), samplings(), outcomes)
"""What travels field by field; rollouts, episodes and batches travel as columns."""
