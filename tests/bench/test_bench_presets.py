"""The emulated cluster: its clock, its costs and its bound, behind the real loops."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from headrace.bench.emulated import emulate
from headrace.bench.emulated_load import Load
from headrace.bench.presets import LOADS
from headrace.bench.virtual_time import run_virtually

SMALL = {
    "engines": 2,
    "slots": 8,
    "groups_per_batch": 4,
    "group_size": 4,
    "warm_versions": 2,
    "versions": 8,
    "last_versions": 4,
}
LOAD = dataclasses.replace(LOADS[0], **SMALL, training=1.3)


def lagging(depth: float, interrupt: str = "keep", **more: object) -> dict[str, object]:
    return {"staleness.max_lag": depth, "staleness.reject": "never", "partial.interrupt": interrupt, **more}


def test_an_hour_takes_no_time_and_every_clock_agrees() -> None:
    async def main() -> list[tuple[float, ...]]:
        seen = []
        async with asyncio.timeout(4000):
            for seconds in (3600, 0, 0.5):
                await asyncio.sleep(seconds)
                seen.append((time.monotonic(), time.perf_counter(), asyncio.get_running_loop().time()))
        return seen

    before = time.monotonic()
    assert run_virtually(main()) == [(3600,) * 3, (3600,) * 3, (3600.5,) * 3]
    assert 0 <= time.monotonic() - before < 60


def test_an_idle_trainer_lends_its_device_and_a_busy_one_does_not() -> None:
    load = dataclasses.replace(LOAD, engines=1, slots=4, training=0.4, transfer_seconds=0.5, versions=20)
    lent, alone = (emulate(load, lagging(3, "abort", **{"engine.lend": lends})) for lends in (True, False))
    assert alone.share < 1.02 and 1.1 < lent.share / alone.share < load.lending_bound / load.bound
    busy = [emulate(LOAD, lagging(3, **{"engine.lend": lends, "train.stream_parts": 1})) for lends in (True, False)]
    assert busy[0] == busy[1], "it never waits"


def test_what_nothing_will_ever_wake_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing can wake"):
        run_virtually(asyncio.Event().wait())


def test_rollouts_of_one_length_in_turn_take_what_arithmetic_says() -> None:
    load = dataclasses.replace(LOAD, sigma=0.0, transfer_seconds=0.0, swap_seconds=0.0, offer_seconds=0.0, score_seconds=0.0)
    found = emulate(load, {"staleness.max_lag": 0})
    training = load.batch * 512 / load.training_rate  # 16 rollouts in 16 slots take 512 steps
    assert found.share == pytest.approx(training / (training + 512 * load.decode_seconds), rel=1e-3)
    assert found.trainer_idle == pytest.approx(1 - found.share, abs=1e-3) and found.lag_mean == found.lag_max == 0


def test_running_ahead_reaches_the_bound_and_costs_lag() -> None:
    ahead, more, in_turn = (emulate(LOAD, lagging(depth)) for depth in (3, 6, 0))
    assert in_turn.share < 0.6 < 0.97 < ahead.share <= 1.001 and ahead.trainer_idle < 0.03
    assert 1 < ahead.lag_mean < more.lag_mean and in_turn.lag_mean == 0


def test_what_an_interrupt_costs() -> None:
    """The bound is the engines', so that what they lose shows."""
    load = dataclasses.replace(LOAD, training=0.8, slots=4)
    found = {name: emulate(load, lagging(4, name)) for name in ("keep", "drain", "abort", "retract")}
    found["lease"] = emulate(load, lagging(4, "lease", **{"lora.rank": 8}))
    assert found["keep"].stall == found["lease"].stall == pytest.approx(load.swap_seconds)
    assert found["keep"].stall < min(found["abort"].stall, found["retract"].stall) < found["drain"].stall
    assert found["drain"].share < found["retract"].share < found["keep"].share
    assert found["lease"].lag_mean > found["keep"].lag_mean  # it samples with the weights it began with


def test_cancelled_and_rejected_tokens_are_wasted() -> None:
    load = dataclasses.replace(LOAD, sigma=1.0, slots=12)
    assert emulate(load, lagging(3)).wasted == 0
    strict = {"staleness.max_lag": 1.5, "staleness.reject": "oldest"}
    assert emulate(load, strict).wasted > 0
    assert emulate(load, {**strict, "partial.cancel": "over_age", "staleness.max_lag": 1}).wasted > 0


def test_a_load_states_its_bound() -> None:
    load = Load(name="", sigma=0.5, training=1.25, engines=2, slots=50, decode_seconds=0.1)
    assert (load.generation_rate, load.training_rate, load.bound) == (1000, 800, 800)
    assert dataclasses.replace(load, training=0.5).bound == 1000
    assert load.lengths.max() <= load.max_tokens and 450 < load.lengths.mean() < 530
