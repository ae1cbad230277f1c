"""The contract's records refuse what is malformed, keep what they were given, and answer questions about themselves."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import batches, episodes, quick, rollouts

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
    check_plain,
)

P, S, T, X = Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.TEMPLATE
KINDS = [P, P, S, S, T, X, S, S]
LENGTH = len(KINDS)


def make_call(start: int, stop: int, *, reason: str = "stop", **sampling) -> Call:
    return Call(
        start=start,
        stop=stop,
        engine="engine-0",
        sampling=Sampling(**sampling),
        finish_reason=FinishReason(reason),
        started=1.0,
        finished=2.0,
    )


def fields(**changes) -> dict:
    """Two turns with a tool's reply and a template's tokens between them, sampled by three versions."""
    calls = (make_call(2, 4, temperature=0.5), make_call(6, 8, reason="length", temperature=2.0))
    return {
        "id": "r",
        "episode": "e",
        "group": "g",
        "index": 3,
        "token_ids": np.arange(10, 10 + LENGTH, dtype=np.int32),
        "source": np.array(KINDS, dtype=np.int8),
        "loss_mask": np.array([kind == S for kind in KINDS]),
        "logprobs": np.array([0, 0, -0.5, -0.25, 0, 0, -1, -2], dtype=np.float32),
        "versions": np.array([-1, -1, 5, 6, -1, -1, 6, 7], dtype=np.int32),
        "calls": calls,
        "finish_reason": FinishReason.LENGTH,
        **changes,
    }


def make(**changes) -> Rollout:
    return Rollout(**fields(**changes))


def with_value(name: str, index: int, value: float) -> dict:
    """One number of one array changed."""
    array = fields()[name].copy()
    array[index] = value
    return {name: array}


MALFORMED = {
    "short source": ({"source": np.array(KINDS[1:], dtype=np.int8)}, "source"),
    "long loss_mask": ({"loss_mask": np.zeros(LENGTH + 1, dtype=bool)}, "loss_mask"),
    "short logprobs": ({"logprobs": np.zeros(2, dtype=np.float32)}, "logprobs"),
    "short versions": ({"versions": np.zeros(0, dtype=np.int32)}, "versions"),
    "short token_ids": ({"token_ids": np.arange(3, dtype=np.int32)}, "3 tokens"),
    "token_ids with two dimensions": ({"token_ids": np.zeros((LENGTH, 1), dtype=np.int32)}, "one-dimensional"),
    "logprobs with two dimensions": ({"logprobs": np.zeros((LENGTH, 2), dtype=np.float32)}, "one-dimensional"),
    "float token_ids": ({"token_ids": np.zeros(LENGTH)}, r"token_ids must be int32, not float64"),
    "float versions": ({"versions": fields()["versions"].astype(np.float32)}, "versions must be int32"),
    "whole-number loss_mask": ({"loss_mask": np.zeros(LENGTH, dtype=np.int64)}, "loss_mask must be bool"),
    "complex logprobs": ({"logprobs": np.zeros(LENGTH, dtype=np.complex64)}, "logprobs must be an array of numbers"),
    "token_ids of text": ({"token_ids": ["1"] * LENGTH}, "token_ids must be an array of numbers"),
    "token_ids of objects": ({"token_ids": [None] * LENGTH}, "token_ids must be an array of numbers"),
    "negative token id": (with_value("token_ids", 0, -1), "negative id"),
    "source too small": (with_value("source", 4, -1), "not a Source"),
    "source too large": (with_value("source", 4, 4), "not a Source"),
    "loss on the prompt": (with_value("loss_mask", 0, True), "loss_mask is True"),
    "loss on a tool's reply": (with_value("loss_mask", 4, True), "loss_mask is True"),
    "loss on a template's token": (with_value("loss_mask", 5, True), "loss_mask is True"),
    "version on the prompt": (with_value("versions", 1, 0), "versions must be"),
    "version on a tool's reply": (with_value("versions", 4, 6), "versions must be"),
    "no version on a sampled token": (with_value("versions", 3, -1), "versions must be"),
    "version below -1": (with_value("versions", 0, -2), "versions must be"),
    "positive logprob": (with_value("logprobs", 2, 0.01), "logprobs must be"),
    "NaN logprob": (with_value("logprobs", 2, math.nan), "logprobs must be"),
    "infinite logprob": (with_value("logprobs", 2, -math.inf), "logprobs must be"),
    "logprob on the prompt": (with_value("logprobs", 0, -0.5), "logprobs must be"),
    "NaN logprob on the prompt": (with_value("logprobs", 0, math.nan), "logprobs must be"),
    "no calls": ({"calls": (), "finish_reason": None}, "calls do not cover"),
    "a call missing": ({"calls": fields()["calls"][1:]}, "calls do not cover"),
    "calls short of the end": ({"calls": (make_call(2, 4), make_call(6, 7, reason="length"))}, "calls do not cover"),
    "a call over the tool's reply": ({"calls": (make_call(2, 5), make_call(6, 8, reason="length"))}, "calls do not cover"),
    "a call over the prompt": ({"calls": (make_call(1, 4), make_call(6, 8, reason="length"))}, "calls do not cover"),
    "overlapping calls": ({"calls": (make_call(2, 4), make_call(3, 4), make_call(6, 8, reason="length"))}, "overlaps another"),
    "calls out of order": ({"calls": (make_call(6, 8), make_call(2, 4, reason="length"))}, "overlaps another"),
    "a call past the end": ({"calls": (make_call(2, 4), make_call(6, 9, reason="length"))}, "runs past the end"),
    "finish_reason of an earlier call": ({"finish_reason": FinishReason.STOP}, "finish_reason must be that of the last call"),
    "finish_reason missing": ({"finish_reason": None}, "finish_reason must be that of the last call"),
    "unknown finish_reason": ({"finish_reason": "tired"}, "tired"),
    "media": ({"media": b"image"}, "media is reserved"),
    "routing with two dimensions": ({"expert_routing": np.zeros((LENGTH, 2), dtype=np.uint8)}, "expert_routing must be"),
    "routing of int32": ({"expert_routing": np.zeros((LENGTH, 2, 2), dtype=np.int32)}, "expert_routing must be"),
    "short routing": ({"expert_routing": np.zeros((LENGTH - 1, 2, 2), dtype=np.int16)}, "expert_routing has shape"),
    "short sampling mask": ({"sampling_mask": SamplingMask.from_rows([np.zeros(1, int)] * 3)}, "covers 3 of 8"),
    "long sampling mask": ({"sampling_mask": SamplingMask.from_rows([np.zeros(1, int)] * 9)}, "covers 9 of 8"),
    "short column": ({"columns": {"values": np.zeros(3)}}, "values has shape"),
    "column without dimensions": ({"columns": {"values": np.float32(1)}}, "values has shape"),
    "column of objects": ({"columns": {"values": [None] * LENGTH}}, "values must be an array of numbers"),
    "column of text": ({"columns": {"values": ["a"] * LENGTH}}, "values"),
    "step reward before the start": ({"step_rewards": ((-1, 1.0),)}, "step reward at token -1"),
    "step reward past the end": ({"step_rewards": ((LENGTH, 1.0),)}, "step reward at token 8"),
    "token_ids without dimensions": ({"token_ids": np.int32(3)}, "token_ids"),
}


@pytest.mark.parametrize(("changes", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_rollout_is_refused(changes: dict, message: str) -> None:
    make()  # but for the change it is well formed
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_error_names_the_rollout() -> None:
    with pytest.raises(ValueError, match="rollout 'r-17'"):
        make(id="r-17", **with_value("loss_mask", 0, True))


def test_a_finish_reason_without_a_call_is_refused() -> None:
    """`finish_reason` is None before the first call."""
    with pytest.raises(ValueError, match="finish_reason"):
        Rollout.from_prompt([1, 2], id="r").replace(finish_reason=FinishReason.STOP)


@pytest.mark.parametrize(("name", "value"), [("token_ids", 2**32 + 7), ("source", 256), ("versions", 2**32 - 1)])
def test_a_number_too_large_for_its_array_is_refused_not_wrapped(name: str, value: int) -> None:
    array = fields()[name].astype(np.int64)
    array[0] = value
    with pytest.raises(ValueError, match=name):
        make(**{name: array})


def test_whole_numbers_and_floats_of_other_widths_are_taken() -> None:
    made = make(token_ids=list(range(LENGTH)), source=list(map(int, KINDS)), logprobs=fields()["logprobs"].astype(float))
    assert (made.token_ids.dtype, made.source.dtype, made.logprobs.dtype) == (np.int32, np.int8, np.float32)
    assert made.token_ids.tolist() == list(range(LENGTH))
    assert made.logprobs.tolist() == fields()["logprobs"].tolist()


def test_a_call_may_add_nothing() -> None:
    """Interrupted before its first token."""
    made = make(calls=(make_call(2, 4), make_call(6, 8), make_call(8, 8, reason="abort")), finish_reason="abort")
    assert made.finish_reason is FinishReason.ABORT


def test_a_prompt_is_a_rollout_with_nothing_sampled() -> None:
    prompt = Rollout.from_prompt([5, 6, 7], id="p")
    assert (prompt.episode, prompt.group, prompt.index) == ("p", "p", 0)
    assert prompt.token_ids.tolist() == [5, 6, 7]
    assert (len(prompt), prompt.num_sampled, prompt.oldest_version, prompt.finish_reason) == (3, 0, -1, None)
    assert prompt.completion_ids == []
    assert prompt.temperatures.tolist() == [1, 1, 1]
    assert len(Rollout.from_prompt([], id="empty")) == 0


def arrays_of(rollout: Rollout) -> dict[str, np.ndarray]:
    found = {name: getattr(rollout, name) for name in ("token_ids", "source", "loss_mask", "logprobs", "versions")}
    found |= {f"columns.{name}": array for name, array in rollout.columns.items()}
    if rollout.expert_routing is not None:
        found["expert_routing"] = rollout.expert_routing
    if rollout.sampling_mask is not None:
        found |= {"offsets": rollout.sampling_mask.offsets, "ids": rollout.sampling_mask.ids}
    return found


@given(rollouts())
@quick
def test_every_array_of_a_rollout_is_read_only(rollout: Rollout) -> None:
    for name, array in arrays_of(rollout).items():
        assert not array.flags.writeable, name
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE|writeable"):
            array[...] = 0


@given(batches())
@quick
def test_every_array_of_a_batch_is_read_only(batch: Batch) -> None:
    for array in (*batch.advantages, *batch.weights):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def writable_inputs() -> dict[str, np.ndarray]:
    return {
        **{name: fields()[name].copy() for name in ("token_ids", "source", "loss_mask", "logprobs", "versions")},
        "expert_routing": np.zeros((LENGTH, 2, 2), dtype=np.int16),
        "columns": np.zeros(LENGTH, dtype=np.float64),
    }


@pytest.mark.parametrize("name", writable_inputs())
@pytest.mark.parametrize("given_as", ["array", "slice", "buffer"])
def test_later_changes_to_the_callers_array_do_not_reach_the_record(name: str, given_as: str) -> None:
    owner = writable_inputs()[name]
    given = {"array": owner, "slice": owner[:], "buffer": memoryview(owner)}[given_as]
    made = make(**{name: {"values": given} if name == "columns" else given})
    kept = made.columns["values"] if name == "columns" else getattr(made, name)
    before = kept.copy()
    assert owner.flags.writeable
    owner[...] = 1 - owner
    assert np.array_equal(kept, before)


def test_a_read_only_view_of_memory_the_caller_can_write_is_copied() -> None:
    """`np.broadcast_to` gives such views; that the view cannot be written says nothing of what it looks at."""
    owner = np.zeros(LENGTH, dtype=np.float32)
    made = make(columns={"values": np.broadcast_to(owner, (LENGTH,))})
    owner[0] = 9
    assert made.columns["values"].tolist() == [0] * LENGTH


def test_later_changes_to_a_batchs_inputs_do_not_reach_it() -> None:
    advantages, weights = np.ones(LENGTH, dtype=np.float32), np.ones(LENGTH, dtype=np.float32)
    constants = {"clip": 0.2}
    batch = make_batch(advantages=(advantages,), weights=(weights,), constants=constants)
    advantages[:], weights[:], constants["clip"] = 5, 5, 5
    assert batch.advantages[0].tolist() == batch.weights[0].tolist() == [1] * LENGTH
    assert batch.constants == {"clip": 0.2}


def test_later_changes_to_the_callers_dicts_do_not_reach_the_record() -> None:
    rewards, columns = {"right": 1}, {"values": np.zeros(LENGTH)}
    made = make(rewards=rewards, columns=columns)
    rewards["wrong"], columns["more"] = 2, np.zeros(LENGTH)
    assert made.rewards == {"right": 1.0}
    assert made.columns.keys() == {"values"}


def test_later_changes_to_a_dict_given_to_replace_do_not_reach_the_record() -> None:
    rewards = {"right": 1.0}
    made = make().replace(rewards=rewards)
    rewards["wrong"] = 2.0
    assert made.rewards == {"right": 1.0}


def test_records_are_frozen() -> None:
    rollout = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.id = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().temperature = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        Scored(1.0).reward = 2.0


@pytest.mark.parametrize(
    "name",
    ["loss on the prompt", "short logprobs", "positive logprob", "a call missing", "version on the prompt", "short column"],
)
def test_replace_checks_token_fields_again(name: str) -> None:
    changes, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        make().replace(**changes)
    with pytest.raises(ValueError, match=message):
        make().replace(outcome=Scored(1.0), **changes)


def test_replace_changes_what_is_named_and_keeps_the_rest() -> None:
    before = make(columns={"values": np.arange(LENGTH)}, parent=("origin", 2))
    after = before.replace(outcome=Scored(0.5), rewards={"right": 0.5}, policy="other", lineage="b")
    assert (after.outcome, after.rewards, after.policy, after.lineage) == (Scored(0.5), {"right": 0.5}, "other", "b")
    assert (before.outcome, before.rewards, before.policy) == (None, {}, "policy")
    assert after.replace(outcome=None, rewards={}, policy="policy", lineage="") == before
    mask = np.zeros(LENGTH, dtype=bool)
    assert not before.replace(loss_mask=mask).loss_mask.any()
    with pytest.raises(TypeError, match="no_such_field"):
        before.replace(no_such_field=1)


def test_questions_about_a_rollout_of_several_turns() -> None:
    rollout = make(outcome=Scored(0.75))
    assert len(rollout) == LENGTH
    assert rollout.num_sampled == 4
    assert rollout.is_sampled.tolist() == [False, False, True, True, False, False, True, True]
    assert rollout.oldest_version == 5
    assert rollout.completion_ids == [12, 13, 14, 15, 16, 17]
    assert rollout.temperatures.tolist() == [1, 1, 0.5, 0.5, 1, 1, 2, 2]
    assert rollout.reward == 0.75
    assert "8 tokens, 4 sampled, length" in repr(rollout)


@pytest.mark.parametrize("outcome", [None, Invalid("none applies"), InfraAbort("worker died")])
def test_what_was_not_scored_has_no_reward(outcome) -> None:
    assert make(outcome=outcome).reward is None


@given(rollouts())
@quick
def test_questions_are_answered_as_a_walk_over_the_tokens_would(rollout: Rollout) -> None:
    kinds = [Source(value) for value in rollout.source.tolist()]
    sampled = [index for index, kind in enumerate(kinds) if kind is S]
    assert rollout.num_sampled == len(sampled)
    assert rollout.oldest_version == min((int(rollout.versions[index]) for index in sampled), default=-1)
    num_prompt = next((index for index, kind in enumerate(kinds) if kind is not P), len(kinds))
    assert rollout.completion_ids == [int(token) for token in rollout.token_ids][num_prompt:]
    temperatures = {i: call.sampling.temperature for call in rollout.calls for i in range(call.start, call.stop)}
    assert rollout.temperatures.tolist() == [temperatures.get(index, 1.0) for index in range(len(kinds))]


@given(rollouts())
@quick
def test_equality_sees_every_token_field(rollout: Rollout) -> None:
    same = dataclasses.replace(rollout)
    assert same == rollout and same is not rollout
    assert rollout != rollout.replace(outcome=Invalid("some other outcome, longer than any drawn"))
    assert rollout != dataclasses.replace(rollout, index=rollout.index + 1)
    assert rollout != "a rollout"
    if len(rollout):
        assert rollout != rollout.replace(token_ids=(rollout.token_ids + 1) % 2**30)
    if rollout.num_sampled:
        assert rollout != rollout.replace(versions=np.where(rollout.is_sampled, rollout.versions + 1, -1))


def test_equality_tells_dtypes_and_nans_apart_by_their_bytes() -> None:
    column = np.full(LENGTH, np.nan, dtype=np.float32)
    assert make(columns={"values": column}) == make(columns={"values": column.copy()})
    assert make(columns={"values": column}) != make(columns={"values": column.astype(np.float64)})
    assert make(columns={"values": column}) != make(columns={"other": column})
    assert make(columns={"values": column}) != make(columns={"values": np.zeros((LENGTH, 1), dtype=np.float32)})


# Forks


def whole() -> Rollout:
    """With something in every field a fork must cut or leave behind."""
    return make(
        policy="student",
        lineage="a1",
        parent=("origin", 2),
        sampling_mask=SamplingMask.from_rows([np.arange(3 * (kind == S)) for kind in KINDS]),
        expert_routing=np.arange(LENGTH * 4, dtype=np.uint8).reshape(LENGTH, 2, 2),
        step_rewards=((5, 0.5), (2, 0.25), (3, -1.0)),
        rewards={"right": 1.0},
        columns={"values": np.zeros(LENGTH)},
        outcome=Scored(1.0),
    )


def test_a_fork_inside_a_call_cuts_it_short() -> None:
    fork = whole().forked(3, id="fork")
    assert (fork.id, fork.parent) == ("fork", ("r", 3))
    assert (fork.episode, fork.group, fork.index, fork.policy, fork.lineage) == ("e", "g", 3, "student", "a1")
    assert fork.token_ids.tolist() == [10, 11, 12]
    assert fork.source.tolist() == [P, P, S]
    assert fork.loss_mask.tolist() == [False, False, True]
    assert fork.logprobs.tolist() == [0, 0, -0.5]
    assert fork.versions.tolist() == [-1, -1, 5]
    assert fork.calls == (make_call(2, 3, reason="abort", temperature=0.5),)
    assert fork.finish_reason is FinishReason.ABORT
    assert fork.sampling_mask == SamplingMask(offsets=[0, 0, 0, 3], ids=[0, 1, 2])
    assert fork.step_rewards == ((2, 0.25),)
    assert (fork.rewards, fork.columns, fork.outcome) == ({}, {}, None)
    routing = whole().expert_routing[:3].copy()
    routing[-1] = 255
    assert np.array_equal(fork.expert_routing, routing)


def test_a_fork_between_calls_keeps_the_one_before_as_it_was() -> None:
    for at in (4, 5, 6):
        fork = whole().forked(at, id="fork")
        assert fork.calls == whole().calls[:1]
        assert fork.finish_reason is FinishReason.STOP
        assert len(fork) == at


def test_a_fork_in_the_prompt_is_a_prompt() -> None:
    fork = whole().forked(2, id="fork").replace(episode="e2", group="g2", index=0)
    assert fork == Rollout.from_prompt([10, 11], id="fork", episode="e2", group="g2", index=0).replace(
        policy="student",
        lineage="a1",
        parent=("r", 2),
        expert_routing=np.array([[[0, 1], [2, 3]], [[255, 255], [255, 255]]], dtype=np.uint8),
    )


def test_a_fork_at_the_end_has_every_token() -> None:
    fork = whole().forked(LENGTH, id="fork")
    assert fork.calls == whole().calls
    assert fork.finish_reason is FinishReason.LENGTH
    assert fork.sampling_mask == whole().sampling_mask
    assert fork.step_rewards == whole().step_rewards


def test_a_call_that_drew_nothing_is_kept_only_before_the_fork() -> None:
    calls = (make_call(2, 2, reason="abort"), make_call(2, 4), make_call(6, 8), make_call(8, 8, reason="abort"))
    rollout = make(calls=calls, finish_reason="abort")
    assert rollout.forked(2, id="fork").finish_reason is None
    assert rollout.forked(3, id="fork").calls == (calls[0], make_call(2, 3, reason="abort"))
    assert rollout.forked(LENGTH, id="fork").calls == calls[:3]


def test_a_fork_can_be_lengthened_and_forked_again() -> None:
    fork = whole().forked(3, id="fork")
    longer = fork.extend(
        make_call(3, 4),
        token_ids=np.array([77], np.int32),
        logprobs=np.array([-1], np.float32),
        versions=np.array([9], np.int32),
        policy="student",
        lineage="a1",
    )
    assert longer.parent == ("r", 3)
    assert longer.forked(4, id="second").parent == ("fork", 4)
    assert longer.forked(3, id="third") == fork.replace(id="third", parent=("fork", 3), sampling_mask=None)


@pytest.mark.parametrize("at", [0, -1, LENGTH + 1, 2**40])
def test_a_fork_outside_the_tokens_is_refused(at: int) -> None:
    with pytest.raises(ValueError, match=rf"rollout 'r': cannot be forked at token {at}; it must be 1 to 8"):
        whole().forked(at, id="fork")


@pytest.mark.parametrize("at", [2.0, "2", None, True])
def test_a_fork_is_at_a_whole_number(at) -> None:
    with pytest.raises(ValueError, match="rollout 'r': the token to fork at"):
        whole().forked(at, id="fork")


def test_a_fork_has_an_id_of_its_own() -> None:
    with pytest.raises(ValueError, match="id of its own"):
        whole().forked(3, id="r")


@given(rollouts().filter(len), st.data())
@quick
def test_any_fork_is_well_formed_and_shares_its_tokens(rollout: Rollout, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(rollout)))
    before = dataclasses.replace(rollout)
    fork = rollout.forked(at, id=f"{rollout.id}-fork")
    assert dataclasses.replace(fork) == fork  # the constructor does not mind
    for name, array in arrays_of(fork).items():
        assert not array.flags.writeable, name
    for name in ("token_ids", "source", "loss_mask", "logprobs", "versions"):
        assert np.array_equal(getattr(fork, name), getattr(rollout, name)[:at])
    assert fork.temperatures.tolist() == rollout.temperatures[:at].tolist()
    if rollout.expert_routing is not None:
        unknown = 255 if rollout.expert_routing.dtype == np.uint8 else -1
        assert np.array_equal(fork.expert_routing[:-1], rollout.expert_routing[: at - 1])
        assert (fork.expert_routing[-1] == unknown).all()
    none = SamplingMask.from_rows([np.zeros(0, int)] * len(rollout))
    old, new = rollout.sampling_mask or none, fork.sampling_mask or none
    assert [old.row(index).tolist() for index in range(at)] == [new.row(index).tolist() for index in range(at)]
    assert rollout == before
    assert fork.rewards is not rollout.rewards and fork.columns is not rollout.columns


# Sampling masks


def test_rows_of_a_sampling_mask() -> None:
    rows = [np.array([3, 1]), np.array([], dtype=int), np.array([7])]
    mask = SamplingMask.from_rows(rows)
    assert [mask.row(index).tolist() for index in range(3)] == [[3, 1], [], [7]]
    assert SamplingMask.from_rows([]).offsets.tolist() == [0]
    assert mask == SamplingMask(offsets=[0, 2, 2, 3], ids=[3, 1, 7])
    assert mask != SamplingMask(offsets=[0, 1, 2, 3], ids=[3, 1, 7])


@pytest.mark.parametrize(
    ("allowed", "row"),
    [([2], [2]), ([0, 1], [0, 1]), ([0, 1, 3], [~2]), ([0, 1, 2, 3], []), ([1, 2, 3], [~0])],
)
def test_a_row_of_a_sampling_mask_lists_what_is_fewer(allowed: list[int], row: list[int]) -> None:
    made = SamplingMask.make_row(np.isin(np.arange(4), allowed))
    assert made.tolist() == row and made.dtype == np.int32
    assert SamplingMask.from_rows([made, np.array([1])]).row(0).tolist() == row


@pytest.mark.parametrize(
    ("offsets", "ids"),
    [
        ([], []),
        ([1, 2], [5, 6]),
        ([0, 1], [5, 6]),
        ([0, 3], [5, 6]),
        ([0, 2, 1, 2], [5, 6]),
        ([[0, 2]], [5, 6]),
        ([0, 2], [[5, 6]]),
        ([0, 2], [5, ~6]),
        ([0, 2, 5], [~5, ~6, 3, ~2, ~1]),
        ([0.0, 2.0], [5, 6]),
        ([0, 2], [5.0, 6.0]),
        (0, []),
    ],
)
def test_a_malformed_sampling_mask_is_refused(offsets, ids) -> None:
    with pytest.raises(ValueError, match="sampling_mask"):
        SamplingMask(offsets=offsets, ids=ids)


# Sampling and calls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.0),
        ("min_p", math.nan),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", np.array(1.0)),
        ("max_tokens", "8"),
        ("seed", None),
    ],
)
def test_sampling_outside_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"sampling.{name} = "):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_k", "min_p", "min_tokens"])
def test_sampling_takes_its_limits(name: str) -> None:
    assert getattr(Sampling(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    ("settings", "is_truncated"),
    [
        ({}, False),
        ({"temperature": 0.3}, False),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"min_tokens": 2, "stop_ids": (1,)}, True),
        ({"min_tokens": 2}, False),
        ({"stop_ids": (1,)}, False),
        ({"temperature": 0.0, "top_k": 5}, False),
    ],
)
def test_when_a_sampling_mask_is_needed(settings: dict, is_truncated: bool) -> None:
    assert Sampling(**settings).is_truncated is is_truncated


def test_a_sampling_mask_is_recorded_where_it_is_used() -> None:
    assert Sampling(top_k=5).needs_mask
    assert not Sampling(top_k=5, keep_mask=False).needs_mask and not Sampling().needs_mask


def test_stop_texts_become_a_tuple_and_cut_nothing_off() -> None:
    assert Sampling(stop=["</answer>", "é\n"]).stop == ("</answer>", "é\n")
    assert Sampling().stop == ()
    assert not Sampling(stop=("x",), min_tokens=3).is_truncated
    assert Sampling(stop=("x",)) != Sampling()
    assert len(Sampling(stop=tuple(map(str, range(16)))).stop) == 16


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("",), "not empty"),
        (("fine", ""), "not empty"),
        (tuple(map(str, range(17))), "at most 16"),
        ((3,), "texts"),
        ((b"x",), "texts"),
        ((None,), "texts"),
        ("</answer>", "a list of texts"),
        (None, "a list of texts"),
        ({"x"}, "a list of texts"),
    ],
)
def test_malformed_stop_texts_are_refused(stop, message: str) -> None:
    with pytest.raises(ValueError, match=rf"sampling.stop = .*{message}"):
        Sampling(stop=stop)


def test_half_a_character_is_no_stop_text() -> None:
    with pytest.raises(ValueError, match=r"sampling.stop holds half of a character"):
        Sampling(stop=("\ud800",))


def test_stop_ids_become_a_tuple_of_whole_numbers() -> None:
    assert Sampling(stop_ids=np.array([4, 2])) == Sampling(stop_ids=[4, 2])
    assert Sampling(stop_ids=[4, 2]).stop_ids == (4, 2)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_call_spans_forwards(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="Call spans"):
        make_call(start, stop)


def test_a_call_must_know_how_it_was_drawn() -> None:
    with pytest.raises((ValueError, TypeError), match="sampling"):
        dataclasses.replace(make_call(0, 1), sampling=None)


# Outcomes and episodes


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_no_score(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Scored(reward)


def test_an_outcome_is_one_of_three() -> None:
    with pytest.raises((ValueError, TypeError), match="outcome"):
        make(outcome="good")


def test_an_episode_holds_rollouts_of_its_own_group() -> None:
    Episode(id="e", group="g", task={"prompt": "x"}, rollouts=[make()])
    with pytest.raises(ValueError, match="group 'other' holds a rollout of 'g'"):
        Episode(id="e", group="other", task={"prompt": "x"}, rollouts=(make(),))


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ({"prompt": object()}, r"\['prompt'\] is a object"),
        ({"prompt": [{"content": np.int64(3)}]}, r"\['prompt'\]\[0\]\['content'\] is a int64"),
        ({"prompt": (1, 2)}, r"\['prompt'\] is a tuple"),
        ({"prompt": b"x"}, r"\['prompt'\] is a bytes"),
        ({"prompt": {1: 2}}, r"key 1 is not a string"),
    ],
)
def test_a_task_is_plain_data_and_the_error_names_the_place(task: dict, place: str) -> None:
    with pytest.raises(ValueError, match=f"episode 'e': task.*{place}"):
        Episode(id="e", group="g", task=task)


def test_a_task_is_a_row() -> None:
    with pytest.raises((ValueError, TypeError), match="task"):
        Episode(id="e", group="g", task="a prompt")


def test_plain_data_is_taken() -> None:
    check_plain({"a": [1, 2.5, None, True, "x", {"b": []}]}, where="row")


@given(episodes())
@quick
def test_the_oldest_version_of_an_episode(episode: Episode) -> None:
    versions = [int(version) for rollout in episode.rollouts for version in rollout.versions if version >= 0]
    assert episode.oldest_version == min(versions, default=-1)
    assert episode.replace(attempts=9).attempts == 9
    assert episode.replace(attempts=episode.attempts) == episode


# Batches


def make_batch(**changes) -> Batch:
    ones = np.ones(LENGTH, dtype=np.float32)
    return Batch(**{"rollouts": (make(),), "advantages": (ones,), "weights": (ones,), "loss": "grpo", "version": 8, **changes})


@pytest.mark.parametrize("name", ["advantages", "weights"])
@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (np.ones(LENGTH, dtype=np.float32),) * 2,
        (np.ones(LENGTH - 1, dtype=np.float32),),
        (np.ones((LENGTH, 1), dtype=np.float32),),
        (np.float32(1),),
        (np.full(LENGTH, np.nan, dtype=np.float32),),
        (np.full(LENGTH, -np.inf, dtype=np.float32),),
        (np.ones(LENGTH, dtype=np.complex64),),
        (["1"] * LENGTH,),
    ],
    ids=["none", "too many", "short", "two dimensions", "no dimensions", "NaN", "infinite", "complex", "text"],
)
def test_a_batch_has_a_finite_number_for_every_token(name: str, arrays: tuple) -> None:
    with pytest.raises(ValueError, match=name):
        make_batch(**{name: arrays})


def test_a_batch_counts_all_tokens() -> None:
    ones = np.ones(LENGTH, dtype=np.float32)
    prompt = Rollout.from_prompt([1, 2, 3], id="p")
    batch = make_batch(rollouts=(make(), prompt), advantages=(ones, ones[:3]), weights=(ones, ones[:3]))
    assert batch.num_tokens == LENGTH + 3
    assert batch == dataclasses.replace(batch)
    assert batch != dataclasses.replace(batch, version=9)
    assert batch != dataclasses.replace(batch, advantages=(ones, 2 * ones[:3]))


@pytest.mark.parametrize("version", [-1, "3"])
def test_a_batch_is_for_a_version(version) -> None:
    with pytest.raises((ValueError, TypeError), match="version"):
        make_batch(version=version)


def test_a_losss_constants_are_numbers() -> None:
    assert make_batch(constants={"clip": 1}).constants == {"clip": 1.0}
    with pytest.raises(ValueError, match="wide"):
        make_batch(constants={"clip": "wide"})


# Weight updates


def update(**changes) -> WeightUpdate:
    return WeightUpdate(**{"policy": "policy", "lineage": "a", "version": 4, **changes})


def part(**changes) -> Part:
    return Part(**{"transport": "files", "key": "4-0", "num_bytes": 9, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": -1}, "-1 bytes"),
        ({"num_bytes": "9"}, "num_bytes"),
        ({"place": {"file": b"x"}}, "place"),
        ({"ranges": (("w", 3, 3),)}, "is no range"),
        ({"ranges": (("w", 0, 2.0),)}, "is no range"),
        ({"ranges": (("w", 0, 2), ("w", 2, 4))}, "two ranges of one tensor"),
    ],
)
def test_a_malformed_part_is_refused(changes: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        part(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": -1}, "version -1"),
        ({"base_version": 4}, "version 4 on base 4"),
        ({"payload": 3}, "payload"),
        ({"parts": (1,)}, "parts"),
        ({"parts": (part(), part())}, "a part without ranges is the whole update"),
        ({"payload": "adapter", "adapter": {"r": np.int64(8)}}, r"adapter\['r'\] is a int64"),
    ],
)
def test_a_malformed_weight_update_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update(**changes)


def test_a_manifest_lists_tensors() -> None:
    with pytest.raises((ValueError, TypeError), match="manifest"):
        update(manifest=(1, 2))


def test_a_tensor_has_no_negative_size() -> None:
    info = {"name": "w", "shape": [2, 3], "dtype": "float32", "num_bytes": 24, "checksum": 1}
    assert TensorInfo(**info).shape == (2, 3)
    with pytest.raises(ValueError, match="'w': -1 bytes"):
        TensorInfo(**{**info, "num_bytes": -1})
