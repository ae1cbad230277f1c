"""Evaluation samples as training does, says what each source found, and goes on past what the policy cannot be blamed for."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import SMALL, TASKS, length_reward, small_run

import headrace
from headrace.config import make_recipe
from headrace.engine import UnusablePrompt
from headrace.engine.protocol import NotFinite
from headrace.envs import SingleTurn
from headrace.launch.inputs import UserInputs, check_inputs
from headrace.launch.process import RoleFailed
from headrace.observe import read_metrics
from headrace.records import Episode, Rollout, Sampling, Scored
from headrace.run.evaluate import Evaluator
from headrace.score import RewardError
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.launch.launcher import RunResult

PROBLEMS = {
    "raises": KeyError("lost"),
    "is not finite": NotFinite("the logits are not finite"),
    "is long": UnusablePrompt("long"),
}


class Environment:
    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        if task["prompt"] in PROBLEMS:
            raise PROBLEMS[task["prompt"]]
        return Episode(id=client.episode, group=client.episode, task=task)


class Scorer:
    async def score(self, episodes: Sequence[Episode], *, is_training: bool) -> list[Episode]:
        return [episode.replace(outcome=Scored(reward=float(episode.task["prompt"]))) for episode in episodes]


def make_evaluator() -> Evaluator:
    roles: Any = SimpleNamespace(engine=None, encoder=None, environment=Environment(), scorer=Scorer(), stop_ids=())
    return Evaluator(make_recipe({}), roles)


def evaluate(**sources: list[str]) -> dict[str, float]:
    tasks = {name: [{"prompt": prompt} for prompt in prompts] for name, prompts in sources.items()}
    evaluation = asyncio.run(make_evaluator().run(tasks))
    assert evaluation.count == 2 * sum(map(len, sources.values()))
    assert bool(evaluation.problem) == bool(evaluation.metrics["held_out_failed"])
    return {name: value for name, value in evaluation.metrics.items() if name not in ("success_low", "success_high")}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_rollout_that_could_not_be_judged_is_neither_a_zero_nor_the_end_of_the_run(problem: str) -> None:
    found = {"success": 0.5, "greedy": 0.5, "held_out_reward": 0.75}
    assert evaluate(tasks=["1", problem, "0.5"]) == {**found, "held_out_failed": 2}
    assert evaluate(tasks=[problem, problem]) == {"held_out_failed": 4}, "0 % would be a verdict"


def test_each_of_several_sources_has_its_own_share() -> None:
    found = evaluate(easy=["1", "1"], hard=["0", "0", "1", "0"], broken=["raises"])
    assert found == {
        **{"success": 0.5, "greedy": 0.5, "held_out_reward": 0.5, "held_out_failed": 2},
        **{"success/easy": 1.0, "greedy/easy": 1.0, "held_out_reward/easy": 1.0},
        **{"success/hard": 0.25, "greedy/hard": 0.25, "held_out_reward/hard": 0.25},
    }


def test_a_warm_up_that_can_judge_nothing_says_why() -> None:
    with pytest.raises(
        RewardError, match="none of 1 tasks could be judged; the first: the environment raised KeyError: 'lost'"
    ):
        asyncio.run(make_evaluator().sampled_success([{"prompt": "raises"}], name="warmup0"))


def test_waiting_for_a_slot_is_not_an_episodes_time() -> None:
    """Two engines with a slot each: of six episodes four wait, and their clocks stand still."""
    started, go_on = [], asyncio.Event()

    class Engine:
        async def generate(self, rollout: Any, sampling: Sampling) -> Any:
            await go_on.wait()
            return rollout

    class Asks(Environment):
        async def run(self, task: dict[str, Any], client: Any) -> Episode:
            started.append(client)
            await client.generate(Rollout.from_prompt([1], id=client.episode))
            return await super().run(task, client)

    roles: Any = SimpleNamespace(engine=Engine(), encoder=None, environment=Asks(), scorer=Scorer(), stop_ids=())
    roles.num_engines = lambda recipe: 2 * recipe.engine.num_engines  # another has joined
    recipe = make_recipe({"episode": {"timeout": 1000.0}, "engine": {"slots": 1, "count": 1}})

    async def main() -> dict[str, float]:
        running = asyncio.ensure_future(Evaluator(recipe, roles).run({"tasks": 3 * [{"prompt": "1"}]}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(client.clock.ends == math.inf for client in started) == 2 * [False] + 4 * [True]
        go_on.set()
        return (await running).metrics

    assert asyncio.run(asyncio.wait_for(main(), 10))["held_out_failed"] == 0


def vote(tmp_path: Path, code: str, **settings: Any) -> Any:
    """An evaluation of two samples that answer "1", by the `answer` function of this code."""

    class Asks(Environment):
        async def run(self, task: dict[str, Any], client: Any) -> Episode:
            rollout = Rollout.from_prompt([1], id=client.episode, group=client.episode)
            return Episode(id=client.episode, group=client.episode, task=task, rollouts=(rollout,))

    (tmp_path / "mine.py").write_text(code)
    encoder: Any = SimpleNamespace(decode=lambda rollout: "1")
    roles: Any = SimpleNamespace(engine=None, encoder=encoder, environment=Asks(), scorer=Scorer(), stop_ids=())
    evaluate = {"samples": 2, "greedy": False, "answer": f"{tmp_path / 'mine.py'}:answer"}
    evaluator = Evaluator(make_recipe({"evaluate": evaluate, **settings}), roles)
    return asyncio.run(evaluator.run({"tasks": [{"prompt": "1"}]}))


@pytest.mark.parametrize(("mode", "thread"), [("local", "evaluate.answer"), ("inline", "MainThread")])
def test_a_vote_is_not_taken_on_the_event_loop(tmp_path: Path, mode: str, thread: str) -> None:
    code = "import threading\ndef answer(text):\n    return threading.current_thread().name"
    assert vote(tmp_path, code, orchestrate=mode).tasks[0].answers == (thread, thread)


def test_a_vote_that_exits_fails_and_one_that_hangs_is_named(tmp_path: Path) -> None:
    found = vote(tmp_path, "def answer(text):\n    raise SystemExit(3)", orchestrate="local")
    assert found.failed == 2 and "raised SystemExit: 3" in found.problem
    (tmp_path / "hangs").mkdir()
    with pytest.raises(RewardError, match=r"mine\.py:answer' has not returned within deadline = 0\.05 seconds"):
        code = "import threading\ndef answer(text):\n    threading.Event().wait()"
        vote(tmp_path / "hangs", code, orchestrate="local", deadline=0.05)


def test_a_vote_by_what_is_no_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("answer = 3")
    recipe = make_recipe({"evaluate": {"answer": f"{tmp_path / 'mine.py'}:answer"}})
    with pytest.raises(ConfigError, match=r"evaluate\.answer = '.*mine\.py:answer': it is a int, not a function"):
        check_inputs(recipe, UserInputs(tasks=TASKS, reward=length_reward))


def test_samples_are_drawn_as_asked_and_vote_for_what_a_function_extracts(tmp_path: Path) -> None:
    """Four samples of a task answer "1", "x 1", "2" and something the function raises on; only "1" and "x 1" are right."""
    drawn: dict[str, Sampling] = {}

    class Engine:
        async def generate(self, rollout: Any, sampling: Sampling) -> Any:
            drawn[rollout.id] = sampling
            return rollout

    class Asks(Environment):
        async def run(self, task: dict[str, Any], client: Any) -> Episode:
            rollout = await client.generate(Rollout.from_prompt([1], id=client.episode, group=client.episode))
            return Episode(id=client.episode, group=client.episode, task=task, rollouts=(rollout,))

    class Judges:
        async def score(self, episodes: Sequence[Episode], *, is_training: bool) -> list[Episode]:
            return [e.replace(outcome=Scored(reward=float(e.id[-1] in "01"))) for e in episodes]

    texts = {"0": "1", "1": "x 1", "2": "2", "3": "?"}
    (tmp_path / "answers.py").write_text("def last(text):\n    return {'1': '1', 'x 1': '1', '2': '2'}[text]")
    encoder = SimpleNamespace(decode=lambda rollout: texts[rollout.id[-1]])
    roles: Any = SimpleNamespace(engine=Engine(), encoder=encoder, environment=Asks(), scorer=Judges(), stop_ids=())
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 99}
    settings = {"samples": 4, "greedy": False, "sampling": sampling, "answer": f"{tmp_path / 'answers.py'}:last"}
    found = asyncio.run(Evaluator(make_recipe({"evaluate": settings}), roles).run({"tasks": [{"prompt": "1"}]}))
    assert all({name: getattr(how, name) for name in sampling} == sampling for how in drawn.values())
    assert sorted(drawn) == [f"eval/tasks/0/{sample}" for sample in range(4)]
    assert len({how.seed for how in drawn.values()}) == 4
    assert found.tasks[0].answers == ("1", "1", "2", None) and found.failed == 1 and "raised KeyError: '?'" in found.problem
    assert found.metrics["success"] == pytest.approx(2 / 3) and found.metrics["maj@2"] == pytest.approx(2 / 3)
    assert found.metrics["pass@2"] == 1 and "pass@4" not in found.metrics, "three were judged"


# In a run


class Recording(SingleTurn):
    """Keeps how held-out rollouts were drawn, and fails on one of their two sources."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, Sampling]] = []
        self.has_mask: set[tuple[bool, bool]] = set()

    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        if task["prompt"] == "lost":
            raise KeyError("lost")
        episode = await super().run(task, client)
        if client.episode.startswith("eval"):
            self.drawn.append((client.episode.rpartition("/")[2], episode.rollouts[0].calls[0].sampling))
        self.has_mask.add((client.episode.startswith("eval"), episode.rollouts[0].sampling_mask is not None))
        return episode


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, RunResult]:
    environment = Recording()
    run = small_run(
        tmp_path_factory.mktemp("evaluated") / "run",
        environment=environment,
        steps=2,
        held_out=[(TASKS[:3], 1.0), ([{"prompt": "lost"}], 1.0)],
        sampling={"min_tokens": 2, "stop": ["9"], "temperature": 0.8},
        evaluate={"every": 1},
    )
    return environment, run


def test_evaluation_ends_rollouts_where_training_does(evaluated) -> None:
    environment, _ = evaluated
    assert {(sampling.min_tokens, sampling.stop) for _, sampling in environment.drawn} == {(2, ("9",))}
    assert {sampling.temperature for _, sampling in environment.drawn} == {0.0, 1.0}


def test_only_rollouts_that_are_trained_on_have_a_sampling_mask(evaluated) -> None:
    environment, _ = evaluated
    assert environment.has_mask == {(True, False), (False, True)}


def test_every_evaluation_draws_the_same_random_numbers(evaluated) -> None:
    environment, _ = evaluated
    drawn = [(name, sampling.temperature, sampling.seed) for name, sampling in environment.drawn]
    assert len(drawn) == 18 and len(set(drawn)) == 6, "three evaluations of three tasks, sampled and greedily"


def test_a_run_reports_sources_and_leaves_out_what_was_not_judged(evaluated) -> None:
    _, run = evaluated
    rows = read_metrics(run.folder / "metrics.jsonl")
    for row in rows:
        assert row["held_out_failed"] == 2 and row["success"] == row["success/tasks"]
        assert "success/tasks#2" not in row
    assert run.summary["success_before"] is not None and "success/tasks" in run.summary["held_out"]["before"]


# Without a run


SMALL_MODEL: dict[str, Any] = {name: SMALL[name] for name in ("model", "engine", "sampling", "threads", "orchestrate")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return small_run(tmp_path_factory.mktemp("trained") / "run", steps=2)


def test_a_run_is_evaluated_as_it_evaluated_itself(trained: RunResult) -> None:
    """The same tasks and random numbers; of the run's folder, of its checkpoint, and of a copy that is nobody's checkpoint."""
    inputs: dict[str, Any] = {"held_out": TASKS[:4], "reward": length_reward}
    before = set(Path(tempfile.gettempdir()).glob("headrace-evaluate-*"))
    whole = headrace.evaluate(trained.folder, **inputs)
    assert whole.version == 2 and whole["held_out_reward"].value == trained.summary["held_out"]["after"]["held_out_reward"]
    model = Path(str(trained.checkpoint))
    assert headrace.evaluate(model, **inputs).evaluation.tasks == whole.evaluation.tasks
    (model / "manifest.json").rename(model / "aside.json")
    try:
        alone = headrace.evaluate(**{**SMALL_MODEL, "model": {"path": str(model), "context": 32}}, **inputs)
    finally:
        (model / "aside.json").rename(model / "manifest.json")
    assert alone.evaluation.tasks == whole.evaluation.tasks and alone.version is None
    assert set(Path(tempfile.gettempdir()).glob("headrace-evaluate-*")) == before


def test_a_sampler_of_training_is_not_made(trained: RunResult, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(stream, *, seed):\n    raise RuntimeError('no training tasks here')\n")
    inputs: dict[str, Any] = {"held_out": TASKS[:2], "reward": length_reward}
    headrace.evaluate(trained.folder, sampler={"kind": f"{tmp_path}/mine.py:make"}, **inputs)


def test_two_models_are_compared_task_by_task(trained: RunResult, tmp_path: Path) -> None:
    inputs: dict[str, Any] = {"held_out": TASKS[:6], "reward": length_reward, "evaluate": {"samples": 2, "success_at": 0.2}}
    itself = headrace.evaluate(trained.folder, against=str(trained.checkpoint), **inputs)
    assert {name: each.value for name, each in itself.difference.items()} == dict.fromkeys(itself.evaluation.estimates, 0.0)
    (tmp_path / "itself.json").write_text(json.dumps(itself.to_dict()))
    other = headrace.evaluate(
        **{**SMALL_MODEL, "model": {**SMALL["model"], "num_layers": 2}}, against=tmp_path / "itself.json", **inputs
    )
    ours, theirs = (each["held_out_reward"].value for each in (other, itself))
    assert other.difference["held_out_reward"].value == pytest.approx(ours - theirs) and ours != theirs
    assert "minus" in str(other) and "pass@2" in str(other) and "2 samples at temperature 1, and greedy" in str(other)
    with pytest.raises(ConfigError, match="evaluated other tasks; give both evaluations the same"):
        headrace.evaluate(trained.folder, against=tmp_path / "itself.json", **inputs | {"held_out": TASKS[:5]})


def test_a_caller_inside_an_event_loop_may_evaluate(trained: RunResult) -> None:
    async def notebook() -> float:
        return headrace.evaluate(trained.folder, held_out=TASKS[:1], reward=length_reward)["success"].value

    assert 0 <= asyncio.run(notebook()) <= 1


BAD = [
    ({"evaluate": {"samples": 0}}, "evaluate.samples = 0: must be from 1 to 1024"),
    ({"evaluate": {"sampling": {"temperature": 0.0}}}, "evaluate.sampling.temperature = 0.0: must be a number above 0"),
    ({"evaluate": {"sampling": {"top_p": 0.0}}}, "evaluate.sampling.top_p = 0.0: must be in (0, 1]"),
    ({"evaluate": {"sampling": {"top_k": -1}}}, "evaluate.sampling.top_k = -1: must be ≥ 0"),
    ({"evaluate": {"sampling": {"min_p": 1.0}}}, "evaluate.sampling.min_p = 1.0: must be in [0, 1)"),
    ({"evaluate": {"sampling": {"max_tokens": -1}}}, "evaluate.sampling.max_tokens = -1: must be ≥ 0"),
    ({"evaluate": {"sampling": {"max_tokens": 32}}}, "evaluate.sampling.max_tokens = 32: leaves no room for a prompt"),
    ({"evaluate": {"sampling": {"max_tokens": 1}}, "sampling": {"min_tokens": 2}}, "must be ≥ sampling.min_tokens = 2"),
    ({"evaluate": {"answer": "last"}}, "evaluate.answer = 'last': must be module:f or file.py:f"),
    ({"evaluate": {"answer": "absent:f"}}, "evaluate.answer = 'absent:f': No module named 'absent'"),
    ({"evaluate": {"greedy": 1}}, "evaluate.greedy = 1: must be true or false"),
    ({"held_out": None, "evaluate": {"limit": 4}}, "evaluate.tasks: none are given"),
    ({"against": "absent.json"}, "against = 'absent.json': there is no such file"),
    ({"against": __file__}, "it is no file that `evaluate --json` wrote"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_refused_before_a_model_is_loaded(trained: RunResult, monkeypatch, changes, message: str) -> None:
    monkeypatch.setattr("headrace.launch.evaluation._evaluate", lambda *_: pytest.fail("it was loaded"))
    inputs: dict[str, Any] = {"held_out": TASKS[:4], "reward": length_reward}
    with pytest.raises(ConfigError, match=re.escape(message)):
        headrace.evaluate(trained.folder, **inputs | changes)


@pytest.mark.long
def test_engines_of_their_own_evaluate_alike_and_leave_nothing(trained: RunResult) -> None:
    inputs: dict[str, Any] = {"held_out": TASKS[:4], "reward": length_reward, "evaluate": {"samples": 2}}
    inline = headrace.evaluate(trained.folder, **inputs)
    local = headrace.evaluate(trained.folder, **inputs, orchestrate="local", engine={"count": 2})
    assert [task.rewards for task in local.evaluation.tasks] == [task.rewards for task in inline.evaluation.tasks]
    assert not list(Path(tempfile.gettempdir()).glob(f"headrace-{os.getpid()}-*"))


def test_engines_that_are_all_on_other_hosts_are_waited_for(trained: RunResult, capfd) -> None:
    places = {"engine": {"count": 0}, "cluster": {"listen": "127.0.0.1:0", "trainer_joins": True}}
    how: dict[str, Any] = {"orchestrate": "local", "deadline": 0.5, **places}
    with pytest.raises(RoleFailed, match=r"no engine has joined for 0.5 s \(deadline\)"):
        headrace.evaluate(str(trained.folder), held_out=TASKS[:2], reward=length_reward, **how)
    said = capfd.readouterr().out
    assert "headrace join tls://" in said and "trainer" not in said
