"""Which groups `[filter]` drops."""

from __future__ import annotations

import pytest

from headrace.algorithms import FilterSettings, unwanted

TIED, SOLVED, MIXED = [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "groups", "dropped"),
    [
        ({}, [TIED, SOLVED, MIXED], []),
        ({"max_tied": 0.0}, [TIED, MIXED, SOLVED, MIXED], [0, 2]),
        ({"max_tied": 0.0}, [[0.5], [0.5]], []),  # one rollout has nothing to be compared with
        ({"max_tied": 0.5}, [TIED, SOLVED, TIED, MIXED, MIXED], [2]),  # two of a batch of four may be tied
        ({"max_tied": 0.5}, [TIED, MIXED, MIXED, MIXED, SOLVED, TIED, SOLVED], [6]),  # each batch has its own share
        ({"max_tied": 0.29, "max_draws": 2}, [TIED, TIED], [1]),  # rounded down: one of four
        ({"min_reward": 0.2}, [TIED, SOLVED, MIXED, [0.0, 0.1]], [0, 3]),
        ({"max_reward": 0.5}, [TIED, SOLVED, MIXED], [1]),
        ({"min_reward": 0.5, "max_reward": 0.5}, [TIED, SOLVED, MIXED], [0, 1]),
    ],
)
def test_what_is_dropped(settings: dict, groups: list, dropped: list[int]) -> None:
    assert list(unwanted(groups, FilterSettings(**settings), batch=4)) == dropped


def test_no_more_are_dropped_than_the_bound_allows() -> None:
    settings = FilterSettings(max_tied=0.0)
    assert list(unwanted([TIED, MIXED, TIED, TIED], settings, batch=4, most=2)) == [0, 2]
    assert not unwanted([TIED], settings, batch=4, most=0)


def test_every_reason_is_named() -> None:
    reasons = unwanted([TIED, [0.0, 0.1], [1.0, 0.9]], FilterSettings(max_tied=0.0, min_reward=0.2, max_reward=0.8), batch=4)
    assert [reason.partition(":")[0] for reason in reasons.values()] == ["tied", "too hard", "too easy"]
