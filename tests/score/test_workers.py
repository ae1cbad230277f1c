"""Plain rewards in worker threads: nobody is held up, and what hangs ends in a typed outcome."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_rewards import decode, make_episode, make_sample

from headrace.errors import user_frame
from headrace.records import InfraAbort, Scored
from headrace.score import RewardError, RewardFunction, RewardScorer, RewardSettings, RewardWorkers
from headrace.score.rewards import Failure
from headrace.score.workers import MAX_STUCK

TIMEOUT = 0.5


@pytest.fixture
def stuck():
    """A function that hangs until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()


def score(function, samples, *, workers: RewardWorkers, attempts: int = 1) -> list:
    return asyncio.run(RewardFunction(function).score(samples, attempts=attempts, workers=workers))


def numbered(count: int) -> list:
    return [make_sample(str(number), n=number) for number in range(count)]


def make_scorer(*functions, workers: RewardWorkers, **settings) -> RewardScorer:
    rewards = [(RewardFunction(function), 1.0) for function in functions]
    return RewardScorer(rewards, decode=decode, settings=RewardSettings(**settings), workers=workers)


# Nobody waits


@pytest.mark.parametrize("is_batched", [False, True])
def test_the_event_loop_runs_while_a_reward_sleeps(is_batched: bool) -> None:
    ticked = threading.Event()

    def single(completion) -> float:
        return float(ticked.wait(10))

    def batched(completions) -> list[float]:
        return [single(completion) for completion in completions]

    async def main() -> list:
        scoring = asyncio.create_task(
            RewardFunction(batched if is_batched else single).score([make_sample()], attempts=1, workers=workers)
        )
        for _ in range(10):
            await asyncio.sleep(0.001)
        ticked.set()
        return await scoring

    workers = RewardWorkers(timeout=10)
    assert asyncio.run(main()) == [1.0]


def test_one_worker_calls_in_order_and_in_one_thread() -> None:
    seen = []

    def watch(completion, n) -> float:
        seen.append((n, threading.current_thread()))
        return n

    workers = RewardWorkers(timeout=10)

    async def main() -> None:
        function = RewardFunction(watch)
        await asyncio.gather(*(function.score(numbered(50), attempts=1, workers=workers) for _ in range(3)))

    asyncio.run(main())
    assert [n for n, _ in seen] == [*range(50)] * 3
    threads = {thread for _, thread in seen}
    assert len(threads) == 1 and threads != {threading.main_thread()}


def test_several_workers_run_at_once() -> None:
    together = threading.Barrier(3)

    def meet(completion, n) -> float:
        together.wait(timeout=10)  # nobody passes unless three are in here
        return n

    assert score(meet, numbered(9), workers=RewardWorkers(3, timeout=20)) == [*range(9)]


def test_an_async_reward_stays_in_the_event_loop() -> None:
    threads = []

    async def asking(completion) -> float:
        threads.append(threading.current_thread())
        return 1.0

    def disguised(completion):
        return asking(completion)

    for function in (asking, disguised):
        assert score(function, [make_sample()] * 2, workers=RewardWorkers(timeout=10)) == [1.0, 1.0]
    assert set(threads) == {threading.main_thread()} and len(threads) == 4


def test_a_reward_sees_the_context_of_the_run() -> None:
    name = contextvars.ContextVar("name", default=0.0)
    workers = RewardWorkers(timeout=10)

    async def main(value: float) -> list:
        name.set(value)
        return await RewardFunction(lambda completion: name.get()).score([make_sample()], attempts=1, workers=workers)

    assert [asyncio.run(main(value)) for value in (1.0, 2.0)] == [[1.0], [2.0]]


# What hangs


def test_one_sample_that_hangs_fails_alone_and_once(stuck) -> None:
    calls = []

    def hangs_at_two(completion, n) -> float:
        calls.append(n)
        if n == 2:
            stuck()
        return n

    workers, started = RewardWorkers(timeout=TIMEOUT), time.monotonic()
    results = score(hangs_at_two, numbered(6), workers=workers, attempts=3)
    assert time.monotonic() - started < 3 * TIMEOUT + 1
    assert results[:2] + results[3:] == [0.0, 1.0, 3.0, 4.0, 5.0]
    assert isinstance(results[2], Failure) and calls == [0, 1, 2, 3, 4, 5]
    assert results[2].reason == f"reward 'hangs_at_two' gave no answer within reward.timeout = {TIMEOUT} s"
    assert workers.num_stuck == 1 and workers.num_calls == 6


def test_a_reward_that_hangs_is_an_infra_abort_and_its_siblings_are_scored(stuck) -> None:
    def hangs_at_one(completion, n) -> float:
        return stuck() if n == 1 else 0.5

    scorer = make_scorer(hangs_at_one, workers=RewardWorkers(timeout=TIMEOUT), timeout=TIMEOUT)
    judged = asyncio.run(scorer.score([make_episode(number) for number in range(3)]))
    assert [type(episode.outcome) for episode in judged] == [Scored, InfraAbort, Scored]
    assert "'hangs_at_one'" in judged[1].outcome.reason and f"reward.timeout = {TIMEOUT} s" in judged[1].outcome.reason
    assert judged[1].rollouts[0].rewards == {}


def test_a_batch_that_hangs_over_one_sample_is_taken_apart_once(stuck) -> None:
    calls = []

    def hangs_at_two(completions, n) -> list[float]:
        calls.append(n)
        if 2 in n:
            stuck()
        return n

    workers, started = RewardWorkers(timeout=4 * TIMEOUT), time.monotonic()
    results = score(hangs_at_two, numbered(5), workers=workers, attempts=3)
    assert time.monotonic() - started < 5 * TIMEOUT + 1
    assert results[:2] + results[3:] == [0.0, 1.0, 3.0, 4.0]
    assert results[2].reason.endswith(f"reward.timeout = {4 * TIMEOUT:g} s for its batch, nor for it alone within {TIMEOUT} s")
    assert calls == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]


def test_a_batch_that_always_hangs_takes_little_more_than_twice_its_time(stuck) -> None:
    def hangs(completions) -> list[float]:
        stuck()
        return []

    workers, started = RewardWorkers(timeout=2 * TIMEOUT), time.monotonic()
    results = score(hangs, numbered(100), workers=workers, attempts=3)
    assert time.monotonic() - started < 2.25 * 2 * TIMEOUT + 1
    assert all(isinstance(result, Failure) for result in results)
    assert "nor for it alone within" in results[0].reason and "no time was left to try it alone" in results[99].reason
    assert workers.num_stuck <= 6


async def test_a_late_answer_is_thrown_away_and_its_thread_ends() -> None:
    go_on, threads = threading.Event(), []

    def slow(completion, n) -> float:
        if n == 0:
            threads.append(threading.current_thread())
            go_on.wait(60)
        return n + 1.0

    workers = RewardWorkers(timeout=TIMEOUT)
    function = RewardFunction(slow)
    results = await function.score(numbered(2), attempts=1, workers=workers)
    go_on.set()
    await asyncio.to_thread(threads[0].join, 10)
    assert isinstance(results[0], Failure) and results[1] == 2.0
    assert workers.num_stuck == 0 and not threads[0].is_alive()
    assert await function.score(numbered(2)[1:], attempts=1, workers=workers) == [2.0]


def test_each_attempt_has_the_whole_time() -> None:
    calls = []

    def slow_and_flaky(completion) -> float:
        calls.append(completion)
        time.sleep(1.1)
        if len(calls) < 3:
            raise OSError
        return 1.0

    assert score(slow_and_flaky, [make_sample()], workers=RewardWorkers(timeout=2.0), attempts=3) == [1.0]


def test_too_many_stuck_threads_stop_the_run_and_show_the_line(stuck) -> None:
    def hangs(completion) -> float:
        return stuck()  # the line to show

    workers = RewardWorkers(timeout=0.05)
    scorer = make_scorer(hangs, workers=workers, timeout=0.05)
    with pytest.raises(RewardError, match="8 threads are stuck, the last in reward 'hangs'") as caught:
        asyncio.run(scorer.score([make_episode(number) for number in range(MAX_STUCK + 5)]))
    assert workers.num_stuck == MAX_STUCK
    names = []
    trace = caught.value.__cause__.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "hangs" in names and names.index("hangs") > names.index("_work")
    assert user_frame(caught.value)


def test_calls_that_are_late_one_after_another_stop_the_run_even_if_they_end() -> None:
    """Otherwise a thousand samples would each take their whole time before anyone hears of it."""
    calls = []

    def slow(completion) -> float:
        calls.append(completion)
        time.sleep(0.3)
        return 1.0

    with pytest.raises(RewardError, match=r"8 calls in a row got no answer within reward\.timeout = 0\.06 s"):
        score(slow, numbered(100), workers=RewardWorkers(timeout=0.06))
    assert len(calls) <= MAX_STUCK


def test_a_call_that_hangs_after_its_run_was_cancelled_does_not_starve_the_next(stuck) -> None:
    begun = threading.Event()

    def hangs(completion) -> float:
        begun.set()
        return stuck()

    async def main() -> list:
        first = asyncio.create_task(RewardFunction(hangs).score(numbered(3), attempts=1, workers=workers))
        await asyncio.to_thread(begun.wait, 10)
        first.cancel()
        return await RewardFunction(lambda completion: 1.0).score(numbered(2), attempts=1, workers=workers)

    workers = RewardWorkers(timeout=TIMEOUT)
    assert asyncio.run(main()) == [1.0, 1.0]
    assert workers.num_stuck == 1


# What raises


def test_what_a_reward_raises_keeps_its_traceback() -> None:
    def broken(completion) -> float:
        raise OSError("judge is down")

    scorer = make_scorer(broken, workers=RewardWorkers(timeout=10), max_failures=2)
    with pytest.raises(RewardError, match=r"2 rewards failed in a row; the last: .*judge is down") as caught:
        asyncio.run(scorer.score([make_episode(0), make_episode(1)]))
    line = user_frame(caught.value)
    assert __file__ in line and 'broken: raise OSError("judge is down")' in line


@pytest.mark.parametrize("function", [lambda completion: "good", lambda completions: [1.0]])
def test_a_wrong_function_stops_the_run_at_once(function) -> None:
    with pytest.raises(RewardError, match="<lambda>"):
        score(function, numbered(3), workers=RewardWorkers(timeout=10), attempts=3)


def test_a_reward_that_exits_ends_the_run_by_name_not_just_its_thread() -> None:
    with pytest.raises(RewardError, match=r"called sys.exit\(3\)"):
        score(lambda completion: sys.exit(3), [make_sample()], workers=RewardWorkers(timeout=10))


def test_a_sample_that_raises_is_asked_again_and_sinks_no_sibling() -> None:
    calls = []

    def picky(completions, n) -> list[float]:
        calls.append(n)
        if 1 in n:
            raise KeyError("bad")
        return n

    results = score(picky, numbered(3), workers=RewardWorkers(timeout=10), attempts=2)
    assert results[0] == 0.0 and results[2] == 2.0 and "KeyError" in results[1].reason
    assert calls == [[0, 1, 2], [0], [1], [2], [1]]


def test_a_reward_that_sets_an_alarm_is_told_what_to_do() -> None:
    def with_alarm(completion) -> float:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        except ValueError as error:
            raise RuntimeError("wrapped") from error
        return 1.0

    (failure,) = score(with_alarm, [make_sample()], workers=RewardWorkers(timeout=10))
    assert "parsing_timeout=None" in failure.reason and "timeout_seconds=None" in failure.reason
    (other,) = score(lambda completion: 1 / 0, [make_sample()], workers=RewardWorkers(timeout=10))
    assert "timeout_seconds" not in other.reason


# Async rewards


@pytest.mark.parametrize("is_marked", [True, False])
def test_no_more_async_calls_than_max_concurrent_are_in_flight_and_waiting_does_not_count_as_late(is_marked: bool) -> None:
    """Forty calls, two at a time, take longer than the timeout of one."""
    in_flight, most = 0, 0

    async def judge(completion) -> float:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(TIMEOUT / 15)
        in_flight -= 1
        return 1.0

    def unmarked(completion) -> object:
        return judge(completion)

    workers = RewardWorkers(timeout=TIMEOUT)
    scorer = make_scorer(judge if is_marked else unmarked, workers=workers, timeout=TIMEOUT, max_concurrent=2, attempts=1)
    episodes = [make_episode(number) for number in range(40)]

    async def main() -> list:
        return await asyncio.gather(scorer.score(episodes[:20]), scorer.score(episodes[20:]))

    for judged in asyncio.run(main()):
        assert [episode.outcome for episode in judged] == [Scored(1.0)] * 20
    assert most == 2 and scorer.num_calls >= 40, "the calls show that scoring makes progress"


# Detokenizing


def test_completions_are_decoded_in_another_thread_and_rewards_called_in_order() -> None:
    """The event loop is free while they are: it lets the first decode go on when both rounds are submitted."""
    may_decode, seen = threading.Event(), []

    def slow(rollout) -> str:
        assert may_decode.wait(10), "the event loop waits for the decoder"
        return decode(rollout)

    def watch(completion, n) -> float:
        seen.append(n)
        return 1.0

    settings, workers = RewardSettings(), RewardWorkers(timeout=10)
    scorer = RewardScorer([(RewardFunction(watch), 1.0)], decode=slow, settings=settings, workers=workers)

    async def main() -> None:
        rounds = [asyncio.create_task(scorer.score([make_episode(number)])) for number in range(5)]
        await asyncio.sleep(0.01)
        may_decode.set()
        await asyncio.gather(*rounds)

    asyncio.run(main())
    assert seen == [0, 1, 2, 3, 4]


# The end


def test_closing_does_not_wait_for_a_stuck_thread(stuck) -> None:
    workers = RewardWorkers(2, timeout=TIMEOUT)
    score(lambda completion: stuck(), [make_sample()], workers=workers)
    idle = list(workers._workers)
    workers.close()
    assert workers.num_stuck == 1, "closed, and it is still stuck"
    for thread in idle:
        thread.join(10)
    assert not any(thread.is_alive() for thread in idle)


SCRIPT = """
import asyncio, re, sys, threading, time
from headrace.score import RewardFunction, RewardWorkers
from headrace.score import watchdog, workers
from headrace.score.signature import Sample

def hangs(completion):
    {body}

async def main():
    pool = workers.RewardWorkers(timeout=0.3, stacks={stacks})
    sample = Sample(row=dict(prompt="p"), completion="a" * 40, completion_ids=[1])
    print(await RewardFunction(hangs).score([sample], attempts=1, workers=pool), flush=True)

watchdog.Watchdog.__init__.__kwdefaults__["margin"] = 0.3
asyncio.run(main())
time.sleep({after})
print("over", flush=True)
"""


def run_script(**parts) -> tuple[subprocess.CompletedProcess, float]:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(**parts)], capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - started


def test_a_stuck_thread_does_not_keep_the_process_alive() -> None:
    done, seconds = run_script(body="time.sleep(50)", stacks=None, after=0)
    assert done.returncode == 0 and "gave no answer within reward.timeout = 0.3 s" in done.stdout and seconds < 20


def test_a_reward_that_holds_the_interpreter_ends_the_process_and_leaves_its_stack(tmp_path) -> None:
    log = tmp_path / "launcher.log"
    done, seconds = run_script(
        body="return float(bool(re.match('(a+)+$', completion + 'b')))", stacks=f"open({str(log)!r}, 'a')", after=0
    )
    assert done.returncode == 1 and done.stdout == "" and seconds < 20
    said = log.read_text()
    assert "a reward blocked the interpreter" in said and "in hangs" in said and "Timeout" in said


def test_the_watchdog_sleeps_when_nothing_is_scored(tmp_path) -> None:
    log = tmp_path / "launcher.log"
    done, _ = run_script(body="return 1.0", stacks=f"open({str(log)!r}, 'a')", after=1.5)
    assert done.returncode == 0 and done.stdout == "[1.0]\nover\n" and "Timeout" not in log.read_text()
