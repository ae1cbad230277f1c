"""Appends the tokens of one generate call to a rollout: the only place where sampled tokens enter a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records import SamplingMask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import Array, Call, Rollout

_NOTHING = np.zeros(0, np.int32)


def append_call(
    rollout: Rollout,
    call: Call,
    *,
    token_ids: Array,
    logprobs: Array,
    versions: Array,
    masks: Sequence[Array] = (),
    policy: str,
    lineage: str,
    expert_routing: Array | None = None,
) -> Rollout:
    """The rollout with a call's tokens. `masks` has a row for each of them, or none at all; `expert_routing` has a row for
    every token of the longer rollout, unknown where nothing was recorded.

    A rollout carries one lineage: that of its first sampled token. Say lineage B started from version 40 of lineage A. A's
    tokens up to 40 belong to B's history too; a token of A's version 41 comes from weights that no longer exist, and must not
    pass for one of B's. An engine cannot tell these apart, so a rollout continued in B stays under A's name, and is rejected as
    soon as it holds a token past 40: this may over-reject, never under-reject. A caller that knows the history truncates such a
    rollout before it resumes it, and may rename it (`headrace.partial.surviving_part`).
    """
    if any(each.stop > each.start for each in rollout.calls):
        lineage = rollout.lineage
    mask = rollout.sampling_mask
    if mask is not None or masks:
        old = [_NOTHING] * call.start if mask is None else [mask.row(index) for index in range(call.start)]
        mask = SamplingMask.from_rows([*old, *(masks or [_NOTHING] * len(token_ids))])
    return rollout.extend(
        call,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        policy=policy,
        lineage=lineage,
        sampling_mask=mask,
        expert_routing=expert_routing,
    )
