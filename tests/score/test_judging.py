"""The reward `judge`, against a server that does as it is told and against `headrace serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from test_rewards import decode, make_episode, make_sample

from headrace.config import make_recipe
from headrace.launch.inputs import UserInputs, check_inputs, reward_functions
from headrace.records import InfraAbort, Scored
from headrace.score import JudgeError, RewardError, RewardScorer, RewardSettings, judge
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TEMPLATE = 'Question: {prompt}\nRight: {answer}\nGiven: {completion}\nReply with {"score": 0 to 10}.'


class Judge:
    """Answers request number n with `script(n)`: a status, a text, or seconds to be silent."""

    def __init__(self, script: Callable[[int], Any]) -> None:
        self.script, self.bodies, self.keys, self.times = script, [], [], []
        self.in_flight = self.most_in_flight = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.times.append(time.monotonic())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        told = self.script(len(self.bodies) - 1)
        try:
            await asyncio.sleep(told if isinstance(told, float) else 0.02)
        finally:
            self.in_flight -= 1
        if isinstance(told, int):
            return web.Response(status=told, text="no", headers={"Retry-After": "0.2"} if told == 429 else {})
        if isinstance(told, bytes):
            return web.Response(body=told)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": told}}]})


@contextlib.asynccontextmanager
async def serving(script: Callable[[int], Any]) -> AsyncIterator[tuple[Judge, dict[str, Any]]]:
    """(the judge, options that reach it)"""
    fake, app = Judge(script), web.Application()
    app.router.add_post("/v1/chat/completions", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    options = {"url": f"http://127.0.0.1:{port}/v1", "model": "m", "template": TEMPLATE, "highest": 10, "retry_seconds": 0.01}
    try:
        yield fake, options
    finally:
        await runner.cleanup()


def ask(script: Callable[[int], Any], *, prompt: Any = "1 + 2", answer: str = "3", **changes: Any) -> tuple[float, Judge]:
    async def asked() -> tuple[float, Judge]:
        async with serving(script) as (fake, options):
            try:
                return await judge("four", prompt=prompt, answer=answer, **{**options, **changes}), fake
            except JudgeError as error:
                error.fake = fake
                raise

    return asyncio.run(asked())


def test_the_judge_reads_the_row_and_its_last_number_counts(monkeypatch) -> None:
    monkeypatch.setenv("JUDGES_KEY", "secret")
    how = {"system_prompt": "Be strict.", "key_variable": "JUDGES_KEY", "request_fields": {"seed": 7}, "max_tokens": 9}
    value, fake = ask(lambda _: 'Of 100, say 40. {"score": 7.5}', **how)
    assert value == 0.75 and fake.keys == ["Bearer secret"]
    text = 'Question: 1 + 2\nRight: 3\nGiven: four\nReply with {"score": 0 to 10}.'
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": text}]
    assert fake.bodies == [{"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 9, "seed": 7}]


def test_a_chat_is_shown_as_lines_and_a_pattern_may_be_ones_own() -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    how = {"score_pattern": r"\[\[(-?\d+)\]\]", "lowest": -1, "highest": 1}
    value, fake = ask(lambda _: "[[-1]] no, [[0]], as 9 of 10 say", prompt=chat, answer="{completion}", **how)
    assert value == 0.5
    text = fake.bodies[0]["messages"][0]["content"]
    assert "Question: system: Add.\nuser: 1 + 2\n" in text and "Right: {completion}\n" in text  # what is filled in stays as is


def test_a_busy_failing_or_silent_server_is_asked_again_later_each_time() -> None:
    script = [500, 503, 429, 20.0, "8"]
    value, fake = ask(script.__getitem__, reply_seconds=2.0, retry_seconds=0.05)
    assert value == 0.8 and len(fake.bodies) == 5 and len({json.dumps(body) for body in fake.bodies}) == 1
    gaps = [later - sooner for sooner, later in zip(fake.times, fake.times[1:], strict=False)]
    assert gaps[0] >= 0.025 and gaps[1] >= 0.05 and gaps[2] >= 0.2 and gaps[3] >= 2.0  # the third as the server asked


@pytest.mark.parametrize(
    ("told", "message", "asked"),
    [
        (500, "gave no answer in 3 attempts; the last: 500", 3),
        (5.0, "gave no answer in 3 attempts; the last: TimeoutError", 3),
        (400, "400 Bad Request", 1),
        ("no idea", "no score that .* finds: 'no idea'", 1),
        ("11", r"score 11 is not from 0 to 10 \(lowest, highest\)", 1),
        (None, "no score", 1),
        (b"<html>", "is no chat completion: <html>", 1),
        (b'{"choices": []}', "is no chat completion", 1),
    ],
)
def test_without_a_score_it_raises_rather_than_giving_nothing(told, message, asked) -> None:
    with pytest.raises(JudgeError, match=message) as caught:
        ask(lambda _: told, retries=2, reply_seconds=0.3 if told == 5.0 else 60.0)
    assert len(caught.value.fake.bodies) == asked


def test_nobody_there_is_a_failure_of_the_infrastructure_and_a_wrong_key_stops_the_run() -> None:
    with pytest.raises(JudgeError, match="gave no answer in 1 attempts; the last: ClientConnectorError"):
        ask(lambda _: "8", url="http://127.0.0.1:9/v1", retries=0)
    for status in (401, 403, 404):
        with pytest.raises(RewardError, match=f"{status} .*check url, model and key_variable"):
            ask(lambda _, status=status: status)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://x"}, "must be an http"),
        ({"url": "http://me:secret@host/v1"}, "url = 'host/v1': must be an http"),
        ({"template": "{completoin}"}, "no column 'completoin' .*answer, prompt, completion"),
        ({"score_pattern": "Score"}, "must have a group"),
        ({"score_pattern": "("}, "score_pattern = '\\('"),
        ({"lowest": 10}, "lowest = 10 must be below highest = 10"),
        ({"retries": -1}, "retries = -1"),
        ({"key_variable": "NO_SUCH_KEY"}, "no such environment variable"),
    ],
)
def test_options_that_cannot_work_are_named(options, message) -> None:
    with pytest.raises(RewardError, match=message):
        ask(lambda _: "8", **options)


def make_scorer(options: dict[str, Any], **settings: Any) -> RewardScorer:
    recipe = make_recipe({"reward": {"functions": "headrace.score:judge", "options": {"judge": options}}})
    return RewardScorer(reward_functions(recipe, UserInputs()), decode=decode, settings=RewardSettings(**settings))


def test_a_recipe_names_it_and_many_are_judged_at_once_but_not_too_many() -> None:
    async def scored():
        async with serving(lambda number: 400 if number == 5 else "10") as (fake, options):
            scorer = make_scorer(options, max_concurrent=4, attempts=1)
            return fake, await scorer.score([make_episode(number, answer="3") for number in range(20)])

    fake, episodes = asyncio.run(scored())
    outcomes = [episode.outcome for episode in episodes]
    assert outcomes.count(Scored(1.0)) == 19 and 2 <= fake.most_in_flight <= 4
    (failed,) = [outcome for outcome in outcomes if isinstance(outcome, InfraAbort)]
    assert "400 Bad Request" in failed.reason


def test_a_recipe_without_a_url_is_refused_before_a_model_is_loaded() -> None:
    options = {"judge": {"model": "m", "template": "{completion}"}}
    recipe = make_recipe({"reward": {"functions": "headrace.score:judge", "options": options}})
    with pytest.raises(ConfigError, match=r"takes 'url'.*set reward\.options\.judge\.url"):
        check_inputs(recipe, UserInputs(tasks=[{"prompt": "1", "answer": "1"}]))


@pytest.mark.long
def test_headrace_serve_may_be_the_judge() -> None:
    command = [sys.executable, "-m", "headrace.cli", "serve", "builtin:tiny", "--port", "0", "--name", "m", "--threads", "1"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HEADRACE_API_TOKEN": "api", "HEADRACE_CONTROL_TOKEN": "c"},
    )
    try:
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        held_to = {"structured_outputs": {"regex": "Score: [0-9]"}}
        options = {"url": f"{found[0]}/v1", "model": "m", "template": "{completion}?", "highest": 9, "request_fields": held_to}

        async def asked() -> list[float]:
            os.environ["JUDGES_KEY"] = "api"
            return await asyncio.gather(*(judge("1 2", **options, key_variable="JUDGES_KEY") for _ in range(4)))

        values = asyncio.run(asked())
        assert len(set(values)) == 1 and values[0] * 9 in range(10)
        with pytest.raises(RewardError, match="401"):
            asyncio.run(judge("1 2", **options))
    finally:
        os.environ.pop("JUDGES_KEY", None)
        process.kill()
        process.communicate()


def test_it_is_called_with_what_the_row_has() -> None:
    sample = make_sample("four", prompt="1 + 2", answer="3", other=5)

    async def scored():
        async with serving(lambda _: "3") as (_, options):
            ((reward, _),) = make_scorer({**options, "template": "{other} {answer}"})._rewards
            return await reward.score([sample], attempts=1)

    assert asyncio.run(scored()) == [0.3]
