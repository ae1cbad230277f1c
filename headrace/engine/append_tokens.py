"""One call's tokens appended to a rollout: the one place where what an engine drew becomes part of a record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.records import SamplingMask

if TYPE_CHECKING:
    from headrace.records import Array, Call, Rollout

_NOTHING = np.zeros(0, np.int32)


def lengthen(
    rollout: Rollout,
    call: Call,
    *,
    token_ids: Array,
    logprobs: Array,
    versions: Array,
    masks: list[Array],
    policy: str,
    lineage: str,
    expert_routing: Array | None = None,
) -> Rollout:
    """The rollout with a call's tokens. `masks` has a row for each of them, or none at all.

    `expert_routing` has a row for every token of the lengthened rollout, unknown ones where nothing was recorded.

    A rollout names one life of the trainer, `lineage`, and it is the life its first token was drawn in. Say life B began
    from version 40 of life A. Tokens of A up to 40 are B's history too, so either name would be true of them; a token that
    A's version 41 drew is of weights that no longer exist, and must not pass for one of B's. An engine cannot tell the one
    case from the other. Under A's name a rollout that went on into B is refused as soon as it holds a token past 40, which
    may be one too many and is never one too few. Whoever knows the history cuts a rollout back to it, and may then give it
    B's name, before it is resumed (`headrace.partial.still_history`).
    """
    if any(each.stop > each.start for each in rollout.calls):
        lineage = rollout.lineage
    added = len(token_ids)
    mask = rollout.sampling_mask
    if mask is not None or masks:
        old = [_NOTHING] * call.start if mask is None else [mask.row(index) for index in range(call.start)]
        mask = SamplingMask.from_rows([*old, *(masks or [_NOTHING] * added)])
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
