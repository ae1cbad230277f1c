"""A rollout is begun and lengthened without checking again what was checked, and with no less checked for it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import quick, rollouts, samplings, seeds

from headrace.types import Call, FinishReason, Rollout, Sampling, SamplingMask, Source

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
    rollout = dataclasses.replace(rollout, expert_routing=None)
    random, start = np.random.default_rng(seed), len(rollout)
    new = {
        "token_ids": random.integers(0, 2**31, size=added).astype(np.int32),
        "logprobs": -random.exponential(size=added).astype(np.float32),
        "versions": random.integers(0, 9, size=added).astype(np.int32),
    }
    mask = SamplingMask.from_rows([np.zeros(0, int)] * (start + added)) if rollout.sampling_mask else None
    one_call = call(start, start + added, sampling=sampling)
    made = rollout.lengthened(one_call, **new, policy="p", lineage="l", sampling_mask=mask)
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
        columns={},
    )
    for name in ("token_ids", "source", "loss_mask", "logprobs", "versions"):
        assert not getattr(made, name).flags.writeable


def test_later_changes_to_what_was_drawn_do_not_reach_the_rollout() -> None:
    given_arrays = drawn()
    made = begun().lengthened(call(), **given_arrays)
    for name in ("token_ids", "logprobs", "versions"):
        given_arrays[name][:] = 0
    assert made == begun().lengthened(call(), **drawn())


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
        begun().lengthened(call(), **drawn(**changes))


@pytest.mark.parametrize(("start", "stop"), [(1, 4), (3, 6), (2, 4), (2, 6), (0, 3)])
def test_a_call_goes_on_from_the_last_token_over_what_it_drew(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="rollout 'r'"):
        begun().lengthened(call(start, stop), **drawn())


def test_routing_that_would_be_left_behind_is_refused() -> None:
    routed = dataclasses.replace(begun(), expert_routing=np.zeros((2, 1, 1), dtype=np.uint8))
    with pytest.raises(ValueError, match="expert_routing"):
        routed.lengthened(call(), **drawn())


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
