"""Half-finished rollouts: which can be gone on with, how much of one is still history, and which life it names."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.buffer import Group, Versions
from headrace.engine.request import append_call
from headrace.partial import is_continuation, is_resumable, surviving_part
from headrace.records import Call, Episode, FinishReason, Rollout, Sampling
from headrace.staleness import Rejection
from headrace.sync import Lineage

PROMPT = Rollout.from_prompt([5, 6, 7], id="g1/0", episode="g1/0", group="g1")


def drawn(rollout: Rollout, versions: list[int], *, lineage: str = "A", reason: FinishReason = FinishReason.ABORT) -> Rollout:
    count, start = len(versions), len(rollout)
    call = Call(
        start=start,
        stop=start + count,
        engine="e",
        sampling=Sampling(max_tokens=50),
        finish_reason=reason,
        started=0.0,
        finished=1.0,
    )
    return append_call(
        rollout,
        call,
        token_ids=np.arange(start, start + count, dtype=np.int32),
        logprobs=np.full(count, -0.5, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        masks=[],
        policy="policy",
        lineage=lineage,
    )


def with_reply(rollout: Rollout) -> Rollout:
    """A tool has answered."""
    return rollout.append([9])


def test_only_the_first_call_of_an_episodes_first_rollout_is_gone_on_with():
    partial = drawn(PROMPT, [3, 3])
    assert is_resumable(partial) and is_resumable(drawn(partial, [4]))
    finished = drawn(PROMPT, [3, 3], reason=FinishReason.STOP)
    second_turn = drawn(with_reply(finished), [4, 4])
    assert second_turn.finish_reason is FinishReason.ABORT and not is_resumable(second_turn)
    assert not is_resumable(finished) and not is_resumable(PROMPT) and not is_resumable(drawn(PROMPT, []))
    assert not is_resumable(partial.replace(id="g1/0.1")) and not is_resumable(partial.forked(4, id="g1/0"[:-1] + "1"))


def test_a_partial_rollout_goes_on_from_its_own_prompt_only():
    partial = drawn(PROMPT, [3, 3])
    assert is_continuation(PROMPT, partial)
    for token_ids in ([5, 6], [5, 6, 8], [5, 6, 7, 3], [5, 6, 7, 3, 4]):
        other = Rollout.from_prompt(token_ids, id="g1/0")
        assert not is_continuation(other, partial), token_ids
    assert not is_continuation(partial, drawn(partial, [4]))


def test_what_the_checkpoints_versions_drew_is_this_lifes_too():
    life = Lineage("A").after_restart(4)
    kept = surviving_part(drawn(drawn(PROMPT, [3, 4]), [4]), life)
    assert kept is not None and len(kept) == 6 and kept.lineage == life.id
    further = drawn(kept, [4, 5], lineage=life.id)
    episode = Episode(id="g1/0", group="g1", task={}, rollouts=(further,))
    assert further.lineage == life.id and Rejection(max_lag=2).reason(Group(0, (episode,)), version=5, lineage=life) is None


@pytest.mark.parametrize(("versions", "left"), [([3, 4, 5, 5], 2), ([4, 5], 1), ([5, 6], 0)])
def test_tokens_newer_than_the_checkpoint_are_cut_off(versions, left):
    life = Lineage("A").after_restart(4)
    kept = surviving_part(drawn(PROMPT, versions), life)
    if not left:
        assert kept is None
        return
    assert kept is not None and (len(kept), kept.id, kept.parent) == (3 + left, "g1/0", None)
    assert kept.versions[3:].tolist() == versions[:left] and kept.finish_reason is FinishReason.ABORT
    assert kept.calls[-1].stop == 3 + left and is_resumable(kept)


def test_nothing_is_left_of_a_life_that_is_no_history():
    assert surviving_part(drawn(PROMPT, [0, 1], lineage="B"), Lineage("A").after_restart(4)) is None


def test_a_rollout_names_the_life_of_its_first_token():
    """What life A drew past the checkpoint must not pass for life B's because B went on with it."""
    life = Lineage("A").after_restart(4)
    mixed = drawn(drawn(PROMPT, [4, 5]), [4, 5], lineage=life.id)
    assert mixed.lineage == "A"
    episode = Episode(id="g1/0", group="g1", task={}, rollouts=(mixed,))
    assert Rejection(max_lag=9).reason(Group(0, (episode,)), version=5, lineage=life) == "lineage"
    assert drawn(drawn(PROMPT, []), [4], lineage=life.id).lineage == life.id, "an empty call drew nothing"


def test_over_age_is_what_no_batch_to_come_can_take():
    sampled = Versions(first=3, newest=3, trained=3)
    assert not Rejection(max_lag=2).is_over_age(sampled, at=5)
    assert Rejection(max_lag=2).is_over_age(sampled, at=6)
    assert Rejection(max_lag=0).is_over_age(sampled, at=4) and not Rejection(max_lag=0).is_over_age(sampled, at=3)
