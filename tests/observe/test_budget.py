"""The time budget: shares that sum to one, and a verdict that is right."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from helpers import small_run

from headrace.engine.native.core import EngineCore
from headrace.observe import Observer, Signal, Timeline, bound_by
from headrace.observe.screen import PlainLines, budget_table
from headrace.observe.timeline import WAITING, Slice
from headrace.trainer import DeviceTrainer


def test_shares_sum_to_one_whatever_happens(clock) -> None:
    slices: list[Slice] = []
    timeline = Timeline("engine", on_slice=lambda track, piece: slices.append(piece))
    timeline.start()
    for state in ("decode", "swap", "wait-weights", "decode"):
        timeline.enter(state)
        clock.sleep(4.0)
    timeline.split("prefill", share=0.25)
    with timeline.during("swap"):
        clock.sleep(4.0)
    shares = timeline.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    expected_seconds = {"decode": 7.0, "swap": 8.0, "wait-weights": 4.0, "prefill": 1.0}
    assert {state: 20 * share for state, share in shares.items() if share} == pytest.approx(expected_seconds)
    timeline.end()
    assert sum((Counter(piece.seconds) for piece in slices), Counter()) == pytest.approx(expected_seconds)
    assert all(before.stop == pytest.approx(after.start) for before, after in itertools.pairwise(slices))


async def test_runnable_but_descheduled_is_told_apart_from_waiting(clock) -> None:
    timeline, signal = Timeline("trainer"), Signal()
    timeline.start()

    async def waiter() -> None:
        await timeline.wait("wait-batch", signal)

    task = asyncio.ensure_future(waiter())
    await asyncio.sleep(0)
    clock.sleep(1.0)
    signal.set()
    clock.sleep(2.0)  # the point: somebody else holds the thread
    await task
    shares = timeline.shares()
    assert shares["wait-batch"] == pytest.approx(1 / 3) and shares["descheduled"] == pytest.approx(2 / 3)


def taking(seconds: float, function, clock):
    """The function, which takes so long by the clock of the timelines and no time at all besides."""

    def timed(*arguments, **keywords):
        clock.sleep(seconds)
        return function(*arguments, **keywords)

    return timed


@pytest.mark.parametrize("role", ["engine", "trainer", "scorer"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_verdict_names_the_slow_role(tmp_path, monkeypatch, clock, role, max_lag) -> None:
    seconds = {"engine": 0.003, "trainer": 0.04, "scorer": 0.001}
    seconds[role] *= 10
    monkeypatch.setattr(EngineCore, "step", taking(seconds["engine"], EngineCore.step, clock))
    forward_backward = taking(seconds["trainer"], DeviceTrainer.forward_backward, clock)
    monkeypatch.setattr(DeviceTrainer, "forward_backward", forward_backward)

    def reward(prompts, completions, **columns):
        clock.sleep(seconds["scorer"] * len(prompts))
        return [float(len(text)) for text in completions]

    result = small_run(tmp_path / "run", reward=reward, held_out=None, steps=4, staleness={"max_lag": max_lag})
    assert result.summary["bound_by"] == role and result.summary["bound_share"] > 0.5
    working = {name: 1 - sum(shares.get(s, 0) for s in WAITING) for name, shares in result.summary["time_budget"].items()}
    assert sum(working.values()) < 1.02, "one thread: while one role is at work no other is"
    for shares in result.summary["time_budget"].values():
        assert sum(shares.values()) == pytest.approx(1.0)


def test_bound_by_counts_work_not_waiting() -> None:
    budget = {
        "engine": {"decode": 0.3, "wait-gate": 0.2, "descheduled": 0.5},
        "trainer": {"compute": 0.5, "publish": 0.1, "wait-batch": 0.4},
        "scorer": {"score": 0.1, "wait": 0.9},
    }
    assert bound_by(budget) == ("trainer", pytest.approx(0.6))
    assert "bound by trainer: at work 60%" in budget_table(budget)[-1]


def test_a_sink_that_fails_does_not_stop_the_run(tmp_path, capsys) -> None:
    observer = Observer(tmp_path, screen=PlainLines(steps=3))
    row = {"reward": 0.5, "tokens_per_second": 1.0, "lag_mean": 0.0, "lag_max": 0}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    observer._sinks[0].write = full
    observer.version(1, row)
    observer.version(2, row)
    said = capsys.readouterr().out
    assert said.count("JsonLines is no longer written") == 1 and "step 2" in said
