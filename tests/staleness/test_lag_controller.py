"""`max_lag = "auto"` against simulated engines, rewards and trainers: the trainer stays busy with the least lag."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import fmean

import pytest
from pipeline import Pipeline

from headrace.staleness import LagController, Observation

LAST = slice(-40, None)


def controlled(pipeline: Pipeline, *, versions: int = 100, limit: int = 8) -> LagController:
    sizes = {"groups_per_batch": pipeline.batch, "parts": pipeline.parts}
    controller = LagController(**sizes, limit=limit, start=1.0, shares_device=pipeline.shares_device)
    pipeline.run(controller, versions=versions)
    return controller


def at_depth(pipeline: Pipeline, depth: float) -> float:
    """Seconds a version takes with a fixed depth."""
    fixed = replace(pipeline)
    fixed.run(versions=40, depth=depth)
    return fmean(fixed.periods[10:])


def moves(depths: list[float]) -> int:
    return sum(before != after for before, after in itertools.pairwise(depths))


@pytest.mark.parametrize(
    ("pipeline", "least"),
    [
        (Pipeline(generate=0.3), 1.0),
        (Pipeline(generate=1.5), 2.0),
        (Pipeline(generate=3.9), 4.0),
        (Pipeline(generate=0.5, reward=2.0), 3.0),
        (Pipeline(generate=1.0, sigma=1.0), 1.5),
        (Pipeline(generate=1.5, sigma=1.0, slots=32, seed=3), 2.0),
        (Pipeline(generate=1.0, sigma=1.0, parts=4), 0.75),
    ],
    ids=["slow trainer", "balanced", "slow engines with slots", "slow reward", "long tail", "longer tail", "tail in parts"],
)
def test_the_trainer_is_kept_busy_with_the_least_lag(pipeline: Pipeline, least: float) -> None:
    """`least`: the smallest depth, of whole and half versions, with which it is about busy."""
    assert at_depth(pipeline, least) < 1.12 * pipeline.train < at_depth(pipeline, least - 0.5)
    controlled(pipeline)
    assert fmean(pipeline.idle[LAST]) < 0.03
    assert least <= pipeline.depths[-1] <= least + 0.5
    assert fmean(pipeline.lags[LAST]) <= least + 0.5


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(generate=3.0, slots=16),
        Pipeline(rate=10.0),
        Pipeline(generate=0.5, reward=2.0, scorers=16),
        Pipeline(generate=2.0, sigma=1.0, slots=16),
    ],
    ids=["slots", "processor", "reward", "slots and a long tail"],
)
def test_lag_is_not_spent_where_something_else_bounds_the_run(pipeline: Pipeline) -> None:
    fastest = at_depth(pipeline, 8)
    controlled(pipeline, versions=120)
    assert fmean(pipeline.periods[LAST]) < 1.06 * fastest, "as fast as with all the lag there is"
    assert fmean(pipeline.lags[LAST]) < 2.5


def test_too_many_ahead_of_full_engines_are_taken_back() -> None:
    pipeline = Pipeline(generate=3.0, slots=16)
    controller = LagController(groups_per_batch=16, limit=8, start=8.0)
    pipeline.run(controller, versions=80)
    assert pipeline.depths[0] == 8 and controller.depth <= 1.25 and "slots are full" in controller.why


@pytest.mark.parametrize(
    ("before", "after", "depths"),
    [
        ({"generate": 0.3}, {"generate": 3.0}, (1, 3)),
        ({"generate": 3.0}, {"generate": 0.3}, (3, 1)),
        ({"generate": 2.0}, {"train": 3.0}, (2, 1)),
        ({"generate": 0.5}, {"reward": 2.0}, (1, 3)),
    ],
    ids=["slower engines", "faster engines", "slower trainer", "slower reward"],
)
def test_rates_that_change_in_the_middle_are_followed(before: dict, after: dict, depths: tuple[int, int]) -> None:
    pipeline = Pipeline(**before)
    controller = controlled(pipeline, versions=60)
    assert controller.depth == depths[0]
    for name, value in after.items():
        setattr(pipeline, name, value)
    pipeline.run(controller, versions=60)
    assert controller.depth == depths[1] and moves(pipeline.depths[-30:]) == 0
    assert fmean(pipeline.idle[-30:]) < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_it_settles(seed: int) -> None:
    """On a long tail no two versions are the same; still the depth moves seldom, and little."""
    pipeline = Pipeline(generate=1.0, sigma=1.0, seed=seed)
    controlled(pipeline, versions=160)
    last = pipeline.depths[-80:]
    assert moves(last) <= 6 and max(last) - min(last) <= 0.75


def test_one_device_is_taken_in_turn_where_side_by_side_gains_nothing() -> None:
    pipeline = Pipeline(rate=16.0, shares_device=True)
    controller = controlled(pipeline)
    assert set(pipeline.depths[LAST]) == {0.0} and set(pipeline.lags[LAST]) == {0.0}
    assert controller.why == "side by side gains less than 3% on a shared device, so engines and trainer take turns"
    assert controller.news().startswith("depth 0.00 versions (0 groups ahead): side by side gains") and not controller.news()


def test_one_device_is_shared_where_a_long_tail_leaves_it_idle() -> None:
    pipeline = Pipeline(generate=3.0, sigma=1.0, shares_device=True)
    controlled(pipeline)
    assert at_depth(pipeline, 0) > 2 * fmean(pipeline.periods[LAST])
    assert fmean(pipeline.lags[LAST]) > 1


def test_the_limit_is_never_passed() -> None:
    pipeline = Pipeline(generate=6.0)
    controller = controlled(pipeline, limit=2)
    assert max(pipeline.depths) == controller.depth == 2 and "max_lag_limit is reached" in controller.why


def test_a_slow_disk_now_and_then_moves_nothing() -> None:
    steady = Observation(seconds=1.0, waited=0.01, held=0.1, complete=16, arrivals=(), queued=0, latency=0.5)
    controller = LagController(groups_per_batch=16, limit=8, start=1.0)
    for number in range(100):
        controller.observe(replace(steady, seconds=3.0, waited=0.0) if number % 10 == 9 else steady)
        assert controller.depth == 1


def test_a_resumed_run_goes_on_with_its_depth() -> None:
    pipeline = Pipeline(generate=3.0)
    before = controlled(pipeline, versions=40)
    resumed = LagController(groups_per_batch=16, limit=8, start=1.0)
    resumed.restore(before.state())
    assert resumed.depth == before.depth == 3 and resumed.why == before.why
    pipeline.run(resumed, versions=30)
    assert set(pipeline.depths[-30:]) == {3}
    lower = LagController(groups_per_batch=16, limit=2, start=1.0)
    lower.restore(before.state())
    assert lower.depth == 2, "the limit may have been lowered meanwhile"


def test_what_fewer_ahead_would_cost_follows_from_what_was_left_and_what_came() -> None:
    seen = Observation(seconds=1.0, waited=0.0, held=0.0, complete=18, arrivals=(0.1, 0.4), queued=0, latency=1.0)
    assert [seen.wait_with(fewer, parts=[16]) for fewer in range(6)] == [0, 0, 0, 0.1, 0.4, 1.0]
    short = replace(seen, complete=15, waited=0.1)
    assert [short.wait_with(fewer, parts=[16]) for fewer in (-1, 0, 1, 2)] == [0, 0.1, 0.4, 1.0]


def test_of_a_batch_in_parts_each_is_waited_for_once_those_before_are_trained() -> None:
    """A part takes 0.25 s."""
    seen = Observation(seconds=1.2, waited=0.2, held=0.0, complete=12, arrivals=(0.1, 0.2, 0.8, 0.9), queued=0, latency=1.0)
    assert [seen.wait_with(fewer, parts=[4] * 4) for fewer in (0, 1, 2)] == pytest.approx([0.15, 0.45, 0.45])
    assert seen.wait_with(3, parts=[4] * 4) == pytest.approx(0.3 + 0.15), "the third part would come after 0.8 s"
    assert seen.wait_with(0, parts=[16]) == 0.9


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fewer", "parts"), [(2, 1), (5, 1), (12, 4), (16, 4)])
def test_the_forecast_of_fewer_ahead_is_what_comes(fewer: int, parts: int, seed: int) -> None:
    pipeline = Pipeline(sigma=1.0, seed=seed, parts=parts)
    observed = list[Observation]()
    pipeline.run(Recorder(2.0, observed), versions=200)
    waited = [each.wait_with(fewer, parts=[16 // parts] * parts) for each in observed[20:]]
    lower = Pipeline(sigma=1.0, seed=seed, parts=parts)
    lower.run(versions=200, depth=2.0 - fewer / 16)
    assert fmean(lower.idle[20:]) == pytest.approx(fmean(waited) / fmean(each.seconds for each in observed[20:]), abs=0.025)


class Recorder:
    """A controller that changes nothing."""

    def __init__(self, depth: float, observed: list[Observation]) -> None:
        self.depth, self.observe = depth, observed.append


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sigma", "generate"), [(0.5, 1.2), (0.8, 0.8), (1.2, 1.0), (1.2, 2.0)])
def test_loads_that_nothing_was_chosen_on(sigma: float, generate: float, seed: int) -> None:
    """As little lag as the least fixed depth, of eighths of a version, at which the trainer waits as little."""
    pipeline = Pipeline(sigma=sigma, generate=generate, seed=seed)
    controlled(pipeline, versions=160)
    idle, lag = fmean(pipeline.idle[-80:]), fmean(pipeline.lags[-80:])
    assert idle < (0.03 if lag < 2 else 0.06)

    def at(depth: float) -> Pipeline:
        fixed = replace(pipeline)
        fixed.run(versions=100, depth=depth)
        return fixed

    least = next(fixed for eighths in range(4, 64) if fmean((fixed := at(eighths / 8)).idle[20:]) <= max(idle, 0.01))
    assert lag <= fmean(least.lags[20:]) + 0.4


def test_batches_of_one_group_move_by_whole_groups() -> None:
    pipeline = Pipeline(batch=1, slots=8, generate=2.5)
    controller = controlled(pipeline, versions=60)
    assert controller.depth == 3 and fmean(pipeline.idle[-20:]) < 0.03
