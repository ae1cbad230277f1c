"""Held-out evaluation: the same tasks and seeds each time, at temperature 1 and greedily, counted apart from training."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.envs import CallLimit, EngineClient, run_episode
from headrace.records import InfraAbort, Invalid, Sampling
from headrace.score import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.config import Recipe
    from headrace.records import Episode, Plain
    from headrace.run.state import Roles

    Task = dict[str, Plain]


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    """`success`: share of sampled episodes with a reward of at least `evaluate.success_at`; `greedy`: the same, decoding
    greedily; `held_out_reward`: mean reward of the sampled ones. Each is over the scored episodes, and absent if there are
    none. With several sources also `success/NAME` and `greedy/NAME`. `held_out_failed`: episodes without a score."""
    episodes: tuple[Episode, ...]
    """The episodes sampled at temperature 1, for display."""
    count: int
    problem: str
    """Why the first unscored episode has no score."""


class Evaluator:
    """Runs tasks through a run's environment and scorer, with training's stop conditions."""

    def __init__(self, recipe: Recipe, roles: Roles) -> None:
        self._roles, self._seed, self._success_at = roles, recipe.seed, recipe.evaluate.success_at
        self._timeout = recipe.episode.timeout
        slots = recipe.engine.slots * recipe.engine.num_engines
        self._limit = CallLimit(slots) if self._timeout else None  # waiting for a slot must not count as an episode's time
        given = recipe.sampling
        self._sampling = Sampling(
            max_tokens=given.max_tokens,
            min_tokens=given.min_tokens,
            stop=given.stop,
            stop_ids=roles.stop_ids,
            keep_mask=False,
        )

    async def sampled_success(self, tasks: Sequence[Task], *, name: str) -> float:
        """The share solved at temperature 1."""
        episodes = await self._episodes(tasks, name=name, temperature=1.0)
        found = self._share(episodes)
        if found is None:
            raise RewardError(f"none of {len(tasks)} tasks could be judged; the first: {_problem(episodes)}")
        return found

    async def run(self, sources: Mapping[str, Sequence[Task]], *, name: str) -> Evaluation:
        """Evaluate sampled and greedy at once, to keep the engines full."""
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
        roles, sampling = self._roles, dataclasses.replace(self._sampling, temperature=temperature)

        def client(id: str) -> EngineClient:
            names: dict[str, Any] = {"episode": id, "group": id, "index": 0}
            how: dict[str, Any] = {"sampling": sampling, "seed": self._seed, "limit": self._limit}
            return EngineClient(roles.engine, roles.encoder, **names, **how)

        clients = [(task, client(f"{name}/{index}")) for index, task in enumerate(tasks)]
        running = (run_episode(roles.environment, task, each, timeout=self._timeout) for task, each in clients)
        episodes = await asyncio.gather(*running)
        judged = iter(await roles.scorer.score([episode for episode in episodes if episode.outcome is None]))
        return [episode if episode.outcome is not None else next(judged) for episode in episodes]

    def _share(self, episodes: Sequence[Episode]) -> float | None:
        """The share solved of the scored episodes: an error is not a zero."""
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        return sum(reward >= self._success_at for reward in rewards) / len(rewards) if rewards else None


def _problem(episodes: Sequence[Episode]) -> str:
    return next((e.outcome.reason for e in episodes if isinstance(e.outcome, Invalid | InfraAbort)), "")
