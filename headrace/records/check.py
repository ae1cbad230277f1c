"""The rules of a rollout, each written once: for a new rollout, for the tokens that a call adds, and for many rollouts at once,
whose tokens are concatenated. Those of rollout i are then `offsets[i]` to `offsets[i + 1]` of each array. Every error is a
`ValueError` that names the rollout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.expert_routing import check_routing
from headrace.records.sampling import Source, check_outcome
from headrace.records.validate import check_kind, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.records.validate import Array

TOKEN_ARRAYS: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "source": np.dtype(np.int8),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}
"""The arrays every rollout has, one value per token."""
OPTIONAL_FIELDS = ("parent", "expert_routing", "sampling_mask", "rewards", "step_rewards", "columns", "outcome")
"""The fields that only some rollouts have."""
_TOKEN_IDS = "token_ids holds a negative id"
_SOURCE = "source holds a value that is not a Source"
_LOSS_MASK = "loss_mask is True on a token that was not sampled"
_VERSIONS = "versions must be ≥ 0 on sampled tokens and -1 elsewhere"
_LOGPROBS = "logprobs must be finite and ≤ 0 on sampled tokens and 0 elsewhere"
SAMPLED, _LAST_SOURCE = int(Source.SAMPLED), int(max(Source))


def check_tokens(tokens: Mapping[str, Array], *, ids: Sequence[str], offsets: Sequence[int] | Array) -> None:
    """Check the values of `TOKEN_ARRAYS`, whose dtypes and lengths are already right. Without `source` and `loss_mask`, all
    tokens were sampled."""
    if _are_right(**tokens):
        return
    logprobs, versions = tokens["logprobs"], tokens["versions"]
    is_logprob = (logprobs > -math.inf) & (logprobs <= 1e-4)  # False for NaN; rounding may lift one slightly above 0
    rules = {_TOKEN_IDS: tokens["token_ids"] >= 0, _VERSIONS: versions >= 0, _LOGPROBS: is_logprob}
    if "source" in tokens:
        is_sampled = tokens["source"] == SAMPLED
        rules[_SOURCE] = tokens["source"].view(np.uint8) <= _LAST_SOURCE
        rules[_LOSS_MASK] = tokens["loss_mask"].view(np.uint8) <= is_sampled
        rules[_VERSIONS] = np.where(is_sampled, rules[_VERSIONS], versions == -1)
        rules[_LOGPROBS] = np.where(is_sampled, rules[_LOGPROBS], logprobs == 0)
    for rule, holds in rules.items():
        _require(holds, rule, ids=ids, offsets=offsets)


def _are_right(
    token_ids: Array, logprobs: Array, versions: Array, source: Array | None = None, loss_mask: Array | None = None
) -> bool:
    """Whether all rules of `check_tokens` hold, in few passes: the least and greatest values decide most of them."""
    least, greatest = np.minimum.reduce, np.maximum.reduce
    is_logprob = least(logprobs, initial=0) > -math.inf and greatest(logprobs, initial=0) <= 1e-4  # False for NaN
    if least(token_ids, initial=0) < 0 or not is_logprob:
        return False
    if source is None or loss_mask is None:
        return bool(least(versions, initial=0) >= 0)
    is_sampled, is_bool = source == SAMPLED, loss_mask.view(np.uint8)
    return bool(
        greatest(source.view(np.uint8), initial=0) <= _LAST_SOURCE
        and least(versions, initial=0) >= -1
        and ((versions >= 0) == is_sampled).all()
        and not (is_bool > is_sampled).any()
        and not ((logprobs != 0) > is_sampled).any()
    )


def check_calls(rows: Array, starts: Array, stops: Array, *, source: Array, ids: Sequence[str], offsets: Array) -> None:
    """Check that calls are in order, do not overlap, and cover exactly the sampled tokens. `rows[i]` is the rollout of call i,
    in rising order; `starts` and `stops` count from that rollout's first token."""
    is_wrong = (starts < 0) | (stops < starts) | (stops > offsets[rows + 1] - offsets[rows])
    is_wrong[1:] |= (starts[1:] < stops[:-1]) & (rows[1:] == rows[:-1])
    if is_wrong.any():
        at = int(is_wrong.argmax())
        span = f"call over tokens {starts[at]} to {stops[at]}"
        raise ValueError(f"rollout {ids[rows[at]]!r}: {span} overlaps another or runs past the end")
    is_sampled, first = source == SAMPLED, offsets[rows]
    spans = zip((starts + first).tolist(), (stops + first).tolist(), strict=True)
    num_covered = sum(np.count_nonzero(is_sampled[start:stop]) for start, stop in spans)
    if num_covered == int((stops - starts).sum()) == np.count_nonzero(is_sampled):
        return
    edges = np.zeros(2 * len(rows) + 2, dtype=np.int64)  # tokens outside and inside calls take turns between them
    edges[1:-1:2], edges[2:-1:2], edges[-1] = starts + first, stops + first, len(source)
    is_call = np.zeros(len(edges) - 1, dtype=bool)
    is_call[1::2] = True
    holds = is_call.repeat(edges[1:] - edges[:-1]) == is_sampled
    _require(holds, "calls do not cover exactly the sampled tokens", ids=ids, offsets=offsets)


def _require(holds: Array, rule: str, *, ids: Sequence[str], offsets: Sequence[int] | Array) -> None:
    if not holds.all():
        row = int(np.searchsorted(offsets, holds.argmin(), side="right")) - 1
        raise ValueError(f"rollout {ids[row]!r}: {rule}")


def read_fields(given: Mapping[str, Any], *, id: str, length: int) -> dict[str, Any]:
    """Convert and check some of `OPTIONAL_FIELDS`, of a rollout of `length` tokens."""
    fields = dict(given)
    try:
        if (parent := fields.get("parent")) is not None:
            name, at = fields["parent"] = tuple(parent)
            check_kind(name, str, "parent: id")
            check_kind(at, int, "parent: at")
            if not 0 <= at <= length:
                raise ValueError(f"parent: forked at token {at} of {length}")
        if fields.get("expert_routing") is not None:
            fields["expert_routing"] = routing = frozen(fields["expert_routing"], None, "expert_routing")
            check_routing(routing, num_tokens=length)
        if (mask := fields.get("sampling_mask")) is not None and len(mask.offsets) != length + 1:
            raise ValueError(f"sampling_mask covers {len(mask.offsets) - 1} of {length} tokens")
        if "rewards" in fields:
            fields["rewards"] = rewards = {str(name): float(value) for name, value in fields["rewards"].items()}
            if not all(map(math.isfinite, rewards.values())):
                raise ValueError(f"rewards must be finite, not {rewards}")
        if "step_rewards" in fields:
            fields["step_rewards"] = tuple((int(at), float(value)) for at, value in fields["step_rewards"])
            for at, _ in fields["step_rewards"]:
                if not 0 <= at < length:
                    raise ValueError(f"step reward at token {at} of {length}")
        if "columns" in fields:
            fields["columns"] = {name: frozen(array, None, name) for name, array in fields["columns"].items()}
            for name, array in fields["columns"].items():
                if array.ndim < 1 or len(array) != length:
                    raise ValueError(f"{name} has shape {array.shape} but there are {length} tokens")
        check_outcome(fields.get("outcome"))
    except ValueError as error:
        raise ValueError(f"rollout {id!r}: {error}") from None
    return fields
