"""Evaluation samples as training does, says what each source found, and goes on past what the policy cannot be blamed for."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import TASKS, small_run

from headrace.config import make_recipe
from headrace.engine import UnusablePrompt
from headrace.engine.protocol import NotFinite
from headrace.envs import SingleTurn
from headrace.records import Episode, Rollout, Sampling, Scored
from headrace.run.evaluate import Evaluator
from headrace.score import RewardError

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
    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode.replace(outcome=Scored(reward=float(episode.task["prompt"]))) for episode in episodes]


def make_evaluator() -> Evaluator:
    roles: Any = SimpleNamespace(engine=None, encoder=None, environment=Environment(), scorer=Scorer(), stop_ids=())
    return Evaluator(make_recipe({}), roles)


def evaluate(**sources: list[str]) -> dict[str, float]:
    tasks = {name: [{"prompt": prompt} for prompt in prompts] for name, prompts in sources.items()}
    evaluation = asyncio.run(make_evaluator().run(tasks, name="eval"))
    assert evaluation.count == 2 * sum(map(len, sources.values()))
    assert bool(evaluation.problem) == bool(evaluation.metrics["held_out_failed"])
    return evaluation.metrics


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_rollout_that_could_not_be_judged_is_neither_a_zero_nor_the_end_of_the_run(problem: str) -> None:
    found = {"success": 0.5, "greedy": 0.5, "held_out_reward": 0.75}
    assert evaluate(tasks=["1", problem, "0.5"]) == {**found, "held_out_failed": 2}
    assert evaluate(tasks=[problem, problem]) == {"held_out_failed": 4}, "0 % would be a verdict"


def test_each_of_several_sources_has_its_own_share() -> None:
    found = evaluate(easy=["1", "1"], hard=["0", "0", "1", "0"], broken=["raises"])
    assert found == {
        **{"success": 0.5, "greedy": 0.5, "held_out_reward": 0.5, "held_out_failed": 2},
        **{"success/easy": 1.0, "greedy/easy": 1.0, "success/hard": 0.25, "greedy/hard": 0.25},
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
    recipe = make_recipe({"episode": {"timeout": 1000.0}, "engine": {"slots": 1, "count": 2}})

    async def main() -> dict[str, float]:
        running = asyncio.ensure_future(Evaluator(recipe, roles).run({"tasks": 3 * [{"prompt": "1"}]}, name="eval"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(client.clock.when() is None for client in started) == 2 * [False] + 4 * [True]
        go_on.set()
        return (await running).metrics

    assert asyncio.run(asyncio.wait_for(main(), 10))["held_out_failed"] == 0


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
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["held_out_failed"] == 2 and row["success"] == row["success/tasks"]
        assert "success/tasks#2" not in row
    assert run.summary["success_before"] is not None and "success/tasks" in run.summary["held_out"]["before"]
