"""Time budgets of roles in other processes: nothing is lost or counted twice on the way to the launcher."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from headrace.observe import MirroredTimeline, ProcessTimeline
from headrace.observe.timeline import STATES, Slice


def report(role: str = "trainer", *, occupied: int = 0, slots: int = 0, slices: Any = (), **totals: float) -> dict[str, Any]:
    """Seconds by state; `wait_batch` is `wait-batch`."""
    named = {state.replace("_", "-"): seconds for state, seconds in totals.items()}
    return {"totals": dict.fromkeys(STATES[role], 0.0) | named, "occupied": occupied, "slots": slots, "slices": slices}


def seconds(timeline: MirroredTimeline) -> dict[str, float]:
    return {state: total for state, total in timeline.totals.items() if total}


# In the process


def test_a_report_holds_all_time_so_far_each_moment_once(clock):
    timeline = ProcessTimeline("engine")
    for state in ("decode", "wait-gate", "decode"):
        timeline.enter(state)
        clock.sleep(8.0)
    timeline.split("prefill", share=0.5)
    with timeline.during("swap"):
        clock.sleep(1.0)
        told = timeline.report()
        assert told["state"] == "swap" and told["totals"]["swap"] == 1.0
        clock.sleep(2.0)
    told = timeline.report()
    expected = {"decode": 12.0, "wait-gate": 8.0, "prefill": 4.0, "swap": 3.0}
    assert {state: total for state, total in told["totals"].items() if total} == expected and told["state"] == "decode"
    assert [*told["slices"][-1].seconds] == ["decode"] and told["slices"][-1].stop == clock.now - 3.0
    clock.sleep(1.0)
    timeline.enter("wait-gate")
    assert [[*piece.seconds] for piece in timeline.report()["slices"]] == [["swap"]], "slices are told once"


@pytest.fixture
def nervous():
    """Threads take turns far more often than they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_reports_from_another_thread_neither_lose_nor_double_time(nervous):
    """Every single one sums to the time that has passed."""
    timeline = ProcessTimeline("engine")
    began, is_over = timeline._since, threading.Event()

    def work() -> None:
        while not is_over.is_set():
            for state in ("decode", "wait-gate", "wait-weights"):
                timeline.enter(state)
                time.sleep(0.0002)
                timeline.split("prefill", share=0.5)
                timeline.count(occupied=1, slots=2)

    thread = threading.Thread(target=work)
    thread.start()
    descheduled, wrong, slices = 0.0, [], []
    for _ in range(2000):
        earliest = time.perf_counter()
        told = timeline.report()
        latest, total = time.perf_counter(), sum(told["totals"].values())
        if not earliest - 1e-6 <= began + total <= latest + 1e-6:
            wrong.append((earliest - began, total, latest - began))
        if told["totals"]["descheduled"] < descheduled - 1e-6:
            wrong.append((descheduled, told["totals"]["descheduled"]))
        descheduled = told["totals"]["descheduled"]
        slices += told["slices"]
    is_over.set()
    thread.join()
    slices += timeline.report()["slices"]
    assert not wrong, wrong[:5]
    assert all(abs(first.stop - second.start) < 1e-9 for first, second in itertools.pairwise(slices)), "a slice is missing"
    assert all(sum(piece.seconds.values()) == pytest.approx(piece.stop - piece.start) for piece in slices)


BUSY = """
import os, subprocess, sys, threading, time
from headrace.observe import ProcessTimeline
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
timeline = ProcessTimeline("engine")
def waited():
    return int(open(f"/proc/self/task/{threading.get_native_id()}/schedstat").read().split()[1]) / 1e9
def work():
    timeline.enter("decode")
    began, before = time.perf_counter(), waited()
    while waited() - before < 0.1:
        pass
    half.set()
    while waited() - before < 0.2 or not told.is_set():
        pass
    facts.extend([time.perf_counter() - began, waited() - before])
    timeline.enter("wait-gate")
half, told, facts = threading.Event(), threading.Event(), []
thread = threading.Thread(target=work)
thread.start()
half.wait()
during = timeline.report()["totals"]["descheduled"]
told.set()
thread.join()
busy.kill()
totals = timeline.report()["totals"]
print(during, totals["decode"] + totals["descheduled"], totals["descheduled"], *facts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a thread has waited for a processor")
def test_waiting_for_the_processor_is_no_work():
    """Two that want one core wait for each other; the system's count of that is told apart, also before the state ends."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=True)
    during, in_state, descheduled, passed, waited = map(float, done.stdout.split())
    assert descheduled == pytest.approx(waited, rel=0.1) and in_state == pytest.approx(passed, rel=0.1)
    assert 0.09 < during < descheduled < in_state


# At the launcher


def test_windows_begin_at_start_and_processes_add_up():
    timeline = MirroredTimeline("engine")
    timeline.take("engine-0", report("engine", decode=5, wait_gate=1, occupied=10, slots=20))
    timeline.take("engine-1", report("engine", decode=1, swap=1, occupied=5, slots=20))
    assert seconds(timeline) == {"decode": 6, "wait-gate": 1, "swap": 1}
    timeline.start()
    assert seconds(timeline) == {} and timeline.shares()["wait-gate"] == 1.0
    timeline.take("engine-0", report("engine", decode=7, wait_gate=2, occupied=30, slots=40))
    timeline.take("engine-1", report("engine", decode=1, swap=2, occupied=5, slots=40))
    assert seconds(timeline) == {"decode": 2, "wait-gate": 1, "swap": 1}
    assert (timeline.occupied, timeline.slots) == (20, 40)
    shares = timeline.shares()
    assert sum(shares.values()) == pytest.approx(1) and shares["decode"] == 0.5


def test_what_a_process_reported_still_counts_when_it_is_gone_and_one_of_its_name_begins_anew():
    timeline = MirroredTimeline("engine")
    timeline.take("engine-0", report("engine", decode=5, slots=10))
    timeline.start()
    timeline.take("engine-0", report("engine", decode=8, slots=16))
    timeline.forget("engine-0")
    timeline.forget("engine-0")
    assert seconds(timeline) == {"decode": 3}
    timeline.take("engine-0", report("engine", decode=1, slots=2))
    assert seconds(timeline) == {"decode": 4} and timeline.slots == 8


def test_slices_are_passed_on_once_and_each_process_has_a_track():
    shown = []
    timeline = MirroredTimeline("engine", on_slice=lambda *each: shown.append(each))
    slices = [Slice(0.0, 1.0, {"decode": 0.75, "prefill": 0.25})]
    for name in ("engine-0", "engine-1"):
        timeline.take(name, report("engine", decode=1, slices=slices))
        timeline.take(name, report("engine", decode=1))
    timeline.start()
    assert shown == [("engine-0", slices[0]), ("engine-1", slices[0])]


def test_ranks_that_are_not_counted_have_a_track_and_are_forgotten_with_the_others():
    shown = []
    timeline = MirroredTimeline("trainer", on_slice=lambda *each: shown.append(each[0]))
    slices = [Slice(0.0, 1.0, {"compute": 1.0})]
    timeline.take("trainer-1", report(compute=1, slices=slices), is_counted=False)
    timeline.forget("trainer-1")
    timeline.take("trainer-0", report(compute=1, slices=slices))
    timeline.forget("trainer-0")
    timeline.start()
    timeline.take("trainer-0", report(compute=3))
    assert seconds(timeline) == {"compute": 3} and shown == ["trainer-1", "trainer-0"]


def test_a_thousand_restarts_are_remembered_as_one():
    timeline = MirroredTimeline("engine")
    for _ in range(1000):
        timeline.take("engine-0", report("engine", decode=1, slots=2))
        timeline.forget("engine-0")
    assert seconds(timeline) == {"decode": 1000} and timeline.slots == 2000 and len(timeline._reports) == 1


def test_waiting_for_an_evaluation_is_told_apart_from_waiting_for_a_batch(clock):
    timeline = MirroredTimeline("trainer")
    timeline.take("trainer", report(compute=1, wait_batch=1))
    timeline.start()
    with timeline.during("evaluate"):
        clock.sleep(0.5)
    timeline.take("trainer", report(compute=2, wait_batch=3))
    assert seconds(timeline) == {"compute": 1.0, "evaluate": 0.5, "wait-batch": 1.5}
    assert sum(timeline.shares().values()) == pytest.approx(1)


def test_what_the_trainer_does_during_an_evaluation_is_not_counted_twice(clock):
    """It publishes while the evaluation waits for that: of those seconds only the idle ones are the evaluation's."""
    timeline = MirroredTimeline("trainer")
    timeline.start()
    with timeline.during("evaluate"):
        clock.sleep(0.05)
    timeline.take("trainer", report(publish=0.04, wait_batch=0.01))
    assert seconds(timeline) == pytest.approx({"publish": 0.04, "evaluate": 0.01})
    with timeline.during("publish"):  # its own work it reports itself
        clock.sleep(0.01)
    assert sum(seconds(timeline).values()) == pytest.approx(0.05)
