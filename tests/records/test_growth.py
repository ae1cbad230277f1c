"""A rollout is begun and lengthened without checking again what was checked, and with no less checked for it."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import quick, rollouts, samplings, seeds

from headrace.engine.request import append_call
from headrace.records import (
    Call,
    FinishReason,
    Rollout,
    Sampling,
    SamplingMask,
    Source,
    unknown_expert,
    unknown_routing,
)

ADDED = 3


def begun() -> Rollout:
    return Rollout.from_prompt([5, 6], id="r", episode="e", group="g", index=4)


def call(start: int = 2, stop: int = 2 + ADDED, *, sampling: Sampling | None = None) -> Call:
    sampling, reason = sampling or Sampling(), FinishReason.LENGTH
    return Call(start=start, stop=stop, engine="x", sampling=sampling, finish_reason=reason, started=1.0, finished=2.0)


def drawn(**changes) -> dict:
    return {
        "token_ids": np.array([7, 8, 9], dtype=np.int32),
        "logprobs": np.array([-0.5, 0, -1], dtype=np.float32),
        "versions": np.array([3, 3, 4], dtype=np.int32),
        "policy": "student",
        "lineage": "a1",
        **changes,
    }


@given(rollouts(), samplings(), st.integers(0, 4), seeds)
@quick
def test_a_lengthened_rollout_is_the_one_the_constructor_makes(
    rollout: Rollout, sampling: Sampling, added: int, seed: int
) -> None:
    random, start = np.random.default_rng(seed), len(rollout)
    new = {
        "token_ids": random.integers(0, 2**31, size=added).astype(np.int32),
        "logprobs": -random.exponential(size=added).astype(np.float32),
        "versions": random.integers(0, 9, size=added).astype(np.int32),
    }
    mask = SamplingMask.from_rows([np.zeros(0, int)] * (start + added)) if rollout.sampling_mask else None
    old = rollout.expert_routing
    unknown = None if old is None else np.full((added, *old.shape[1:]), 255 if old.dtype == np.uint8 else -1, old.dtype)
    one_call = call(start, start + added, sampling=sampling)
    made = rollout.extend(one_call, **new, policy="p", lineage="l", sampling_mask=mask)
    assert made == dataclasses.replace(
        rollout,
        policy="p",
        lineage="l",
        **{name: np.concatenate([getattr(rollout, name), array]) for name, array in new.items()},
        source=[*rollout.source.tolist(), *[Source.SAMPLED] * added],
        loss_mask=[*rollout.loss_mask.tolist(), *[True] * added],
        calls=(*rollout.calls, one_call),
        finish_reason=FinishReason.LENGTH,
        sampling_mask=mask,
        expert_routing=None if old is None else np.concatenate([old, unknown]),
        columns={},
    )
    assert made.expert_routing is None or not made.expert_routing.flags.writeable
    for name in ("token_ids", "source", "loss_mask", "logprobs", "versions"):
        assert not getattr(made, name).flags.writeable


def test_later_changes_to_what_was_drawn_do_not_reach_the_rollout() -> None:
    given_arrays = drawn()
    made = begun().extend(call(), **given_arrays)
    for name in ("token_ids", "logprobs", "versions"):
        given_arrays[name][:] = 0
    assert made == begun().extend(call(), **drawn())


def long_mask(length: int) -> SamplingMask:
    return SamplingMask.from_rows([np.zeros(1, int)] * length)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([7, -1, 9], dtype=np.int32)}, "negative id"),
        ({"token_ids": np.array([7, 8], dtype=np.int32)}, "token_ids has"),
        ({"token_ids": np.array([7, 8, 9])}, "token_ids has dtype int64"),
        ({"token_ids": np.zeros((3, 1), dtype=np.int32)}, "token_ids has"),
        ({"logprobs": np.array([-0.5, 0.01, 0], dtype=np.float32)}, "logprobs must be"),
        ({"logprobs": np.array([-0.5, math.nan, 0], dtype=np.float32)}, "logprobs must be"),
        ({"logprobs": np.array([-0.5, math.inf, 0], dtype=np.float32)}, "logprobs must be"),
        ({"logprobs": np.array([-0.5, -math.inf, 0], dtype=np.float32)}, "logprobs must be"),
        ({"logprobs": np.zeros(3)}, "logprobs has dtype float64"),
        ({"versions": np.array([3, -1, 4], dtype=np.int32)}, "versions must be"),
        ({"versions": np.zeros(4, dtype=np.int32)}, "versions has"),
        ({"sampling_mask": long_mask(4)}, "covers 4 of 5"),
        ({"sampling_mask": long_mask(6)}, "covers 6 of 5"),
    ],
)
def test_malformed_draws_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"rollout 'r': .*{message}"):
        begun().extend(call(), **drawn(**changes))


@pytest.mark.parametrize(("start", "stop"), [(1, 4), (3, 6), (2, 4), (2, 6), (0, 3)])
def test_a_call_goes_on_from_the_last_token_over_what_it_drew(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="rollout 'r'"):
        begun().extend(call(start, stop), **drawn())


# Long rollouts of many calls

TOKENS = ("token_ids", "source", "loss_mask", "logprobs", "versions")


def turn(rollout: Rollout, number: int, *, masked: bool) -> Rollout:
    """One more call of three tokens, and a tool's reply of two."""
    start = len(rollout)
    masks = [np.arange(number % 4 + 1, dtype=np.int32)] * ADDED if masked else []
    ids = np.array([number, 8, 9], dtype=np.int32)
    return append_call(rollout, call(start, start + ADDED), **drawn(token_ids=ids), masks=masks).append([number, 1])


def arrays_of(rollout: Rollout) -> list[np.ndarray]:
    mask = rollout.sampling_mask
    return [getattr(rollout, name) for name in TOKENS] + ([] if mask is None else [mask.offsets, mask.ids])


@pytest.mark.parametrize("masked", [False, True])
def test_many_small_calls_copy_a_long_rollout_a_few_times_in_all(masked: bool) -> None:
    rollout, num_copies, before = begun(), 0, []
    for number in range(400):
        longer = turn(rollout, number, masked=masked)
        pairs = zip(arrays_of(rollout), arrays_of(longer), strict=False)
        num_copies += sum(len(old) > 0 and not np.shares_memory(old, new) for old, new in pairs)
        before.append(rollout)
        rollout = longer
    assert num_copies < 7 * 2 * math.log(2000) / math.log(1.25), "as often as the memory grows by a quarter"
    assert len(rollout) == 2002 and rollout.num_sampled == 1200
    assert dataclasses.replace(rollout) == rollout, "the constructor has nothing against it"
    assert rollout.token_ids.tolist()[2:] == [each for number in range(400) for each in (number, 8, 9, number, 1)]
    if masked:
        rows = [rollout.sampling_mask.row(2 + 5 * number + place).tolist() for number in range(400) for place in (0, 3)]
        assert rows == [each for number in range(400) for each in (list(range(number % 4 + 1)), [])]
    for number in (1, 57, 399):  # none of those on the way has changed
        assert before[number] == rollout.forked(len(before[number]), id="x").replace(
            id="r", parent=None, calls=before[number].calls, finish_reason=before[number].finish_reason, columns={}
        )


def test_a_rollout_lengthened_twice_has_two_ends() -> None:
    rollout = turn(turn(begun(), 1, masked=True), 2, masked=True)
    first, second = turn(rollout, 3, masked=True), turn(rollout, 4, masked=True)
    assert first.token_ids[-5:].tolist() == [3, 8, 9, 3, 1] and second.token_ids[-5:].tolist() == [4, 8, 9, 4, 1]
    assert first.sampling_mask.row(12).tolist() == [0, 1, 2, 3] and second.sampling_mask.row(12).tolist() == [0]
    fork = turn(first.forked(9, id="f"), 5, masked=True)
    assert fork.token_ids[9:].tolist() == [5, 8, 9, 5, 1] and first.token_ids[9:12].tolist() == [9, 2, 1]
    assert turn(rollout, 3, masked=True) == first


def test_two_threads_may_lengthen_the_same_rollout() -> None:
    rollout = turn(turn(begun(), 1, masked=False), 2, masked=False)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            made = list(threads.map(lambda number, each=rollout: turn(each, number, masked=False), range(8)))
            assert [each.token_ids[-5:].tolist() for each in made] == [[n, 8, 9, n, 1] for n in range(8)]
            rollout = made[0]


def test_a_grown_rollout_is_compared_copied_and_pickled_by_what_it_holds() -> None:
    rollout = turn(turn(begun(), 1, masked=True), 2, masked=True)
    longer = turn(rollout, 3, masked=True)
    assert dataclasses.replace(rollout) == rollout
    for same in (pickle.loads(pickle.dumps(rollout)), copy.deepcopy(rollout)):
        assert same == rollout != longer
        assert not any(np.shares_memory(mine, theirs) for mine, theirs in zip(arrays_of(same), arrays_of(rollout), strict=True))
    with pytest.raises(ValueError, match="read-only"):
        rollout.token_ids[0] = 3


def test_a_reply_is_not_sampled() -> None:
    routed = dataclasses.replace(begun(), expert_routing=rows(3, 255), columns={"value": np.zeros(2)})
    made = routed.append([4, 5], source=Source.TEMPLATE)
    assert made.source.tolist() == [0, 0, Source.TEMPLATE, Source.TEMPLATE] and made.versions.tolist() == [-1] * 4
    assert made.expert_routing.ravel().tolist() == [3, 255, 255, 255] and made.columns == {} and made.calls == ()
    assert dataclasses.replace(made) == made and begun().append([]) == begun()
    with pytest.raises(ValueError, match="rollout 'r': only a generate call adds sampled tokens"):
        begun().append([4], source=Source.SAMPLED)
    with pytest.raises(ValueError, match="rollout 'r'"):
        begun().append([-4])


@pytest.mark.parametrize("source", [-1, 9])
def test_a_reply_of_no_source_is_refused_where_it_is_appended(source: int) -> None:
    """An engine could not read the rollout."""
    with pytest.raises(ValueError, match=f"{source} is not a valid Source"):
        begun().append([4], source=source)  # type: ignore[arg-type]


# Expert routing grows with its rollout


def rows(*experts: int, dtype: type = np.uint8) -> np.ndarray:
    """One layer and one choice: a row for each number; -1 is unknown in either dtype."""
    return np.array(experts, dtype=np.int16).astype(dtype).reshape(-1, 1, 1)


def grown(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """The routing of the two tokens begun with and the three drawn."""
    return dataclasses.replace(begun(), expert_routing=old).extend(call(), **drawn(expert_routing=new)).expert_routing


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_what_was_known_of_the_routing_stays_where_the_new_one_knows_nothing(dtype: type) -> None:
    def routed(*experts: int) -> np.ndarray:
        return rows(*experts, dtype=dtype)

    old = routed(3, -1)
    for new, expected in [
        (None, routed(3, -1, -1, -1, -1)),
        (routed(-1, -1, -1, -1, -1), routed(3, -1, -1, -1, -1)),
        (routed(-1, 7, 8, 9, -1), routed(3, 7, 8, 9, -1)),
        (routed(4, 7, 8, 9, -1), routed(4, 7, 8, 9, -1)),  # where both know, the newer pass counts
    ]:
        result = grown(old, new)
        assert result is not None
        assert (result.dtype, result.tolist()) == (dtype, expected.tolist())
        assert not result.flags.writeable
    assert old.tolist() == routed(3, -1).tolist()


def test_routing_is_kept_for_each_layer_and_choice() -> None:
    old, new = np.full((2, 2, 3), 255, np.uint8), np.full((5, 2, 3), 255, np.uint8)
    old[0], new[1:4] = np.arange(6).reshape(2, 3), np.arange(100, 118).reshape(3, 2, 3)
    result = grown(old, new)
    assert np.array_equal(result, np.concatenate([old[:1], new[1:]]))


def test_a_rollout_that_had_no_routing_takes_the_engines() -> None:
    new = rows(1, 2, 3, 4, 255)
    assert np.array_equal(grown(None, new), new)
    assert grown(None, None) is None


def test_later_changes_to_the_engines_routing_do_not_reach_the_rollout() -> None:
    new = rows(1, 2, 3, 4, 255)
    made = begun().extend(call(), **drawn(expert_routing=new))
    new[:] = 9
    assert made.expert_routing is not None
    assert made.expert_routing.ravel().tolist() == [1, 2, 3, 4, 255]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (None, np.zeros((4, 1, 1), np.uint8), "4, 1, 1.* but there are 5 tokens"),
        (None, np.zeros((3, 1, 1), np.uint8), "5 tokens"),
        (None, np.zeros((6, 1, 1), np.uint8), "5 tokens"),
        (None, np.zeros((5, 1), np.uint8), "must be"),
        (None, np.zeros((5, 1, 1), np.int32), "uint8 or int16"),
        (None, np.zeros((5, 1, 1), np.int64), "uint8 or int16"),
        (np.zeros((2, 1, 1), np.uint8), np.zeros((4, 1, 1), np.uint8), "5 tokens"),
        (np.zeros((2, 1, 1), np.uint8), np.zeros((5, 1, 1), np.int16), "int16 but those before are .*uint8"),
        (np.zeros((2, 1, 1), np.uint8), np.zeros((5, 2, 1), np.uint8), "rows of .2, 1."),
        (np.zeros((2, 1, 2), np.uint8), np.zeros((5, 1, 1), np.uint8), "rows of .1, 1."),
    ],
)
def test_routing_that_does_not_fit_is_refused_by_name(old: np.ndarray | None, new: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"rollout 'r': expert_routing .*{message}"):
        grown(old, new)


def test_engines_lengthen_with_routing() -> None:
    routed = dataclasses.replace(begun(), expert_routing=rows(3, 255))
    made = append_call(routed, call(), **drawn(), masks=[], expert_routing=rows(255, 1, 2, 4, 255))
    assert made.expert_routing is not None
    assert made.expert_routing.ravel().tolist() == [3, 1, 2, 4, 255]
    assert append_call(begun(), call(), **drawn(), masks=[]).expert_routing is None


@pytest.mark.parametrize(("dtype", "unknown"), [(np.uint8, 255), (np.int16, -1), ("uint8", 255)])
def test_unknown_routing(dtype, unknown: int) -> None:
    routing = unknown_routing(3, num_layers=2, top_k=4, dtype=dtype)
    assert (routing.shape, routing.dtype) == ((3, 2, 4), dtype)
    assert (routing == unknown).all() and unknown_expert(dtype) == unknown
    routing[0] = 1  # who fills it in can


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32])
def test_routing_has_one_of_two_dtypes(dtype: type) -> None:
    with pytest.raises(ValueError, match="uint8 or int16"):
        unknown_routing(3, num_layers=2, top_k=4, dtype=dtype)


@pytest.mark.parametrize("token_ids", [[3, -1], [[3, 4]], np.array([[3]], dtype=np.int32)], ids=str)
def test_a_prompt_is_a_row_of_token_ids(token_ids) -> None:
    with pytest.raises(ValueError, match="rollout 'p'"):
        Rollout.from_prompt(token_ids, id="p")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=5))
@quick
def test_a_prompt_is_the_rollout_the_constructor_makes(token_ids: list[int]) -> None:
    prompt = Rollout.from_prompt(token_ids, id="p", index=2)
    assert dataclasses.replace(prompt) == prompt
    length = len(token_ids)
    assert prompt == Rollout(
        id="p",
        episode="p",
        group="p",
        index=2,
        token_ids=token_ids,
        source=[Source.PROMPT] * length,
        loss_mask=[False] * length,
        logprobs=[0.0] * length,
        versions=[-1] * length,
    )
    other = Rollout.from_prompt(token_ids, id="q")
    assert prompt.rewards is not other.rewards and prompt.columns is not other.columns
    for name in ("token_ids", "source", "loss_mask", "logprobs", "versions"):
        assert not getattr(prompt, name).flags.writeable


def test_later_changes_to_a_prompts_tokens_do_not_reach_it() -> None:
    owner = np.array([3, 4], dtype=np.int32)
    prompt = Rollout.from_prompt(owner, id="p")
    owner[0] = 9
    assert prompt.token_ids.tolist() == [3, 4]


@given(samplings(), st.integers(0, 2**63 - 1))
@quick
def test_another_seed_changes_nothing_else(sampling: Sampling, seed: int) -> None:
    assert sampling.with_seed(seed) == dataclasses.replace(sampling, seed=seed)
