"""The delta's benchmark takes real steps and finds the learning rate its goals are set for."""

from __future__ import annotations

import pytest

from headrace.bench import sync_delta
from headrace.bench.loads import SMALL


def case(learning_rate: float, changed: float) -> sync_delta.Case:
    seconds = {"encode": 0.3, "apply": 0.1, "copy": 0.1}
    return sync_delta.Case(learning_rate, round(changed * 10**6), changed, 2 * 10**6, 10**4, seconds)


def test_a_larger_learning_rate_changes_more_weights_and_makes_a_larger_delta() -> None:
    steps = sync_delta._Steps(None, {**SMALL, "num_hidden_layers": 1})
    steps.step(1e-5)
    slow, fast = (sync_delta._measure_case(steps, rate, 1) for rate in (3e-7, 1e-5))
    assert 0 < slow.changed < fast.changed < 0.5
    assert slow.num_bytes < fast.num_bytes < fast.full_bytes / 2


@pytest.mark.parametrize("seen", [(0.001, 0.1), (0.001, 0.002, 0.03), (0.01, 0.03)])
def test_the_learning_rate_for_one_percent_is_between_those_seen(seen: tuple[float, ...]) -> None:
    cases = [case(share / 1000, share) for share in seen]  # a share of 1 % is at 1e-5
    assert sync_delta._rate_for(cases, 0.01) == pytest.approx(1e-5, rel=1e-3)


def test_figures_and_their_goals() -> None:
    rows = sync_delta._rows("a model", case(1e-6, 0.01), {"ratio": "≥ 120", "speed": "≥ 0.25"})
    assert {row.goal: row.value for row in rows if row.goal} == {"≥ 120": 200, "≥ 0.25": pytest.approx(0.25)}
    assert not any(row.goal for row in sync_delta._rows("a model", case(1e-6, 0.01), {}))
