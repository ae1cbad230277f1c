"""Plain rewards in processes: what hangs or crashes costs its own samples, and nothing outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_rewards import decode, make_episode, make_sample

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, reward_functions
from headrace.records import InfraAbort, Scored
from headrace.score import RewardError, RewardFunction, RewardScorer, RewardSettings, RewardWorkers
from headrace.score.metric_log import MetricLog
from headrace.score.rewards import Failure

REWARDS = """
import asyncio, os, re, signal, subprocess, sys, threading, time

def pid(completion, folder=None):
    # Returns when two processes are in here
    if folder:
        open(os.path.join(folder, str(os.getpid())), "w")
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
    return os.getpid()

def odd(completion, n):
    print("printed by a reward")
    if n == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 3:
        os._exit(7)
    if n == 5:
        raise KeyError("bad")
    return n

def hangs_at_one(completions, n):
    if 1 in n:
        print("started", subprocess.Popen(["sleep", "600"]).pid, flush=True)
        re.match("(a+)+$", "a" * 40 + "b")  # never releases the interpreter
    return n

def with_alarm(completion):
    assert threading.current_thread() is threading.main_thread()
    rang = []
    signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not rang:
        time.sleep(0.005)
    return len(rang)

def sees(completion, prompt, prompt_ids, finish_reason, completion_length, trainer_state, log_metric, *, scale=1):
    log_metric("seen", completion_length)
    right = (prompt, prompt_ids, finish_reason, trainer_state.global_step) == ("ask", [7], "length", 3)
    return scale * float(right)

def sees_episodes(episodes, turns):
    return [
        episode.rollouts[0].token_ids[0] + 0.5 * (turn.text == "text of [52, 60]") + 0.25 * (turn.finish_reason == "stop")
        for episode, (_, turn) in zip(episodes, turns)
    ]

def interrupts(completion, log_metric, n):
    if n == 0:
        raise KeyboardInterrupt("stop")
    if n == 1:
        raise ValueError("half \\udc80")
    if n == 2:
        log_metric("half \\udc80", 1)
    return n

def wrong(completion):
    return "text"

def half(completion):
    return "\\udc80"

def disguised(completion):
    return asyncio.sleep(0)

calls = []

def counts(completion, n):
    calls.append(n)
    print("counts", n)
    if n == 2:
        raise ValueError
    return len(calls)

def sleeps(completion):
    child = subprocess.Popen(["sleep", "600"])
    print("sleeps", os.getpid(), child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def named(tmp_path):
    """A reward of a file, by its name in the file."""
    file = tmp_path / "their_rewards.py"
    file.write_text(REWARDS)

    def find(name: str, /, **own) -> RewardFunction:
        from headrace.imports import import_name

        reference = f"{file}:{name}"
        return RewardFunction(import_name(reference, setting="reward.functions"), reference=reference, **own)

    return find


@contextlib.contextmanager
def pool(num_processes: int = 1, *, timeout: float = 60.0, log=None):
    """Nothing of it is left afterwards."""
    workers = RewardWorkers(timeout=timeout, stacks=log, num_processes=num_processes)
    with contextlib.closing(workers):
        yield workers
        threads = list(workers.processes._workers)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert all(thread.process is None or thread.process.has_ended for thread in threads)


def score(function: RewardFunction, samples, workers: RewardWorkers, *, attempts: int = 1, log=None) -> list:
    return asyncio.run(function.score(samples, attempts=attempts, workers=workers, log=log))


def numbered(count: int) -> list:
    return [make_sample(str(number), n=number) for number in range(count)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_gets_whole_episodes_and_their_turns(named) -> None:
    reward = named("sees_episodes")
    with pool() as workers:
        scorer = RewardScorer([(reward, 1.0)], decode=decode, settings=RewardSettings(), workers=workers)
        scored = asyncio.run(scorer.score([make_episode(2), make_episode(3)]))
    assert [episode.outcome for episode in scored] == [Scored(2.75), Scored(3.25)]


def test_calls_are_spread_over_processes_that_get_what_a_thread_gets_and_may_use_signals(named, tmp_path) -> None:
    log, sample = MetricLog(), make_sample("four", prompt="ask")
    state = type(sample.state)(global_step=3)
    seen = type(sample)(sample.row, "four", [1, 2], prompt_ids=[7], finish_reason="length", state=state)
    with pool(2) as workers:
        (tmp_path / "together").mkdir()
        pids = score(named("pid"), [make_sample(folder=str(tmp_path / "together"))] * 20, workers)
        assert len(set(pids)) == 2 and os.getpid() not in pids
        assert score(named("sees"), [seen, sample], workers, log=log) == [1.0, 0.0]
        assert score(named("sees", name="scaled", options={"scale": 4}), [seen], workers) == [4.0]
        assert score(named("with_alarm"), [sample], workers) == [1.0]
        here = named("pid", processes=False)
        assert score(here, [sample], workers) == [os.getpid()]
    assert log.take() == {"seen": [3.0, 2]}, "logged in a process, added up here"


def test_a_call_that_crashes_or_raises_costs_its_own_sample(named, tmp_path) -> None:
    log = (tmp_path / "log").open("w")
    with log, pool(log=log) as workers:
        results = score(named("odd"), numbered(7), workers)
    assert [each for each in results if not isinstance(each, Failure)] == [0.0, 2.0, 4.0, 6.0]
    killed, exited, raised = (results[index].reason for index in (1, 3, 5))
    assert killed == "reward 'odd': its process was killed by SIGKILL"
    assert exited == "reward 'odd': its process ended with status 7"
    assert raised.startswith("reward 'odd' raised KeyError: 'bad', in ") and "odd: raise KeyError" in raised
    assert "printed by a reward" in (tmp_path / "log").read_text()


def test_what_a_failed_call_changed_in_modules_changes_no_other(named, tmp_path) -> None:
    log = (tmp_path / "log").open("w")
    with log, pool(log=log) as workers:
        results = score(named("counts"), numbered(5), workers)
        assert results[:2] + results[3:] == [1.0, 2.0, 1.0, 2.0]
    assert "counts 2" in (tmp_path / "log").read_text()


def test_what_is_no_exception_or_cannot_be_encoded_is_reported_as_it_is(named) -> None:
    with pool() as workers:
        *failures, last = score(named("interrupts"), numbered(4), workers)
        with pytest.raises(RewardError, match=r"returned '\\udc80', which is not a number"):
            score(named("half"), numbered(1), workers)
    assert last == 3.0 and failures[0].reason.startswith("reward 'interrupts' raised KeyboardInterrupt: stop, in ")
    assert failures[1].reason.startswith("reward 'interrupts' raised ValueError: half \\udc80, in ")
    assert "cannot be encoded: 'utf-8' codec can't encode" in failures[2].reason


@pytest.mark.long
def test_a_late_call_is_ended_with_all_it_has_started_and_its_stack_is_in_the_log(named, tmp_path) -> None:
    """The regular expression never releases the interpreter: in a thread it would stop the whole run."""
    path = tmp_path / "log"
    with path.open("w") as log, pool(timeout=2.4, log=log) as workers:
        function, settings = named("hangs_at_one"), RewardSettings(timeout=2.4)
        scorer = RewardScorer([(function, 1.0)], decode=decode, settings=settings, workers=workers)
        judged = asyncio.run(scorer.score([make_episode(number) for number in range(3)]))
    assert [type(episode.outcome) for episode in judged] == [Scored, InfraAbort, Scored] and scorer.num_calls == 4
    assert "reward.timeout = 2.4 s for its batch, nor for it alone" in judged[1].outcome.reason
    assert "in hangs_at_one" in path.read_text()
    started = [int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("started")]
    assert len(started) == 2, "in the batch, and alone"
    wait_for(lambda: not any(map(is_running, started)))


def test_a_wrong_reward_stops_the_run_from_there_too(named) -> None:
    with pool() as workers:
        for name, words in (("wrong", "returned 'text', which is not a number"), ("disguised", "write `async def`")):
            with pytest.raises(RewardError, match=words):
                score(named(name), numbered(1), workers, attempts=3)


def not_found(completion) -> float:
    return 1.0


not_found.__module__ = "__main__"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completion: 1.0, "reward '<lambda>' is no function of a module"),
        (not_found, "reward 'not_found' is in the script that runs"),
    ],
)
def test_what_no_process_can_import_is_refused_before_anything_is_loaded_with_the_fix(function, words: str) -> None:
    recipe = make_recipe({"reward": {"processes": 2}})
    with pytest.raises(RewardError, match=words) as caught:
        reward_functions(recipe, UserInputs(reward=function))
    assert "reward.functions = 'my_rewards.py:exact'" in str(caught.value)
    reward_functions(recipe, UserInputs(reward=RewardFunction(function, processes=False)))
    reward_functions(recipe, UserInputs(reward=decode_length))


def decode_length(completion) -> float:
    """Importable."""
    return float(len(completion))


SCRIPT = """
import asyncio
from headrace.imports import import_name
from headrace.score import RewardFunction, RewardWorkers
from headrace.score.signature import Sample

function = RewardFunction(import_name({reference!r}, setting="x"), reference={reference!r})
workers = RewardWorkers(timeout=500, stacks=open({log!r}, "a"), num_processes=1)
asyncio.run(function.score([Sample(dict(prompt="p"), "a", [1])], attempts=1, workers=workers))
"""


def test_a_killed_launcher_takes_its_processes_with_it(named, tmp_path) -> None:
    """In the middle of a call, and with what the reward has started."""
    log = tmp_path / "log"
    reference = named("sleeps").own.reference
    launcher = subprocess.Popen([sys.executable, "-c", SCRIPT.format(reference=reference, log=str(log))])
    try:
        wait_for(lambda: log.exists() and "sleeps " in log.read_text() and log.read_text().endswith("\n"))
        reward, started = map(int, log.read_text().splitlines()[-1].split()[1:])
        assert is_running(reward) and is_running(started)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_for(lambda: not is_running(reward) and not is_running(started))
