"""Rollouts in columns come out as they went in, and whatever a rollout would refuse is refused in columns too."""

from __future__ import annotations

import copy
import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import arrays, batches, episodes, names, plain, quick, rollouts, samplings, small_records
from test_frames import JUNK, changed, make_records, make_rollout, opened, paths, seal

from headrace.records import Batch, Episode, InfraAbort, Invalid, Rollout, Sampling, Scored
from headrace.records.columns import (
    pack_batch,
    pack_episodes,
    pack_rollouts,
    pack_samplings,
    unpack_batch,
    unpack_episodes,
    unpack_rollouts,
    unpack_samplings,
)
from headrace.records.frames import WireError, decode, encode

some_rollouts = st.lists(rollouts() | rollouts(parent="r0"), max_size=4)


def carried(packed: object) -> object:
    return decode(encode(packed))


def prompt(id: str) -> Rollout:
    return Rollout.from_prompt([5, 6, 7], id=id, group="p")


def members() -> list[Rollout]:
    """Something in every field of the first and last, nothing that is optional in the one between."""
    first, last = make_rollout("r1"), make_rollout("r2").replace(outcome=Invalid("none applies"))
    return [first, prompt("r-plain"), last]


# Whatever goes in comes out


@given(some_rollouts)
@settings(parent=quick, max_examples=150)
def test_rollouts_come_out_as_they_went_in(given_rollouts: list[Rollout]) -> None:
    packed = pack_rollouts(given_rollouts)
    assert unpack_rollouts(carried(packed)) == given_rollouts
    assert unpack_rollouts(packed) == given_rollouts


@given(st.lists(samplings(), max_size=6))
@quick
def test_samplings_come_out_as_they_went_in(given_samplings: list[Sampling]) -> None:
    assert unpack_samplings(carried(pack_samplings(given_samplings))) == given_samplings


@given(batches())
@quick
def test_a_batch_comes_out_as_it_went_in(batch: Batch) -> None:
    copy = unpack_batch(carried(pack_batch(batch)))
    assert type(copy) is Batch
    assert copy == batch


@given(st.lists(episodes(), max_size=3))
@quick
def test_episodes_come_out_as_they_went_in(given_episodes: list[Episode]) -> None:
    assert unpack_episodes(carried(pack_episodes(given_episodes))) == given_episodes


def test_nothing_packs_and_unpacks() -> None:
    assert unpack_episodes(carried(pack_episodes([]))) == []
    assert unpack_rollouts(carried(pack_rollouts([]))) == []
    assert unpack_samplings(carried(pack_samplings([]))) == []


def test_settings_that_differ_in_their_seed_alone_are_one() -> None:
    asked = [Sampling(temperature=0.5, stop_ids=(2,), seed=seed) for seed in range(5)]
    packed = pack_samplings([*asked, Sampling(top_k=3)])
    assert len(packed["settings"]) == 2
    assert unpack_samplings(packed) == [*asked, Sampling(top_k=3)]


def test_stop_texts_travel() -> None:
    plain = [Sampling(stop_ids=(2,), seed=seed) for seed in range(3)]
    stopped = [Sampling(stop_ids=(2,), stop=("</a>", "é"), seed=seed) for seed in range(3)]
    packed = pack_samplings([*plain, *stopped])
    assert len(packed["settings"]) == 2
    assert unpack_samplings(carried(packed)) == [*plain, *stopped]


@pytest.mark.parametrize("junk", ["</a>", [""], [3], ["x"] * 17, None, {"x": "y"}], ids=str)
def test_malformed_stop_texts_are_refused_on_arrival(junk) -> None:
    header, body = opened(encode(pack_samplings([Sampling(stop=("x",))])))
    header["settings"][0]["stop"] = junk
    with pytest.raises(WireError, match=r"sampling\.stop"):
        unpack_samplings(decode(seal(header, body)))


def routed(id: str, *shape: int, dtype: type) -> Rollout:
    """The prompt with random experts, but for the last token's, which are unknown."""
    routing = np.random.default_rng(len(id)).integers(0, 254, size=(3, *shape)).astype(dtype)
    routing[-1] = 255 if dtype is np.uint8 else -1
    return prompt(id).replace(expert_routing=routing)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_expert_routing_travels_beside_rollouts_that_have_none(dtype: type) -> None:
    mixed = [
        routed("a", 2, 4, dtype=dtype),
        prompt("b"),
        routed("c", 2, 4, dtype=dtype),
        make_rollout("d").forked(3, id="fork"),
        prompt("e"),
    ]
    ones = tuple(np.ones(len(rollout), np.float32) for rollout in mixed)
    batch = Batch(rollouts=mixed, advantages=ones, weights=ones, loss="grpo", version=1)
    for came in (unpack_rollouts(carried(pack_rollouts(mixed))), unpack_batch(carried(pack_batch(batch))).rollouts):
        assert list(came) == mixed
        assert [None if r.expert_routing is None else r.expert_routing.dtype for r in came[:3]] == [dtype, None, dtype]


def test_routing_of_several_models_travels_together() -> None:
    mixed = [routed("a", 2, 4, dtype=np.uint8), routed("b", 3, 8, dtype=np.int16), routed("c", 2, 4, dtype=np.int16)]
    assert unpack_rollouts(carried(pack_rollouts(mixed))) == mixed


def is_read_only(rollout: Rollout) -> bool:
    mask = rollout.sampling_mask
    found = [rollout.token_ids, rollout.source, rollout.loss_mask, rollout.logprobs, rollout.versions]
    found += [*rollout.columns.values(), *([] if mask is None else [mask.offsets, mask.ids])]
    found += [] if rollout.expert_routing is None else [rollout.expert_routing]
    return not any(array.flags.writeable for array in found)


@given(some_rollouts)
@quick
def test_what_comes_out_is_what_the_records_own_constructor_makes(given_rollouts: list[Rollout]) -> None:
    for rollout in unpack_rollouts(carried(pack_rollouts(given_rollouts))):
        assert dataclasses.replace(rollout) == rollout
        assert is_read_only(rollout)
        kinds = [type(value) for value in (rollout.index, rollout.id, rollout.rewards, rollout.step_rewards, rollout.calls)]
        assert kinds == [int, str, dict, tuple, tuple]
        for call in rollout.calls:
            assert dataclasses.replace(call) == call
            assert dataclasses.replace(call.sampling) == call.sampling
            assert [type(v) for v in (call.start, call.stop, call.started, call.sampling.seed)] == [int, int, float, int]


def test_no_token_is_copied_on_the_way_out() -> None:
    frame = encode(pack_rollouts(members()))
    whole = np.frombuffer(frame, dtype=np.uint8)
    for rollout in unpack_rollouts(decode(frame)):
        for array in (rollout.token_ids, rollout.source, rollout.loss_mask, rollout.logprobs, rollout.versions):
            assert np.shares_memory(array, whole)


def test_memory_that_others_can_write_is_copied() -> None:
    frame = bytearray(encode(pack_rollouts(members())))
    made = unpack_rollouts(decode(frame))
    before = copy.deepcopy(made)
    frame[40:] = bytes(len(frame) - 40)
    assert made == before == members()


def test_dictionaries_are_not_shared() -> None:
    first, second = unpack_rollouts(pack_rollouts([prompt("a"), prompt("b")]))
    assert first.rewards is not second.rewards and first.columns is not second.columns


@pytest.mark.parametrize(
    "changes",
    [{"id": 3}, {"group": None}, {"index": 0.5}, {"policy": 1}, {"lineage": b"x"}],
    ids=str,
)
def test_what_no_column_holds_is_refused_when_it_is_packed(changes: dict) -> None:
    with pytest.raises(WireError, match=next(iter(changes))):
        pack_rollouts([prompt("a"), prompt("b").replace(**changes)])


def test_a_seed_that_does_not_fit_is_refused() -> None:
    with pytest.raises(WireError, match="seed"):
        unpack_samplings(carried(pack_samplings([Sampling().with_seed(2**63)])))  # which nobody checked


# What is malformed is refused


def device_of(packed: object, path: tuple[str, ...]) -> object:
    for key in path:
        packed = packed[int(key)] if isinstance(packed, list) else packed[key]
    return packed


def put(*path: str, at: object = None, value: object = None, dtype: object = None, shape: object = None):
    """A corruption: another value at `path`, or one item of it changed, or an array of another dtype or shape."""

    def corrupt(packed: dict) -> None:
        *inside, last = path
        holder = device_of(packed, tuple(inside))
        if dtype is not None:
            holder[last] = holder[last].astype(dtype)
        elif shape is not None:
            holder[last] = holder[last].reshape(shape)
        elif at is None:
            holder[last] = value
        else:
            holder[last] = copy.copy(holder[last])
            holder[last][at] = value

    return corrupt


def dropped(*path: str):
    """A corruption: the last element of the list or column at `path` is gone."""

    def corrupt(packed: dict) -> None:
        *inside, last = path
        holder = device_of(packed, tuple(inside))
        holder[last] = holder[last][:-1] if isinstance(holder[last], list) else holder[last][..., :-1]

    return corrupt


def drop_calls(count: int):
    """A corruption: the last calls are gone."""

    def corrupt(packed: dict) -> None:
        for column in [*packed["calls"].values(), packed["samplings"]["codes"], packed["samplings"]["seeds"]]:
            del column[len(column) - count :]
        counts = packed["rollouts"]["num_calls"]
        counts[:] = [0] * len(counts) if count == sum(counts) else [*counts[:-1], counts[-1] - count]

    return corrupt


# Rollouts r1 and r2 have tokens 0-6 and 10-16 (sampled: 2, 3, 6 and 12, 13, 16) and calls over (2, 3), (3, 4), (6, 7).
CORRUPT = {
    "negative token": (put("token_ids", at=11, value=-1), "'r2': token_ids holds a negative id"),
    "source too large": (put("source", at=8, value=4), "'r-plain': source holds"),
    "source too small": (put("source", at=0, value=-1), "'r1': source holds"),
    "loss on the prompt": (put("loss_mask", at=0, value=True), "'r1': loss_mask is True"),
    "loss on a tool's reply": (put("loss_mask", at=14, value=True), "'r2': loss_mask is True"),
    "no version on a sampled token": (put("versions", at=12, value=-1), "'r2': versions must be"),
    "version on the prompt": (put("versions", at=8, value=0), "'r-plain': versions must be"),
    "version below -1": (put("versions", at=7, value=-2), "'r-plain': versions must be"),
    "positive logprob": (put("logprobs", at=2, value=0.01), "'r1': logprobs must be"),
    "NaN logprob": (put("logprobs", at=12, value=np.nan), "'r2': logprobs must be"),
    "infinite logprob": (put("logprobs", at=12, value=-np.inf), "'r2': logprobs must be"),
    "logprob on the prompt": (put("logprobs", at=9, value=-0.5), "'r-plain': logprobs must be"),
    "a token too many": (put("rollouts", "length", at=0, value=8), "token_ids must be an array of 18"),
    "a token too few": (put("rollouts", "length", at=1, value=2), "token_ids must be an array of 16"),
    "negative length": (put("rollouts", "length", value=[-1, 11, 7]), "length must be"),
    "lengths past 64 bits": (put("rollouts", "length", value=[2**62] * 3), "token_ids must be"),
    "lengths moved": (
        put("rollouts", "length", value=[6, 4, 7]),
        "'r1': call over tokens 6 to 7 overlaps another or runs past",
    ),
    "one length too few": (dropped("rollouts", "length"), "rollouts: its columns must be equally long"),
    "one id too few": (dropped("rollouts", "id"), "rollouts: its columns must be equally long"),
    "one group too few": (dropped("rollouts", "group"), "rollouts: its columns must be equally long"),
    "no column of groups": (lambda packed: packed["rollouts"].pop("group"), "rollouts: missing or unknown keys: group"),
    "rollouts that are a list": (put("rollouts", value=[]), "rollouts: must be a dict"),
    "a token column short": (dropped("versions"), "versions must be an array of 17"),
    "an id that is a number": (put("rollouts", "id", at=1, value=3), "rollouts: id must be a list of str"),
    "an id that is bytes": (put("rollouts", "id", at=1, value=b"x"), "rollouts: id must be a list of str"),
    "an index that is a fraction": (put("rollouts", "index", at=1, value=0.5), "rollouts: index must be a list of int"),
    "an index that is True": (put("rollouts", "index", at=1, value=True), "rollouts: index must be a list of int"),
    "a policy that is no text": (put("rollouts", "policy", at=0, value=1), "rollouts: policy must be a list of str"),
    "a lineage that is no text": (put("rollouts", "lineage", at=0, value=None), "rollouts: lineage must be a list of str"),
    "float tokens": (put("token_ids", dtype=np.float32), "token_ids must be an array of 17 int32"),
    "wide tokens": (put("token_ids", dtype=np.int64), "token_ids must be"),
    "whole-number loss_mask": (put("loss_mask", dtype=np.uint8), "loss_mask must be"),
    "a loss_mask of 2": (put("loss_mask", value=np.array([0, 0, 2] + [0] * 14, np.uint8).view(bool)), "'r1': loss_mask"),
    "double logprobs": (put("logprobs", dtype=np.float64), "logprobs must be"),
    "tokens with two dimensions": (put("token_ids", shape=(17, 1)), "token_ids must be"),
    "tokens that are a list": (put("token_ids", value=[1] * 17), "token_ids must be"),
    "a call of another": (put("rollouts", "num_calls", value=[2, 1, 3]), "'r-plain': call over tokens 6 to 7 overlaps"),
    "a call of nobody": (put("rollouts", "num_calls", value=[3, 0, 2]), "num_calls must be ≥ 0 and add up to 6"),
    "a call too many": (put("rollouts", "num_calls", value=[3, 0, 4]), "num_calls must be ≥ 0 and add up to 6"),
    "less than no calls": (put("rollouts", "num_calls", value=[4, -1, 3]), "num_calls must be ≥ 0 and add up to 6"),
    "a call that starts early": (put("calls", "start", at=0, value=1), "'r1': calls do not cover"),
    "a call that starts late": (put("calls", "start", at=3, value=3), "'r2': calls do not cover"),
    "a call before the start": (put("calls", "start", at=0, value=-1), "'r1': call over tokens -1 to 3 overlaps"),
    "overlapping calls": (put("calls", "start", at=1, value=2), "'r1': call over tokens 2 to 4 overlaps"),
    "a gap between calls": (put("calls", "stop", at=0, value=2), "'r1': calls do not cover"),
    "a call past the end": (put("calls", "stop", at=5, value=8), "'r2': call over .* runs past"),
    "a call that ends before it starts": (put("calls", "stop", at=5, value=5), "'r2': call over tokens 6 to 5"),
    "a call far past the end": (put("calls", "stop", at=2, value=2**62), "'r1': call over .* runs past"),
    "a call past 64 bits": (put("calls", "stop", at=2, value=2**63), "rollouts: "),
    "a call that starts at a fraction": (put("calls", "start", at=0, value=2.0), "calls: start must be a list of int"),
    "an unknown finish reason": (put("calls", "finish_reason", at=0, value="tired"), "tired"),
    "an unknown sampling": (put("samplings", "codes", at=0, value=1), "settings: a code"),
    "a negative sampling": (put("samplings", "codes", at=0, value=-1), "settings: a code"),
    "an engine that is no text": (put("calls", "engine", at=0, value=7), "calls: engine must be a list of str"),
    "no sampling": (put("samplings", "settings", at=0, value=None), "list of Sampling"),
    "a seed past 64 bits": (put("samplings", "seeds", at=0, value=2**63), "seeds must be"),
    "no seeds": (lambda packed: packed["samplings"].pop("seeds"), "missing or unknown keys: seeds"),
    "one seed too few": (dropped("samplings", "seeds"), "seeds must be 6 numbers"),
    "one call too few": (drop_calls(1), "'r2': calls do not cover"),
    "no calls": (drop_calls(6), "'r1': calls do not cover"),
    "times that are text": (put("calls", "started", at=0, value="1"), "calls: started must be a list of float or int"),
    "one time too few": (dropped("calls", "started"), "calls: its columns must be equally long"),
    "forked past the end": (put("rollouts", "parent", at=2, value=("r0", 8)), "'r2': parent: forked at token 8 of 7"),
    "forked before the start": (put("rollouts", "parent", at=0, value=("r0", -1)), "'r1': parent: forked at token -1"),
    "two parents": (put("rollouts", "parent", at=0, value=["r0", 3, "r0", 3]), "'r1': too many values to unpack"),
    "half a parent": (put("rollouts", "parent", at=0, value=["r0"]), "'r1': not enough values to unpack"),
    "a parent that is no text": (put("rollouts", "parent", at=0, value=(7, 3)), "'r1': parent: id = 7 is a int"),
    "forked at a fraction": (put("rollouts", "parent", at=0, value=("r0", 3.0)), "'r1': parent: at = 3.0 is a float"),
    "a parent that is a text": (put("rollouts", "parent", at=0, value="r0"), "rollouts: parent must be a list of list or"),
    "infinite reward": (put("rollouts", "rewards", at=2, value={"right": math.inf}), "'r2': rewards must be finite"),
    "NaN reward": (put("rollouts", "rewards", at=0, value={"right": math.nan}), "'r1': rewards must be finite"),
    "a reward that is text": (put("rollouts", "rewards", at=0, value={"right": "good"}), "'r1': could not convert"),
    "rewards of nobody": (dropped("rollouts", "rewards"), "rollouts: its columns must be equally long"),
    "rewards that are a list": (put("rollouts", "rewards", at=0, value=[1.0]), "rollouts: rewards must be a list of dict"),
    "a step reward past the end": (put("rollouts", "step_rewards", at=0, value=[[7, 0.5]]), "'r1': step reward at token 7"),
    "a step reward before the start": (
        put("rollouts", "step_rewards", at=2, value=[[-1, 0.5]]),
        "'r2': step reward at token -1",
    ),
    "a score that is no number": (put("rollouts", "outcome", at=0, value=math.nan), "finite"),
    "a score that is text": (
        put("rollouts", "outcome", at=0, value="good"),
        "rollouts: outcome must be a list of float or Invalid or",
    ),
    "a whole-number score": (
        put("rollouts", "outcome", at=0, value=1),
        "rollouts: outcome must be a list of float or Invalid or",
    ),
    "one outcome too few": (dropped("rollouts", "outcome"), "rollouts: its columns must be equally long"),
    "routing short": (
        put("rollouts", "expert_routing", at=0, value=np.ones((6, 2, 1), dtype=np.int16)),
        r"'r1': expert_routing has shape \(6, 2, 1\)",
    ),
    "routing of int32": (put("rollouts", "expert_routing", at=0, value=np.ones((7, 2, 1), np.int32)), "'r1': expert_routing"),
    "routing with two dimensions": (put("rollouts", "expert_routing", at=2, value=np.ones((7, 2), np.int16)), "'r2': expert_r"),
    "routing that is a list": (put("rollouts", "expert_routing", at=0, value=[[[1]]]), "rollouts: expert_routing must be"),
    "a column short": (put("rollouts", "columns", at=0, value={"values": np.ones((6, 2))}), "'r1': values has shape"),
    "a column without dimensions": (
        put("rollouts", "columns", at=0, value={"values": np.array(1.0)}),
        "'r1': values has shape",
    ),
    "a column that is text": (put("rollouts", "columns", at=0, value={"values": np.array(["x"] * 7)}), "array of numbers"),
    "a column of nobody": (dropped("rollouts", "columns"), "rollouts: its columns must be equally long"),
    "a mask's token too few": (
        put("rollouts", "sampling_mask", at=0, value=make_rollout("x").sampling_mask.cut(6)),
        "covers 6 of 7",
    ),
    "a mask that is none": (put("rollouts", "sampling_mask", at=0, value=1), "rollouts: sampling_mask must be"),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPT.values(), ids=CORRUPT.keys())
def test_a_corrupt_column_is_refused(corrupt, message: str) -> None:
    packed = pack_rollouts(members())
    assert unpack_rollouts(packed) == members()  # but for the corruption it is well formed
    corrupt(packed)
    with pytest.raises(WireError, match=message):
        unpack_rollouts(packed)


@pytest.mark.parametrize("name", pack_rollouts(members()))
def test_a_missing_or_unknown_column_is_refused_by_name(name: str) -> None:
    packed = pack_rollouts([prompt("a")])
    del (whole := pack_rollouts(members()))[name]
    with pytest.raises(WireError, match=f"missing or unknown keys: {name}"):
        unpack_rollouts(whole)
    with pytest.raises(WireError, match="missing or unknown keys: color"):
        unpack_rollouts({**packed, "color": 1})


def corrupt_batch(**changes) -> dict:
    packed = pack_batch(make_records()["Batch"])
    settings = {name: value for name, value in changes.items() if name in packed["settings"]}
    others = {name: value for name, value in changes.items() if name not in settings}
    return {**packed, "settings": {**packed["settings"], **settings}, **others}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": np.ones(13, np.float32)}, "advantages must be an array of 14 float32"),
        ({"advantages": np.ones(14)}, "advantages must be"),
        ({"weights": np.array([1.0] * 13 + [np.nan], np.float32)}, "weights of rollout 'r2' must be finite"),
        ({"advantages": np.array([np.inf] + [1.0] * 13, np.float32)}, "advantages of rollout 'r1' must be finite"),
        ({"version": -1}, "version -1"),
        ({"version": "3"}, "version"),
        ({"version": True}, "version"),
        ({"loss": None}, "loss"),
        ({"constants": {"clip": "wide"}}, "wide"),
        ({"constants": [1]}, "batch"),
        ({"corrections": None}, "batch: corrections = None"),
        ({"corrections": "tis"}, "batch: corrections = 'tis'"),
        ({"corrections": {"tis": 2.0}}, "batch"),
        ({"corrections": {"tis": {"cap": "high"}}}, "high"),
        ({"kl": 3}, "batch: kl = 3"),
        ({"kl_weight": -0.5}, "kl_weight = -0.5"),
        ({"kl_weight": float("nan")}, "kl_weight = nan"),
        ({"kl_weight": "0.5"}, "kl_weight"),
        ({"rollouts": []}, "rollouts: must be a dict"),
        ({"settings": {}}, "missing or unknown keys: constants, corrections, "),
        ({"color": 1}, "color"),
    ],
)
def test_a_corrupt_batch_is_refused(changes: dict, message: str) -> None:
    unpack_batch(corrupt_batch())
    with pytest.raises(WireError, match=message):
        unpack_batch(corrupt_batch(**changes))


def corrupt_episodes(**changes) -> dict:
    packed = pack_episodes([make_records()["Episode"]])
    fields = {name: value for name, value in changes.items() if name not in packed}
    others = {name: value for name, value in changes.items() if name in packed}
    return {**packed, "episodes": [{**packed["episodes"][0], **fields}], **others}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rollouts": [3]}, "add up to 2"),
        ({"num_rollouts": [2, 0]}, "episodes"),
        ({"num_rollouts": [-1, 3]}, "≥ 0"),
        ({"num_rollouts": None}, "num_rollouts must be a list of int"),
        ({"episodes": []}, "episodes"),
        ({"episodes": [1]}, "episodes must be a list of dict"),
        ({"rollouts": 3}, "rollouts: must be a dict"),
        ({"group": "other"}, "group 'other' holds a rollout of 'g'"),
        ({"task": "a prompt"}, "task"),
        ({"outcome": "good"}, "outcome"),
        ({"color": "red"}, "unknown keys: color"),
    ],
)
def test_corrupt_episodes_are_refused(changes: dict, message: str) -> None:
    unpack_episodes(corrupt_episodes())
    with pytest.raises(WireError, match=message):
        unpack_episodes(corrupt_episodes(**changes))


# Nothing passes that a rollout would refuse, and nothing but a WireError comes out


def is_refused(unpack, value: object) -> bool:
    """Whether a WireError came; what did not is made again by its own constructor, which must not mind."""
    try:
        made = unpack(value)
    except WireError:
        return True
    for record in made if isinstance(made, list) else [made, *made.rollouts]:
        assert written(dataclasses.replace(record)) == written(record)
        for call in getattr(record, "calls", ()):
            again = dataclasses.replace(call, sampling=dataclasses.replace(call.sampling))
            assert repr(again) == repr(call)
    return False


def written(record: object) -> bytes:
    """In bytes: a NaN is not equal to itself."""
    if isinstance(record, Rollout):
        return encode(pack_rollouts([record]))
    if isinstance(record, Episode):
        return encode(pack_episodes([record]))
    return encode(pack_batch(record) if isinstance(record, Batch) else record)


PACKED = {
    "rollouts": (lambda: pack_rollouts(members()), unpack_rollouts),
    "batch": (lambda: pack_batch(make_records()["Batch"]), unpack_batch),
    "episodes": (lambda: pack_episodes([make_records()["Episode"]]), unpack_episodes),
    "samplings": (lambda: pack_samplings([call.sampling for call in make_rollout("r").calls]), unpack_samplings),
}


@pytest.mark.parametrize("kind", PACKED)
def test_any_value_in_any_place_is_refused_or_well_formed(kind: str) -> None:
    make, unpack = PACKED[kind]
    header, body = opened(encode(make()))
    num_refused = num_tried = 0
    for place in paths(header):
        for junk in JUNK:
            try:
                value = decode(seal(changed(header, place, junk), body))
            except WireError:
                continue
            num_tried += 1
            num_refused += is_refused(unpack, value)
    assert num_refused > num_tried / 2


NUMBERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 8, 2**31 - 1, 2**62, 2**63 - 1]


def array_places(value: object, path: tuple = ()) -> list[tuple]:
    if isinstance(value, np.ndarray):
        return [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, entry in inside for found in array_places(entry, (*path, key))]


def number_places(value: object, path: tuple = ()) -> list[tuple]:
    """The arrays and the lists of whole numbers."""
    if isinstance(value, list) and {int}.issuperset(map(type, value)):
        return [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return (
        array_places(value, path)
        if isinstance(value, np.ndarray)
        else [found for key, entry in inside for found in number_places(entry, (*path, key))]
    )


def array_at(value: object, path: tuple) -> np.ndarray:
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize("kind", PACKED)
def test_any_number_in_any_column_is_refused_or_well_formed(kind: str) -> None:
    make, unpack = PACKED[kind]
    packed, numbers = make(), random.Random(0)
    num_refused = 0
    for path in number_places(packed):
        column = array_at(packed, path)
        for at in range(np.size(column)):
            for number in numbers.sample(NUMBERS, 5):
                other = column.copy()
                if isinstance(other, list):
                    other[at] = number
                else:
                    with np.errstate(over="ignore"):
                        other.reshape(-1)[at] = np.array(number).astype(column.dtype)
                num_refused += is_refused(unpack, changed(packed, path, other))
    assert num_refused > 5


@given(some_rollouts.filter(bool), st.data())
@settings(parent=quick, max_examples=150)
def test_two_arrays_mixed_up_are_refused_or_well_formed(given_rollouts: list[Rollout], data: st.DataObject) -> None:
    packed = pack_rollouts(given_rollouts)
    places = array_places(packed)
    one, other = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    is_refused(unpack_rollouts, changed(packed, one, array_at(packed, other)))
    cut = data.draw(st.integers(0, 4))
    is_refused(unpack_rollouts, changed(packed, one, array_at(packed, one)[cut:]))


anything = st.recursive(
    plain | arrays() | small_records,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


@given(anything, st.data())
@settings(parent=quick, max_examples=150)
def test_anything_else_is_refused(value: object, data: st.DataObject) -> None:
    assert is_refused(unpack_rollouts, value)
    assert is_refused(unpack_batch, value)
    assert is_refused(unpack_episodes, value)
    assert is_refused(unpack_samplings, value)
    for make, unpack in PACKED.values():
        packed = make()
        place = data.draw(st.sampled_from([path for path in paths(packed) if path]))
        is_refused(unpack, changed(packed, place, value))


def test_every_kind_of_outcome_travels() -> None:
    outcomes = [Scored(-1.5), None, Invalid("because"), InfraAbort("worker died"), Scored(0.0)]
    judged = [prompt(f"r{row}").replace(outcome=outcome) for row, outcome in enumerate(outcomes)]
    assert [rollout.outcome for rollout in unpack_rollouts(carried(pack_rollouts(judged)))] == outcomes
