"""Gates as objects: AReaL's capacity and ROLL's fraction are the depth gate; slots count episodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from strategies import quick
from test_staleness import simulate

from headrace.config import make_recipe
from headrace.staleness import make_gate
from headrace.staleness.gate import GATES, DepthGate, SlotsGate


@given(
    staleness=st.integers(0, 5), version=st.integers(0, 20), batch=st.integers(1, 8), accepted=st.integers(0, 200),
    running=st.integers(0, 60), rejected=st.integers(0, 20),
)  # fmt: skip
@quick
def test_areals_capacity_is_the_depth_gate(
    staleness: int, version: int, batch: int, accepted: int, running: int, rejected: int
) -> None:
    """AReaL submits while (η + version + 1)·B − accepted − running > 0. What was accepted or is running is what was submitted
    and not dropped."""
    capacity = (staleness + version + 1) * batch - accepted - running
    gate = DepthGate(depth=staleness, groups_per_batch=batch, steps=10**6)
    submitted = accepted + running + rejected
    assert gate.is_open(version=version, submitted=submitted, dropped=rejected) == (capacity > 0)


@given(st.sampled_from([0.25, 0.5, 1.3, 2.75]), st.integers(1, 5), st.integers(1, 10), st.integers(0, 2**32))
@quick
def test_a_fraction_lets_that_share_of_a_batch_run_ahead(depth: float, batch: int, steps: int, seed: int) -> None:
    """ROLL's α: in order of submission no lag exceeds ⌈α⌉, where rejection begins."""
    gate = DepthGate(depth=depth, groups_per_batch=batch, steps=steps + 9)
    submitted = next(count for count in range(999) if not gate.is_open(version=0, submitted=count, dropped=0))
    assert submitted == math.floor((1 + depth) * batch + 1e-9)
    assert max(simulate(depth=depth, batch=batch, steps=steps, seed=seed).lags) <= math.ceil(depth)


def test_a_fraction_uses_what_it_may() -> None:
    lags = {depth: [max(simulate(depth=depth, batch=4, steps=12, seed=seed).lags) for seed in range(8)] for depth in (0.5, 1)}
    assert max(lags[0.5]) == max(lags[1]) == 1


def test_slots_count_episodes() -> None:
    sizes = {"train.batch": 32, "train.group_size": 8, "steps": 100}
    gate = make_gate(make_recipe({**sizes, "staleness.gate": "slots", "staleness.slots": 1.5}))
    assert isinstance(gate, SlotsGate) and gate.episodes == 48
    assert gate.is_open(version=0, submitted=5, dropped=0, unfinished=40)
    assert not gate.is_open(version=0, submitted=5, dropped=0, unfinished=41), "a whole group must fit"
    assert gate.is_open(version=0, submitted=99, dropped=0, unfinished=0), "it bounds no lag"
    assert not gate.is_open(version=99, submitted=400, dropped=0, unfinished=0), "the run has no step for it"


@pytest.mark.parametrize("name", list(GATES))
def test_every_gate_is_made_and_described(name: str) -> None:
    recipe = make_recipe({"staleness.gate": name, "staleness.max_lag": 2})
    gate = make_gate(recipe)
    assert isinstance(gate, GATES[name]) and gate.is_open(version=0, submitted=0, dropped=0)
    assert any(row.startswith("gate ") for row in recipe.derivation())
    turns = make_gate(make_recipe({"staleness": {"gate": name, "max_lag": 2}, "buffer.kind": "synchronous"}))
    assert turns.depth == 0, "engines and trainer take turns whatever the gate"


def test_auto_starts_two_batches_ahead_and_is_bounded_by_its_limit() -> None:
    recipe = make_recipe({"staleness.max_lag_limit": 4})
    assert (make_gate(recipe).depth, make_gate(recipe, depth=2.5).depth, recipe.max_lag) == (2, 2.5, 4)
    inline = make_recipe({"orchestrate": "inline"})
    assert make_gate(inline).depth == inline.max_lag == 1
    (said,) = [row for row in inline.derivation() if row.startswith("gate")]
    assert "'auto' is 1 with orchestrate = 'inline'" in said
    ungated = make_recipe({"staleness.gate": "none"})
    assert make_gate(ungated).depth is None and ungated.max_lag == 8, "rejection has a bound all the same"


def test_without_a_gate_the_slots_are_kept_busy_and_stragglers_hold_none() -> None:
    """Three engines of 8 slots and batches of 4 groups of 4: 48 episodes may be unfinished, of however many groups."""
    sizes = {"train.batch": 16, "train.group_size": 4, "engine.slots": 8, "engine.count": 3}
    gate = make_gate(make_recipe({**sizes, "staleness.gate": "none", "staleness.reject": "never"}))
    assert gate.is_open(version=0, submitted=40, dropped=0, unfinished=47)
    assert not gate.is_open(version=0, submitted=40, dropped=0, unfinished=48)
    assert gate.counts_episodes, "it may open when an episode ends, though its group is not complete"
