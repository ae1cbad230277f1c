"""Reward functions in all their forms, and the outcomes their results become."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import sys

import numpy as np
import pytest

from headrace.records import Call, Episode, FinishReason, InfraAbort, Invalid, Rollout, Sampling, Scored, Source
from headrace.score import RewardError, RewardFunction, RewardScorer, RewardSettings, RewardWorkers
from headrace.score.rewards import Failure
from headrace.score.signature import Sample


def make_sample(completion: str = "done", prompt: object = "ask", **columns) -> Sample:
    return Sample(row={"prompt": prompt, **columns}, completion=completion, completion_ids=[len(completion)])


def results(function, samples: list[Sample], *, attempts: int = 1) -> list:
    return asyncio.run(RewardFunction(function).score(samples, attempts=attempts))


# How a function is called


@pytest.mark.parametrize("is_async", [False, True])
def test_the_per_sample_form_gets_one_row_at_a_time(is_async: bool) -> None:
    seen = []

    def plain(prompt, completion, answer, **row) -> float:
        seen.append((prompt, completion, answer, row))
        return float(completion == answer)

    async def waiting(prompt, completion, answer, **row) -> float:
        await asyncio.sleep(0)
        return plain(prompt, completion, answer, **row)

    samples = [make_sample("a", answer="a", level=1), make_sample("b", answer="a", level=2)]
    assert results(waiting if is_async else plain, samples) == [1.0, 0.0]
    assert seen == [
        ("ask", "a", "a", {"level": 1, "completion_ids": [1]}),
        ("ask", "b", "a", {"level": 2, "completion_ids": [1]}),
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_batch_form_gets_all_rows_as_columns(is_async: bool) -> None:
    seen = {}

    def plain(prompts, completions, completion_ids, **columns) -> list[float]:
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [float(len(completion)) for completion in completions]

    async def waiting(prompts, completions, completion_ids, **columns) -> list[float]:
        await asyncio.sleep(0)
        return plain(prompts, completions, completion_ids, **columns)

    samples = [make_sample("a", answer=1), make_sample("bc", prompt="more", level=2)]
    assert results(waiting if is_async else plain, samples) == [1.0, 2.0]
    assert seen == {
        "prompts": ["ask", "more"],
        "completions": ["a", "bc"],
        "completion_ids": [[1], [2]],
        "answer": [1, None],
        "level": [None, 2],
    }


def test_completions_of_chats_are_messages_in_the_batch_form_and_text_in_the_other() -> None:
    chat = [{"role": "user", "content": "ask"}]
    seen = []

    def batch(prompts, completions) -> list[float]:
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    def single(prompt, completion) -> float:
        seen.append((prompt, completion))
        return 1.0

    samples = [make_sample("a", prompt=chat), make_sample("b")]
    results(batch, samples)
    results(single, samples)
    assert seen == [
        ([chat, "ask"], [[{"role": "assistant", "content": "a"}], "b"]),
        (chat, "a"),
        ("ask", "b"),
    ]


def test_a_message_that_the_prompt_began_is_moved_to_the_completion_in_the_batch_form() -> None:
    """As TRL does; prompt and completion together are the whole chat."""
    asked, begun = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "I th"}
    chat, whole = [asked, begun], [{"role": "assistant", "content": "I think"}]
    sample = make_sample("ink", prompt=chat)
    assert results(lambda prompts, completions: [float((prompts, completions) == ([[asked]], [whole]))], [sample]) == [1.0]
    assert results(lambda prompt, completion: float((prompt, completion) == (chat, "ink")), [sample]) == [1.0]


def test_a_partial_has_the_name_of_its_function() -> None:
    def close(completion: str, by: float, scale: float) -> float:
        return by * scale

    reward = RewardFunction(functools.partial(functools.partial(close, by=2.0), scale=3.0))
    assert reward.name == "close" and asyncio.run(reward.score([make_sample()], attempts=1)) == [6.0]


def test_an_option_goes_before_a_column_of_its_name() -> None:
    for function in (lambda completion, scale, **row: scale, lambda completions, scale, **columns: [scale]):
        reward = RewardFunction(function, name="scaled", options={"scale": 3.0})
        assert asyncio.run(reward.score([make_sample(scale=2.0)], attempts=1)) == [3.0]


def test_only_names_it_takes_are_passed() -> None:
    sample = make_sample("a", answer=1, level=2)
    assert results(lambda completion, level: level, [sample]) == [2.0]
    assert results(lambda completions, answer: answer, [sample]) == [1.0]
    assert results(lambda completion: 4, [sample]) == [4.0]
    assert results(lambda completions, **rest: [len(rest)], [sample]) == [4.0]  # prompts, completion_ids, answer, level
    assert results(lambda **everything: len(everything), [sample]) == [5.0]


def test_a_column_of_the_same_name_does_not_replace_the_completion() -> None:
    row = {"prompt": "ask", "completion": "a column", "completion_ids": "a column"}
    sample = Sample(row=row, completion="real", completion_ids=[4])
    assert results(lambda completion, completion_ids: float(completion == "real" and completion_ids == [4]), [sample]) == [1.0]


class LossGradient:
    """A callable object."""

    def __call__(self, completion: str, **row) -> float:
        return 0.5


def test_names() -> None:
    def exact_match(completion) -> float:
        return 1.0

    assert RewardFunction(exact_match).name == "exact_match"
    assert RewardFunction(exact_match, name="mine").name == "mine"
    assert RewardFunction(LossGradient()).name == "LossGradient"
    assert results(LossGradient(), [make_sample()]) == [0.5]


@pytest.mark.parametrize("function", [lambda text: 1.0, lambda: 1.0, lambda prompt: 1.0])
def test_a_function_that_would_not_see_the_completion_is_refused(function) -> None:
    with pytest.raises(RewardError, match=r"write f\(prompt, completion, \*\*row\)"):
        RewardFunction(function)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(RewardError, match="a float is not a function"):
        RewardFunction(0.5)


# What a function returns


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_number_is_a_number(value) -> None:
    (single,) = results(lambda completion: value, [make_sample()])
    (batched,) = results(lambda completions: [value], [make_sample()])
    assert (single, batched) == (1.0, 1.0)
    assert type(single) is type(batched) is float


def test_an_array_of_numbers_is_a_list_of_them() -> None:
    assert results(lambda completions: np.array([0.5, 1.5]), [make_sample()] * 2) == [0.5, 1.5]


def test_none_is_kept_apart_from_zero() -> None:
    assert results(lambda completion: None, [make_sample()]) == [None]
    assert results(lambda completions: [None, 0, 1], [make_sample()] * 3) == [None, 0.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_a_failure(value: float) -> None:
    (single,) = results(lambda completion: value, [make_sample()], attempts=2)
    good, bad = results(lambda completions: [1.0, value], [make_sample()] * 2)
    assert isinstance(single, Failure) and str(value) in single.reason
    assert good == 1.0 and isinstance(bad, Failure)


@pytest.mark.parametrize(
    "function",
    [
        lambda completion: "good",
        lambda completion: "1",
        lambda completion: b"1",
        lambda completion: [1.0, 2.0],
        lambda completion: {"reward": 1.0},
        lambda completions: 1.0,
        lambda completions: None,
        lambda completions: [1.0],
        lambda completions: [1.0, 2.0, 3.0],
        lambda completions: [],
        lambda completions: [1.0, "good"],
        lambda completions: [1.0, "1"],
        lambda completions: "11",
        lambda completions: {1.0: 0, 2.0: 0},
        lambda completions: [1.0, [1.0]],
    ],
    ids=[
        *("text", "a number as text", "and as bytes", "list for one", "dict", "number for all", "nothing for all"),
        *("too few", "too many", "none at all", "text in a list", "a number as text in a list", "text for a list"),
        *("dict for a list", "list in a list"),
    ],
)
def test_a_result_of_the_wrong_shape_stops_the_run(function) -> None:
    """No retry can mend it, and it is the user's mistake, not the machinery's."""
    with pytest.raises(RewardError, match="<lambda>"):
        results(function, [make_sample(), make_sample()], attempts=3)


def test_text_that_reads_as_a_number_is_named_with_the_reward() -> None:
    with pytest.raises(RewardError, match=r"reward 'exact' returned '1', which is not a number but a str; return a number"):
        results(RewardFunction(lambda completion: "1", name="exact"), [make_sample()])


# What a function raises


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_sys_exit_is_an_error_that_names_the_reward_and_ends_nothing(is_async, is_batched, is_threaded) -> None:
    def single(completion) -> float:
        sys.exit(3)

    def batched(completions) -> list[float]:
        sys.exit(3)

    async def single_later(completion) -> float:
        sys.exit(3)

    async def batched_later(completions) -> list[float]:
        sys.exit(3)

    plain, later = (batched, batched_later) if is_batched else (single, single_later)
    function = RewardFunction(later if is_async else plain, name="quits")
    workers = RewardWorkers(timeout=30) if is_threaded else None
    try:
        with pytest.raises(RewardError, match=r"reward 'quits' called sys.exit\(3\)"):
            asyncio.run(function.score([make_sample(), make_sample()], attempts=2, workers=workers))
    finally:
        if workers is not None:
            workers.close()


@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_a_reward_that_raises_is_asked_again_and_then_given_up(attempts: int) -> None:
    calls = []

    def broken(completion) -> float:
        calls.append(completion)
        raise OSError("judge is down")

    (failure,) = results(broken, [make_sample()], attempts=attempts)
    assert isinstance(failure, Failure)
    assert failure.reason == "reward 'broken' raised OSError: judge is down"
    assert isinstance(failure.cause, OSError)
    assert len(calls) == attempts


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_recovers_is_scored(is_async: bool) -> None:
    calls = []

    def flaky(completion) -> float:
        calls.append(completion)
        if len(calls) < 3:
            raise TimeoutError
        return 0.25

    async def flaky_async(completion) -> float:
        await asyncio.sleep(0)
        return flaky(completion)

    assert results(flaky_async if is_async else flaky, [make_sample()], attempts=3) == [0.25]
    assert len(calls) == 3


def test_one_sample_that_raises_does_not_sink_a_batch() -> None:
    def picky(completions) -> list[float]:
        if "bad" in completions:
            raise KeyError("bad")
        return [float(len(completion)) for completion in completions]

    good, bad, long = results(picky, [make_sample("a"), make_sample("bad"), make_sample("abc")], attempts=2)
    assert (good, long) == (1.0, 3.0)
    assert isinstance(bad, Failure) and "KeyError" in bad.reason


def test_one_sample_that_raises_does_not_sink_the_others_of_the_per_sample_form() -> None:
    good, bad = results(lambda completion: 1 / (completion != "bad"), [make_sample("a"), make_sample("bad")], attempts=2)
    assert good == 1.0
    assert isinstance(bad, Failure) and "ZeroDivisionError" in bad.reason


def test_a_batch_function_is_not_asked_for_ever() -> None:
    calls = []

    def broken(completions) -> list[float]:
        calls.append(len(completions))
        raise OSError

    assert all(isinstance(result, Failure) for result in results(broken, [make_sample()] * 3, attempts=2))
    assert calls.count(1) == 3 * 2
    assert sum(1 for count in calls if count == 3) in (1, 2)


async def test_cancelling_is_not_a_failure() -> None:
    async def endless(completion) -> float:
        await asyncio.sleep(60)
        return 1.0

    task = asyncio.create_task(RewardFunction(endless).score([make_sample()], attempts=5))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_reward_that_ignores_its_timeout_holds_up_nothing(monkeypatch, caplog) -> None:
    """Neither its batch nor the end of the run; it is named with the line it is at."""
    monkeypatch.setattr("headrace.user_code.END_SECONDS", 0.02)

    async def stubborn(completion) -> float:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    (result,) = asyncio.run(RewardFunction(stubborn).score([make_sample()], attempts=1, deadline=0.02))
    assert isinstance(result, Failure) and "no answer within reward.timeout = 0.02 s" in result.reason
    assert "reward 'stubborn' was cancelled" in caplog.text and "test_rewards.py:" in caplog.text


@pytest.mark.parametrize("is_batched", [False, True])
def test_an_async_reward_that_is_late_is_not_called_again_for_the_rollout(is_batched: bool) -> None:
    calls = []

    async def late(completion) -> float:
        calls.append(1)
        await asyncio.sleep(60)
        return 1.0

    async def all_late(completions) -> list[float]:
        calls.append(len(completions))
        return [await late(each) for each in completions] if len(completions) > 1 else [1.0]

    reward = RewardFunction(all_late if is_batched else late)
    results = asyncio.run(reward.score([make_sample("a"), make_sample("b")], attempts=3, deadline=0.05))
    if is_batched:
        assert results == [1.0, 1.0] and calls == [2, 1, 1, 1]  # each alone, once
    else:
        assert len(calls) == 2 and all("gave no answer within reward.timeout = 0.05 s" in each.reason for each in results)


def test_a_timeout_of_the_rewards_own_is_not_ours() -> None:
    calls = []

    async def impatient(completion) -> float:
        calls.append(1)
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
        return 1.0

    (result,) = asyncio.run(RewardFunction(impatient).score([make_sample()], attempts=2, deadline=60))
    assert "raised TimeoutError" in result.reason and "reward.timeout" not in result.reason and len(calls) == 2


# From results to outcomes


def make_episode(number: int = 0, **task) -> Episode:
    kinds = [Source.PROMPT, Source.SAMPLED, Source.SAMPLED]
    rollout = Rollout(
        id=f"r{number}",
        episode=f"e{number}",
        group="g",
        index=number,
        token_ids=[number, 50 + number, 60],
        source=np.array(kinds),
        loss_mask=[False, True, True],
        logprobs=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        calls=(
            Call(start=1, stop=3, engine="x", sampling=Sampling(), finish_reason=FinishReason.STOP, started=0.0, finished=1.0),
        ),
        finish_reason=FinishReason.STOP,
    )
    return Episode(id=f"e{number}", group="g", task={"prompt": "ask", "n": number, **task}, rollouts=(rollout,))


def decode(rollout: Rollout) -> str:
    return f"text of {rollout.completion_ids}"


def make_scorer(*functions, weights: tuple[float, ...] = (), attempts: int = 1, max_failures: int = 64) -> RewardScorer:
    rewards = [RewardFunction(function, name=f"f{index}") for index, function in enumerate(functions)]
    pairs = list(zip(rewards, weights or (1.0,) * len(rewards), strict=True))
    return RewardScorer(pairs, decode=decode, settings=RewardSettings(attempts=attempts, max_failures=max_failures))


def judge(scorer: RewardScorer, episodes: list[Episode]) -> list[Episode]:
    return asyncio.run(scorer.score(episodes))


def test_episodes_come_back_in_order_with_their_scores() -> None:
    scorer = make_scorer(lambda completion, n: n / 4)
    judged = judge(scorer, [make_episode(number) for number in (2, 0, 1)])
    assert [episode.id for episode in judged] == ["e2", "e0", "e1"]
    assert [episode.outcome for episode in judged] == [Scored(0.5), Scored(0.0), Scored(0.25)]
    assert judged[0].rollouts[0].outcome == Scored(0.5)
    assert judged[0].rollouts[0].rewards == {"f0": 0.5}


def test_a_reward_sees_decoded_text_tokens_and_the_row() -> None:
    seen = []
    judge(make_scorer(lambda **given: seen.append(given) or 1.0), [make_episode(3, answer="x")])
    assert seen == [{"prompt": "ask", "n": 3, "answer": "x", "completion": "text of [53, 60]", "completion_ids": [53, 60]}]


def test_scores_are_weighted_sums_of_the_rewards_that_apply() -> None:
    scorer = make_scorer(
        lambda completion: 0.5, lambda completions: [None] * len(completions), lambda completion: 3, weights=(2, 100, -1)
    )
    (episode,) = judge(scorer, [make_episode()])
    assert episode.outcome == Scored(2 * 0.5 - 3)
    assert episode.rollouts[0].rewards == {"f0": 0.5, "f2": 3.0}


def test_if_no_reward_applies_the_rollout_is_invalid_not_zero() -> None:
    (episode,) = judge(make_scorer(lambda completion: None, lambda completion: None), [make_episode()])
    assert isinstance(episode.outcome, Invalid)
    assert isinstance(episode.rollouts[0].outcome, Invalid)
    assert episode.reward is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_aborts_not_zero(value: float) -> None:
    (episode,) = judge(make_scorer(lambda completion: 1.0, lambda completion: value), [make_episode()])
    assert isinstance(episode.outcome, InfraAbort) and str(value) in episode.outcome.reason
    assert episode.rollouts[0].rewards == {}


def test_a_reward_that_raises_aborts_only_its_own_rollout() -> None:
    def picky(prompts, completions, n) -> list[float]:
        if 1 in n:
            raise OSError("judge is down")
        return [1.0] * len(n)

    judged = judge(make_scorer(picky, attempts=2), [make_episode(number) for number in range(3)])
    assert [type(episode.outcome) for episode in judged] == [Scored, InfraAbort, Scored]
    assert "judge is down" in judged[1].outcome.reason


def test_failures_in_a_row_stop_the_run_and_show_the_error() -> None:
    def broken(completion) -> float:
        raise OSError("judge is down")

    scorer = make_scorer(broken, max_failures=3)
    judge(scorer, [make_episode(), make_episode()])  # two are borne, over calls
    with pytest.raises(RewardError, match=r"3 rewards failed in a row; the last: .*judge is down") as caught:
        judge(scorer, [make_episode()])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_score_between_failures_starts_the_count_again() -> None:
    def sometimes(completion, n) -> float | None:
        if n == 0:
            raise OSError
        return 1.0 if n == 1 else None

    scorer = make_scorer(sometimes, max_failures=3)
    order = [0, 0, 1, 0, 0, 2, 0, 0]
    outcomes = [episode.outcome for episode in judge(scorer, [make_episode(number) for number in order])]
    assert [type(outcome) for outcome in outcomes] == [{0: InfraAbort, 1: Scored, 2: Invalid}[number] for number in order]
    with pytest.raises(RewardError):
        judge(scorer, [make_episode(0)])


def test_a_wrong_function_stops_the_run_at_once() -> None:
    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        judge(make_scorer(lambda completions: [1.0], attempts=3), [make_episode(), make_episode()])


def test_rewards_of_the_environment_count_beside_those_of_functions() -> None:
    def paid(name: str) -> Episode:
        episode = make_episode()
        return episode.replace(rollouts=tuple(rollout.replace(rewards={name: 0.25}) for rollout in episode.rollouts))

    (both,) = judge(make_scorer(lambda completion: 0.5, weights=(2.0,)), [paid("environment")])
    assert both.outcome == Scored(1.25) and both.rollouts[0].rewards == {"environment": 0.25, "f0": 0.5}
    (own,) = judge(make_scorer(), [paid("environment")])
    assert own.outcome == Scored(0.25)
    with pytest.raises(RewardError, match="both name theirs 'f0'"):
        judge(make_scorer(lambda completion: 0.5), [paid("f0")])
