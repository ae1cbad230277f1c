"""Planning passes: every rollout once, within the budget, hardly any room left, and prompts shared where they are the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from siblings import make_prompt, sibling

from headrace.model.pass_planning import Unit, members_of, num_pairs, num_rows, plan_passes
from headrace.records import Rollout


@st.composite
def groups(draw: st.DrawFn) -> list[Rollout]:
    """Prompts of few different tokens, so that siblings have beginnings of all lengths in common."""
    prompts = st.lists(st.integers(1, 2), max_size=6)
    members = draw(st.lists(st.tuples(st.sampled_from("abc"), prompts, st.integers(0, 9)), min_size=1, max_size=14))
    return [
        sibling(prompt or [1], [length] if length else [], group=group, index=index)
        for index, (group, prompt, length) in enumerate(members)
    ]


@given(rollouts=groups(), budget=st.integers(4, 40), share=st.booleans())
@settings(max_examples=150, deadline=None)
def test_passes_keep_the_budget_and_share_only_what_is_the_same(rollouts: list[Rollout], budget: int, share: bool) -> None:
    passes, lengths = plan_passes(rollouts, budget=budget, share=share), list(map(len, rollouts))
    assert sorted(member for units in passes for member in members_of(units)) == list(range(len(rollouts)))
    for units in passes:
        total = sum(num_rows(unit, lengths) for unit in units)
        assert total <= budget or len(members_of(units)) == 1
        assert [unit.members for unit in units] == sorted(tuple(sorted(unit.members)) for unit in units)
        for prefix, members in ((unit.prefix, [rollouts[member] for member in unit.members]) for unit in units):
            assert (prefix > 0) == (len(members) > 1)
            assert len({member.group for member in members}) == 1
            assert len({member.token_ids[:prefix].tobytes() for member in members}) == 1
            assert all(len(member) > prefix and not member.loss_mask[:prefix].any() for member in members)
            assert share or not prefix


def long_tail(num_groups: int, *, siblings: int, prompt: float, completion: float) -> list[Rollout]:
    """Lengths are lognormal about these medians."""
    random = np.random.default_rng(0)
    rollouts = []
    for number in range(num_groups):
        beginning = make_prompt(str(number), 1 + int(random.lognormal(np.log(prompt), 0.5)))
        lengths = 1 + random.lognormal(np.log(completion), 1.0, size=siblings).astype(int)
        rollouts += [sibling(beginning, [n], group=str(number), index=index) for index, n in enumerate(lengths.tolist())]
    return rollouts


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [4096, 16384])
def test_passes_are_full(budget: int, share: bool) -> None:
    """But for the emptiest, which holds what is left, and for rollouts that are longer than the budget."""
    rollouts = long_tail(48, siblings=8, prompt=150, completion=300)
    lengths = list(map(len, rollouts))
    totals = [sum(num_rows(unit, lengths) for unit in units) for units in plan_passes(rollouts, budget=budget, share=share)]
    kept = sorted(total for total in totals if total <= budget)[1:]
    assert len(kept) > 8
    assert sum(kept) / (budget * len(kept)) > 0.98


def test_siblings_stay_together_but_for_filling() -> None:
    rollouts = long_tail(48, siblings=8, prompt=150, completion=300)
    lengths = list(map(len, rollouts))
    least = sum(lengths) - sum(7 * int(rollouts[first].loss_mask.argmax()) for first in range(0, len(rollouts), 8))
    rows = sum(num_rows(unit, lengths) for units in plan_passes(rollouts, budget=16384) for unit in units)
    assert least <= rows < 1.05 * least < 0.85 * sum(lengths)


def test_siblings_too_long_for_a_pass_are_parted_with_their_prefix() -> None:
    prompt = make_prompt("p", 30)
    rollouts = [sibling(prompt, [length], group="g", index=length) for length in (40, 39, 10, 9, 8, 90)]
    passes = plan_passes(rollouts, budget=110)
    assert sorted(passes, key=members_of) == [[Unit((0, 1), 30)], [Unit((2, 3, 4), 30)], [Unit((5,))]]


def test_prompts_that_differ_share_what_saves_most() -> None:
    one, other = make_prompt("one", 20), make_prompt("other", 20)
    near = [*one[:15], 3, 3]
    many = [one, other, near, one, other, one]
    rollouts = [sibling(prompt, [4], group="g", index=index) for index, prompt in enumerate(many)]
    (units,) = plan_passes(rollouts, budget=1000)
    assert units == [Unit((0, 2, 3, 5), 15), Unit((1, 4), 20)]  # 3 × 15 rows saved, where one's prompt alone would save 2 × 20


def test_experts_must_be_the_same_too() -> None:
    prompt = make_prompt("p", 10)
    routing = np.arange(14 * 2 * 3, dtype=np.uint8).reshape(14, 2, 3)
    moved = routing.copy()
    moved[6, 1, 2] = 99
    records = [routing, routing, None, moved, routing.astype(np.int16)]
    rollouts = [sibling(prompt, [4], group="g", index=index, routing=each) for index, each in enumerate(records)]
    assert plan_passes(rollouts[:3], budget=1000) == [[Unit((0, 1), 10), Unit((2,))]]
    assert plan_passes([rollouts[0], *rollouts[3:]], budget=1000) == [[Unit((0, 1), 6), Unit((2,))]]


def test_of_passes_with_equal_room_that_with_less_attention_is_filled() -> None:
    lengths = [80, 40, 40, 15]
    rollouts = [Rollout.from_prompt(np.ones(length), id=str(index)) for index, length in enumerate(lengths)]
    assert list(map(members_of, plan_passes(rollouts, budget=100))) == [[0], [1, 2, 3]]
    assert num_pairs(Unit((0,)), lengths) > num_pairs(Unit((1, 2)), lengths) > num_pairs(Unit((1, 2), 30), lengths)
