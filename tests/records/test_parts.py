"""Of a rollout only what was added travels, and joins the rest at the other end."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.request import append_call
from headrace.records import Call, FinishReason, Rollout, Sampling, pack_rollouts, unpack_rollouts


def generated(rollout: Rollout, turn: int, *, is_masked: bool) -> Rollout:
    start, how = len(rollout), {"sampling": Sampling(max_tokens=4), "finish_reason": FinishReason.LENGTH}
    return append_call(
        rollout,
        Call(start=start, stop=start + 4, engine="engine-0", started=0.0, finished=1.0, **how),
        token_ids=np.arange(4, dtype=np.int32) + turn,
        logprobs=np.full(4, -1.0 - turn, dtype=np.float32),
        versions=np.full(4, turn, dtype=np.int32),
        masks=[np.arange(turn + 1 + place, dtype=np.int32) for place in range(4)] if is_masked else (),
        entropies=np.full(4, 0.5 + turn, dtype=np.float32),
        policy="policy",
        lineage="life",
    )


@pytest.mark.parametrize("masked", [(), (1,), (0, 2)], ids=str)
def test_what_was_added_since_joins_the_rest(masked: tuple[int, ...]) -> None:
    """After a call, where the other end has all before it, and after a reply, where it has all up to the call's end."""
    rollout = Rollout.from_prompt([5, 6, 7], id="r").append([8]).forked(3, id="fork")
    for turn in range(3):
        before, rollout = rollout, generated(rollout, turn, is_masked=turn in masked)
        (part,) = unpack_rollouts(pack_rollouts([rollout.since(len(before), num_calls=len(before.calls))]))
        assert len(part) == 4 and before.joined(part) == rollout
        longer = rollout.append([8, 9])
        (part,) = unpack_rollouts(pack_rollouts([longer.since(len(rollout), num_calls=len(rollout.calls))]))
        assert len(part) == 2 and rollout.joined(part) == longer
        rollout = longer
    assert rollout.since(0, num_calls=0) is rollout and rollout.parent == ("r", 3)


def test_a_call_that_sampled_nothing_travels_once_and_the_label_of_a_resumed_run_with_it() -> None:
    """Aborted before its first token, then resumed under another lineage, where the other end still has the old one."""
    given, how = Rollout.from_prompt([5, 6, 7], id="r"), {"engine": "engine-0", "started": 0.0, "finished": 1.0}
    empty = Call(start=3, stop=3, sampling=Sampling(max_tokens=4), finish_reason=FinishReason.ABORT, **how)
    kinds = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
    held = append_call(given, empty, **{name: np.zeros(0, kind) for name, kind in kinds.items()}, policy="p", lineage="old")
    resumed = held.replace(lineage="new")
    joined = held.joined(resumed.since(3, num_calls=len(resumed.calls)))
    assert joined.calls == (empty,) and joined.lineage == "new"
    done = generated(joined, 0, is_masked=False)
    assert len(resumed.joined(done.since(3, num_calls=len(joined.calls))).calls) == 2
