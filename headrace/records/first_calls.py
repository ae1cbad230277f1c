"""Prompts with the tokens of their first calls, many at once: what `Rollout.extend` would make of each alone.

Most rollouts have one call, and most short ones end together with others. Joined in columns, each takes a fifth of the time.
"""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.check import SAMPLED, TOKEN_ARRAYS
from headrace.records.rollout import Rollout
from headrace.records.sampling import Call
from headrace.records.validate import unchecked_many

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records.sampling import FinishReason
    from headrace.records.validate import Array

_KEPT = ("id", "episode", "group", "index", "parent", "rewards", "step_rewards", "outcome", "media")


def answered(
    prompts: Sequence[Rollout],
    token_ids: Array,
    logprobs: Array,
    versions: Array,
    *,
    counts: Sequence[int],
    engine: str,
    reasons: Sequence[FinishReason],
    policies: Sequence[str],
    lineages: Sequence[str],
    **calls: Sequence[Any],
) -> list[Rollout]:
    """Each of the prompts, which have no call yet (`is_prompt`), with as many of the sampled tokens as `counts` says. These
    follow each other, and are checked already (`check_tokens`). `calls` are the other columns of the calls: `sampling`,
    `started`, `finished`. The rollouts share memory."""
    num, total = len(prompts), len(token_ids)
    starts = list(map(len, _values(prompts, "token_ids")))
    stops = list(map(int.__add__, starts, counts))
    new = {"token_ids": token_ids, "logprobs": logprobs, "versions": versions}
    new |= {"source": np.full(total, SAMPLED, np.int8), "loss_mask": np.ones(total, np.bool_)}
    parts = _spans(counts)
    tokens = {name: _alternating(_values(prompts, name), list(map(new[name].__getitem__, parts))) for name in TOKEN_ARRAYS}
    calls |= {"start": starts, "stop": stops, "engine": [engine] * num, "finish_reason": reasons}
    spans = _spans(stops)
    columns: dict[str, Sequence[Any]] = {name: _values(prompts, name) for name in _KEPT}
    columns |= {"calls": list(zip(unchecked_many(Call, calls, num=num))), "finish_reason": reasons}
    for name, array in tokens.items():
        array.flags.writeable = False
        columns[name] = list(map(array.__getitem__, spans))
    columns |= {"policy": policies, "lineage": lineages, "columns": [{} for _ in prompts]}
    return unchecked_many(Rollout, columns | dict.fromkeys(("expert_routing", "sampling_mask"), [None] * num), num=num)


def _spans(lengths: Sequence[int]) -> list[slice]:
    """Of parts of these lengths, one behind the other."""
    return [slice(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)]


def _alternating(old: Sequence[Array], new: Sequence[Array]) -> Array:
    parts: list[Any] = [None] * (2 * len(old))
    parts[::2], parts[1::2] = old, new
    joined: Array = np.concatenate(parts)
    return joined


def is_prompt(rollout: Rollout) -> bool:
    """Whether it has only what every rollout has, and no call yet."""
    return not (rollout.calls or rollout.columns) and rollout.expert_routing is None and rollout.sampling_mask is None


def _values(records: Sequence[Any], name: str) -> list[Any]:
    return list(map(attrgetter(name), records))
