"""Prompts with the tokens of their first calls, many at once: what `Rollout.extend` would make of each alone.

Most rollouts have one call, and most short ones end together with others. Joined and checked in columns, each takes a fifth of
the time.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.check import SAMPLED, TOKEN_ARRAYS, check_tokens
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
    sampled: Sequence[tuple[Array, Array, Array]],
    *,
    engine: str,
    reasons: Sequence[FinishReason],
    policies: Sequence[str],
    lineages: Sequence[str],
    **calls: Sequence[Any],
) -> list[Rollout]:
    """Each of the prompts, which have no call yet (`is_prompt`), with the token ids, logprobs and versions that its call
    sampled. `calls` are the other columns of the calls: `sampling`, `started`, `finished`. The rollouts share memory."""
    num, ids = len(prompts), _values(prompts, "id")
    starts, added = list(map(len, _values(prompts, "token_ids"))), [len(token_ids) for token_ids, _, _ in sampled]
    stops = list(map(int.__add__, starts, added))
    source, mask = np.full(max(added), SAMPLED, np.int8), np.ones(max(added), np.bool_)
    new: dict[str, Sequence[Array]] = dict(zip(("token_ids", "logprobs", "versions"), zip(*sampled, strict=True), strict=True))
    new |= {"source": [source[:length] for length in added], "loss_mask": [mask[:length] for length in added]}
    tokens = {name: _alternating(_values(prompts, name), new[name]) for name in TOKEN_ARRAYS}
    offsets = np.array([0, *stops]).cumsum()
    check_tokens(tokens, ids=ids, offsets=offsets)
    calls |= {"start": starts, "stop": stops, "engine": [engine] * num, "finish_reason": reasons}
    spans = list(map(slice, offsets[:-1].tolist(), offsets[1:].tolist()))
    columns: dict[str, Sequence[Any]] = {name: _values(prompts, name) for name in _KEPT}
    columns |= {"calls": list(zip(unchecked_many(Call, calls, num=num))), "finish_reason": reasons}
    for name, array in tokens.items():
        array.flags.writeable = False
        columns[name] = list(map(array.__getitem__, spans))
    columns |= {"policy": policies, "lineage": lineages, "columns": [{} for _ in prompts]}
    return unchecked_many(Rollout, columns | dict.fromkeys(("expert_routing", "sampling_mask"), [None] * num), num=num)


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
