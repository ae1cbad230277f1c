"""Held-out evaluation: the same tasks and random numbers each time, sampled at temperature 1 and greedily, counted apart from
training."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.envs import EngineClient
from headrace.records import InfraAbort, Invalid, Sampling
from headrace.run.work import run_episode
from headrace.score import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.config import Recipe
    from headrace.engine import Engine
    from headrace.envs import Environment, PromptEncoder
    from headrace.records import Episode, Plain
    from headrace.run.roles import Roles
    from headrace.score import Scorer

    Task = dict[str, Plain]


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found."""

    metrics: dict[str, float]
    """`success`: the share of sampled rollouts whose reward reached `evaluate.success_at`, `greedy`: the same, decoding
    greedily, `held_out_reward`: the mean reward of the sampled ones, each of the rollouts that could be judged and left out
    where none could. `success/NAME` and `greedy/NAME` of each source, where there are several. `held_out_failed`: how many
    could not be judged."""
    episodes: tuple[Episode, ...]
    """The sampled ones, for display."""
    count: int
    """Rollouts in all."""
    problem: str
    """Why the first that could not be judged was not; empty where all were."""


@dataclass(frozen=True)
class Evaluator:
    """Runs tasks through an environment and asks the scorer; holds no state."""

    engine: Engine
    environment: Environment
    scorer: Scorer
    encoder: PromptEncoder
    sampling: Sampling
    """But for its temperature."""
    success_at: float
    seed: int

    async def sampled_success(self, tasks: Sequence[Task], *, name: str) -> float:
        """The share solved at temperature 1, and nothing else."""
        episodes = await self._episodes(tasks, name=name, temperature=1.0)
        found = self._share(episodes)
        if found is None:
            raise RewardError(f"none of {len(tasks)} tasks could be judged; the first: {_problem(episodes)}")
        return found

    async def run(self, sources: Mapping[str, Sequence[Task]], *, name: str) -> Evaluation:
        """Sampled and greedy together, so that one fills the gaps of the other."""
        tasks = [task for rows in sources.values() for task in rows]
        sampled, greedy = await asyncio.gather(
            self._episodes(tasks, name=f"{name}/sampled", temperature=1.0),
            self._episodes(tasks, name=f"{name}/greedy", temperature=0.0),
        )
        rewards = [episode.reward for episode in sampled if episode.reward is not None]
        found: dict[str, float | None] = {
            "success": self._share(sampled),
            "greedy": self._share(greedy),
            "held_out_reward": sum(rewards) / len(rewards) if rewards else None,
            "held_out_failed": sum(episode.reward is None for episode in (*sampled, *greedy)),
        }
        start = 0
        for source, rows in sources.items() if len(sources) > 1 else ():
            span = slice(start, start := start + len(rows))
            found |= {f"success/{source}": self._share(sampled[span]), f"greedy/{source}": self._share(greedy[span])}
        return Evaluation(
            metrics={name: value for name, value in found.items() if value is not None},
            episodes=tuple(sampled),
            count=len(sampled) + len(greedy),
            problem=_problem([*sampled, *greedy]),
        )

    async def _episodes(self, tasks: Sequence[Task], *, name: str, temperature: float) -> list[Episode]:
        sampling = dataclasses.replace(self.sampling, temperature=temperature)
        clients = [self._client(f"{name}/{index}", sampling) for index in range(len(tasks))]
        episodes = await asyncio.gather(*map(run_episode, [self.environment] * len(tasks), tasks, clients))
        judged = iter(await self.scorer.score([episode for episode in episodes if episode.outcome is None]))
        return [episode if episode.outcome is not None else next(judged) for episode in episodes]

    def _client(self, name: str, sampling: Sampling) -> EngineClient:
        return EngineClient(self.engine, self.encoder, episode=name, group=name, index=0, sampling=sampling, seed=self.seed)

    def _share(self, episodes: Sequence[Episode]) -> float | None:
        """Solved, of those that could be judged: an error is not a zero."""
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        return sum(reward >= self.success_at for reward in rewards) / len(rewards) if rewards else None


def make_evaluator(recipe: Recipe, roles: Roles) -> Evaluator:
    """Of a run: rollouts end where those of training do."""
    sampling = recipe.sampling
    return Evaluator(
        engine=roles.engine,
        environment=roles.environment,
        scorer=roles.scorer,
        encoder=roles.encoder,
        sampling=Sampling(
            max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, stop=sampling.stop, stop_ids=roles.stop_ids
        ),
        success_at=recipe.evaluate.success_at,
        seed=recipe.seed,
    )


def _problem(episodes: Sequence[Episode]) -> str:
    return next((e.outcome.reason for e in episodes if isinstance(e.outcome, Invalid | InfraAbort)), "")
