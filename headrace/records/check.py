"""The rules of a rollout, each written once for a single rollout, the tokens of one call, and the columns of many rollouts.

Tokens of many rollouts are concatenated: those of rollout i are `offsets[i]` to `offsets[i + 1]` of each array. Every error is
a `ValueError` that names the rollout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from headrace.records.expert_routing import check_routing
from headrace.records.sampling import InfraAbort, Invalid, Scored, Source
from headrace.records.validate import check_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records.rollout import Rollout
    from headrace.records.validate import Array

TOKEN_ARRAYS: dict[str, type] = {
    "token_ids": np.int32,
    "source": np.int8,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
"""The arrays every rollout has, one value per token."""
SAMPLED = int(Source.SAMPLED)
_LAST_SOURCE = int(max(Source))
_MAX_LOGPROB = 1e-4
"""Rounding may lift a logprob slightly above 0."""


def check_tokens(tokens: Mapping[str, Array], *, ids: Sequence[str], offsets: Array) -> None:
    """Check the values of `TOKEN_ARRAYS`, whose dtypes and lengths are already right."""
    source, loss_mask = tokens["source"].view(np.uint8), tokens["loss_mask"].view(np.uint8)
    is_sampled = source == SAMPLED
    wrong = {
        "source holds a value that is not a Source": source > _LAST_SOURCE,
        "loss_mask is True on a token that was not sampled": loss_mask > is_sampled,
    }
    sampled, others = _wrong_if_sampled(tokens), _wrong_if_not_sampled(tokens)
    for why, is_wrong in [*wrong.items(), *((why, np.where(is_sampled, sampled[why], others[why])) for why in sampled)]:
        _refuse_token(is_wrong, why, ids=ids, offsets=offsets)


def check_sampled(tokens: Mapping[str, Array], *, id: str) -> None:
    """Check the token ids, logprobs and versions that one call appends."""
    for why, is_wrong in _wrong_if_sampled(tokens).items():
        if is_wrong.any():
            raise ValueError(f"rollout {id!r}: {why}")


_TOKEN_IDS = "token_ids holds a negative id"
_VERSIONS = "versions must be ≥ 0 on sampled tokens and -1 elsewhere"
_LOGPROBS = "logprobs must be finite and ≤ 0 on sampled tokens and 0 elsewhere"


def _wrong_if_sampled(tokens: Mapping[str, Array]) -> dict[str, Array]:
    """For each rule, which tokens break it, given that all were sampled."""
    logprobs = tokens["logprobs"]
    is_logprob = (logprobs > -math.inf) & (logprobs <= _MAX_LOGPROB)  # False for NaN
    return {_TOKEN_IDS: tokens["token_ids"] < 0, _VERSIONS: tokens["versions"] < 0, _LOGPROBS: ~is_logprob}


def _wrong_if_not_sampled(tokens: Mapping[str, Array]) -> dict[str, Array]:
    return {_TOKEN_IDS: tokens["token_ids"] < 0, _VERSIONS: tokens["versions"] != -1, _LOGPROBS: tokens["logprobs"] != 0}


def check_calls(rows: Array, starts: Array, stops: Array, *, source: Array, ids: Sequence[str], offsets: Array) -> None:
    """Check that calls are in order, do not overlap, and cover exactly the sampled tokens. `rows[i]` is the rollout of call i,
    in rising order; `starts` and `stops` count from that rollout's first token."""
    previous = np.zeros_like(stops)
    previous[1:] = np.where(rows[1:] == rows[:-1], stops[:-1], 0)
    is_wrong = (starts < previous) | (stops < starts) | (stops > offsets[rows + 1] - offsets[rows])
    if is_wrong.any():
        at = int(is_wrong.argmax())
        span = f"call over tokens {starts[at]} to {stops[at]}"
        raise ValueError(f"rollout {ids[rows[at]]!r}: {span} overlaps another or runs past the end")
    size = len(source) + 1
    steps = np.bincount(offsets[rows] + starts, minlength=size) - np.bincount(offsets[rows] + stops, minlength=size)
    is_covered = np.cumsum(steps[:-1]) > 0
    is_wrong = is_covered != (source == SAMPLED)
    _refuse_token(is_wrong, "calls do not cover exactly the sampled tokens", ids=ids, offsets=offsets)


def _refuse_token(is_wrong: Array, why: str, *, ids: Sequence[str], offsets: Array) -> None:
    if is_wrong.any():
        row = int(np.searchsorted(offsets, is_wrong.argmax(), side="right")) - 1
        raise ValueError(f"rollout {ids[row]!r}: {why}")


def check_optional_fields(rollout: Rollout) -> None:
    """Check the fields that only some rollouts have."""
    try:
        _check_optional_fields(rollout, length=len(rollout))
    except ValueError as error:
        raise ValueError(f"rollout {rollout.id!r}: {error}") from None


def _check_optional_fields(rollout: Rollout, *, length: int) -> None:
    if rollout.media is not None:
        raise ValueError("media is reserved: images and sound are not supported yet")
    if rollout.parent is not None and not 0 <= rollout.parent[1] <= length:
        raise ValueError(f"parent: forked at token {rollout.parent[1]} of {length}")
    if not all(map(math.isfinite, rollout.rewards.values())):
        raise ValueError(f"rewards must be finite, not {rollout.rewards}")
    check_outcome(rollout.outcome)
    for at, _ in rollout.step_rewards:
        if not 0 <= at < length:
            raise ValueError(f"step reward at token {at} of {length}")
    for name, array in rollout.columns.items():
        if array.ndim < 1 or len(array) != length:
            raise ValueError(f"{name} has shape {array.shape} but there are {length} tokens")
    if rollout.expert_routing is not None:
        check_routing(rollout.expert_routing, num_tokens=length)
    if rollout.sampling_mask is not None:
        rollout.sampling_mask.check_covers(length)


def check_outcome(outcome: object) -> None:
    check_kind(outcome, (Scored, Invalid, InfraAbort, type(None)), "outcome")
