"""Environments in a recipe and from Python: which one is made, and what one that fails costs."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from typing import TYPE_CHECKING

import pytest
from helpers import small_run
from test_turns import client_of

from headrace.config import make_recipe
from headrace.envs import EnvironmentSettings, HostedEnvironment, SingleTurn, check_environment, make_environment, run_episode
from headrace.imports import import_name
from headrace.launch.inputs import UserInputs, check_inputs, fingerprint_inputs
from headrace.model.tiny import build_tokenizer
from headrace.records import Episode, FinishReason, InfraAbort
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def add(a: int) -> int:
    """Add one.

    Args:
        a: the number
    """
    return a + 1


class Moody:
    """Fails once it has been told to."""

    num_made = 0

    def __init__(self, *, limit: int = 1) -> None:
        Moody.num_made += 1
        self.number, self.limit, self.num_running, self.most = Moody.num_made, limit, 0, 0

    async def run(self, task, client):
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        await asyncio.sleep(0.02)
        self.num_running -= 1
        if task.get("fails"):
            raise KeyError("lost")
        rollout = await client.generate(client.prompt(task["prompt"]))
        task = {**task, "made": self.number, "most": self.most}
        rollouts = task.get("rollouts", 1) * (rollout,)
        id = task.get("id", client.episode)
        return Episode(id=id, group=client.group, task=task, rollouts=rollouts)


def play(environment, **task) -> Episode:
    client, engine = client_of(build_tokenizer())
    engine.says = [("1", FinishReason.STOP)]
    return asyncio.run(run_episode(environment, {"prompt": "5", **task}, client))


def test_what_is_given_is_made() -> None:
    assert type(make_environment(EnvironmentSettings())) is SingleTurn
    settings = EnvironmentSettings(options={"limit": 3})
    made = make_environment(settings, environment=Moody)
    assert isinstance(made, HostedEnvironment) and made.name == "Moody" and not made.can_resume
    assert make_environment(EnvironmentSettings(options={"can_resume": True}), tools=[add]).can_resume
    for arguments, problem in [
        ({"environment": Moody, "tools": [add]}, "leave one of the two out"),
        ({}, "single-turn has none"),
        ({"environment": Moody()}, "is made already; give its class"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            make_environment(settings, **arguments)
    with pytest.raises(ConfigError, match="cannot be made: TypeError"):
        make_environment(EnvironmentSettings(options={"x": 1}), environment=Moody)
    with pytest.raises(ConfigError, match=r"no `async def run\(task, client\)`"):
        make_environment(EnvironmentSettings(), environment=dict)


def test_a_recipe_can_name_an_agent_that_is_made_already_and_programs_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "solving.py").write_text("import headrace\n\n\n@headrace.agent\nasync def solve(session):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    named = make_environment(EnvironmentSettings(name="solving.py:solve"))
    assert isinstance(named, HostedEnvironment) and named.name == "solving.py:solve"
    with pytest.raises(ConfigError, match="made already; give its class"):
        make_environment(EnvironmentSettings(name="solving.py:solve", options={"a": 1}))
    program = make_environment(EnvironmentSettings(command=("true",)))
    assert isinstance(program, HostedEnvironment) and program._make() is program._make()


def test_a_failed_episode_is_followed_by_a_fresh_instance() -> None:
    environment = make_environment(EnvironmentSettings(), environment=Moody)
    first = play(environment).task["made"]
    assert play(environment).task["made"] == first
    failed = play(environment, fails=True)
    assert isinstance(failed.outcome, InfraAbort) and failed.outcome.reason == "the environment raised KeyError: 'lost'"
    assert play(environment).task["made"] == first + 1


def test_malformed_episodes_are_refused_by_name() -> None:
    environment = make_environment(EnvironmentSettings(), environment=Moody)
    for task, problem in {
        "id": "environment 'Moody' returned episode 'x' of group 'g0', but ran 'g0/0' of 'g0'",
        "rollouts": "environment 'Moody' returned two rollouts with the id 'g0/0'",
    }.items():
        refused = play(environment, **{task: {"id": "x", "rollouts": 2}[task]})
        assert refused.outcome == InfraAbort(problem)
    assert play(environment, rollouts=0).outcome == InfraAbort(
        "environment 'Moody' returned no rollout with a sampled token, and no failure as its outcome"
    )


def test_episodes_at_once_are_limited() -> None:
    environment = make_environment(EnvironmentSettings(concurrency=2), environment=Moody)

    async def many() -> list[Episode]:
        clients = []
        for _ in range(6):
            client, engine = client_of(build_tokenizer())
            engine.says = [("1", FinishReason.STOP)]
            clients.append(client)
        return list(await asyncio.gather(*(run_episode(environment, {"prompt": "5"}, client) for client in clients)))

    assert max(episode.task["most"] for episode in asyncio.run(many())) == 2


def test_a_recipe_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    async def run(self, task, client): ...\n")
    monkeypatch.chdir(tmp_path)
    given = UserInputs(tasks=[{"prompt": "1"}], reward=lambda completion: 0.0)
    recipe = make_recipe({"environment.name": "mine.py:Mine"})
    check_inputs(recipe, given)
    before = fingerprint_inputs(recipe, given)["environment.name"]
    assert before[0] == "mine.py:Mine"
    with pytest.raises(ConfigError, match=r"mine.py has no 'Yours'"):
        check_inputs(make_recipe({"environment.name": "mine.py:Yours"}), given)
    with pytest.raises(ConfigError, match="an environment of your own has its own"):
        make_recipe({"environment.name": "mine.py:Mine", "environment.tools": ["x:y"]})
    with pytest.raises(ConfigError, match=r"reward.overlong_buffer = 3: .* an episode has several; set it to 0"):
        check_inputs(make_recipe({"environment.name": "mine.py:Mine", "reward.overlong_buffer": 3}), given)
    with pytest.raises(ConfigError, match="reward: none is given"):  # tools pay nothing
        check_inputs(make_recipe({}), UserInputs(tasks=given.tasks, tools=[add]))
    for settings, more in (({"environment.processes": 2}, {}), ({"environment.processes": 2}, {"tools": [add]})):
        with pytest.raises(ConfigError, match=r"environment.processes = 2"):
            check_inputs(make_recipe(settings), UserInputs(tasks=given.tasks, reward=given.reward, **more))


MINE = """
class Mine:
    made = 0

    def __init__(self, *, limit, word="a"):
        Mine.made += 1

    async def run(self, task, client): ...


class NoRun:
    pass


def make(limit): ...


NUMBER = 5
"""


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"tools": ["mine.py:add"], "options": {"max_turnz": 3}},
            r"options.max_turnz: .*did you mean environment.options.max_turns\?",
        ),
        ({"tools": ["mine.py:add"], "options": {"max_turns": 0}}, r"environment.options.max_turns.*≥ 1"),
        ({"tools": ["mine.py:add"], "options": {"tools": []}}, r"environment.options.tools: is no option"),
        (
            {"name": "mine.py:Mine", "options": {"limits": 3}},
            r"options.limits: .*mine.py:Mine; did you mean environment.options.limit\?",
        ),
        ({"name": "mine.py:Mine"}, r"mine.py:Mine: missing a required argument: 'limit'; add it"),
        (
            {"name": "mine.py:make", "options": {"x": 1}},
            r"options.x: is no option of mine.py:make; there are: environment.options.limit",
        ),
        ({"name": "mine.py:NoRun"}, r"mine.py:NoRun': a NoRun has no `async def run"),
        ({"name": "mine.py:NoRun", "options": {"x": 1}}, r"environment.options.x: is no option of mine.py:NoRun; it has none"),
        ({"name": "mine.py:NUMBER"}, r"environment.name = 'mine.py:NUMBER': is of type int; name a class"),
        ({"options": {"max_turns": 3}}, r"environment.options = \{'max_turns': 3\}: single-turn has none"),
        (
            {"tools": ["mcp:no-such-server x"]},
            r"environment.tools = 'mcp:no-such-server x': there is no program 'no-such-server'",
        ),
        ({"tools": ["mcp:"]}, r"environment.tools = 'mcp:': no program is named; write mcp:COMMAND"),
        ({"tools": ["mcp:python 'x"]}, r"environment.tools = 'mcp:python 'x': No closing quotation"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    environment: dict, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(tool.startswith("mcp:") for tool in environment.get("tools", ())):
        pytest.importorskip("mcp")
    (tmp_path / "mine.py").write_text(MINE + inspect.getsource(add))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        check_environment(EnvironmentSettings(**environment))
    with pytest.raises(ConfigError, match=problem if len(environment) > 1 or "options" not in environment else "needs none"):
        check_environment(EnvironmentSettings(**environment, processes=2))


def test_right_options_are_accepted_and_nothing_of_the_users_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    check_environment(EnvironmentSettings(name="mine.py:Mine", options={"limit": 3}))
    check_environment(EnvironmentSettings(name="mine.py:make", options={"limit": 3}))
    check_environment(EnvironmentSettings(options={"limit": 3}), environment=Moody)
    check_environment(EnvironmentSettings(options={"max_turns": 3}), tools=[add])
    assert import_name("mine.py:Mine", setting="x").made == 0
    with pytest.raises(ConfigError, match=r"options.limits: is no option of Moody"):
        check_environment(EnvironmentSettings(options={"limits": 3}), environment=Moody)
    with pytest.raises(ConfigError, match="made already; give its class"):
        check_environment(EnvironmentSettings(options={"limit": 3}), environment=Moody())


def test_a_dry_run_refuses_wrong_options(tmp_path: Path) -> None:
    given = UserInputs(tasks=[{"prompt": "1"}], reward=lambda completion: 0.0, tools=[add])
    with pytest.raises(ConfigError, match=r"did you mean environment.options.max_turns\?"):
        check_inputs(make_recipe({"environment.options": {"max_turnz": 3}}), given)


def test_episodes_of_several_rollouts_are_not_taken_apart() -> None:
    recipe = make_recipe({"buffer.unit": "sample", "train.advantage": "global"})
    given = UserInputs(tasks=[{"prompt": "1"}], reward=lambda completion: 0.0)
    check_inputs(recipe, given)
    with pytest.raises(ConfigError, match=r"buffer.unit = 'sample': .* scored at once.*; set it to 'episode'"):
        check_inputs(recipe, dataclasses.replace(given, tools=[add]))


def test_a_run_with_tools(tmp_path: Path) -> None:
    """The untrained policy calls none; that it could is tested elsewhere."""
    result = small_run(tmp_path / "run", tools=[add], environment={"options": {"max_turns": 2}}, steps=1)
    assert result.summary["status"] == "finished" and result.samples[0].environment == "tools"


@pytest.mark.long
def test_a_run_with_an_environment_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some episodes end their process when they are run first, in training and in evaluations; nothing is lost by it."""
    (tmp_path / "ended").mkdir()
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, headrace\n"
        "class Mine:\n"
        "    async def run(self, task, client):\n"
        "        rollout = await client.generate(client.prompt(task['prompt']))\n"
        "        mark = pathlib.Path('ended', client.episode.replace('/', ' '))\n"
        "        if client.episode.endswith('1/0') and not mark.exists():\n"
        "            mark.touch()\n"
        "            os._exit(3)\n"
        "        rollout = await client.generate(client.append(rollout, '7'))\n"
        "        return headrace.Episode(id=client.episode, group=client.group, task=task, rollouts=(rollout,))\n"
    )
    monkeypatch.chdir(tmp_path)
    more = {"environment": {"name": "mine.py:Mine", "processes": 2, "concurrency": 8}, "orchestrate": "local", "steps": 2}
    result = small_run(tmp_path / "run", **more)
    counts, evaluations = result.summary["accounting"], result.summary["held_out"]
    assert result.summary["status"] == "finished" and counts["trained"] == 32 and counts["failed"] == 0
    assert evaluations["before"]["held_out_failed"] == evaluations["after"]["held_out_failed"] == 0
    ended = {path.name.partition(" ")[0] for path in (tmp_path / "ended").iterdir()}
    assert ended >= {"eval", "g1"} and "lost its process, which ended with status 3" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["turns/mean"] for row in rows if "reward" in row] == [2.0, 2.0]
