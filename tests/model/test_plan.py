"""Planning passes: every rollout once, within the budget, and hardly any room left."""

from __future__ import annotations

import numpy as np

from headrace.model.plan import members_of, plan_passes
from headrace.types import Rollout


def test_passes_cover_everything_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, size=300).astype(int) + 1
    rollouts = [Rollout.from_prompt(np.ones(length), id=str(index)) for index, length in enumerate(lengths)]
    passes = [members_of(units) for units in plan_passes(rollouts, budget=1000)]
    assert sorted(member for members in passes for member in members) == list(range(300))
    totals = [int(lengths[members].sum()) for members in passes]
    assert all(total <= 1000 or len(members) == 1 for total, members in zip(totals, passes, strict=True))
    assert sum(min(total, 1000) for total in totals) / (1000 * len(passes)) > 0.9
