"""Held-out evaluation: the same tasks each time, sampled at temperature 1 and greedily, counted apart from training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine import UnusablePrompt
from headrace.engine.protocol import NotFinite
from headrace.envs import EngineClient
from headrace.types import Episode, InfraAbort, Invalid, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine import Engine
    from headrace.envs import Environment, PromptEncoder
    from headrace.score import Scorer
    from headrace.types import Plain


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found."""

    success: float
    """Share of sampled rollouts whose reward reached `evaluate.success_at`."""
    greedy: float
    """The same, decoding greedily."""
    reward: float
    """Mean reward of the sampled ones."""
    episodes: tuple[Episode, ...]
    """The sampled ones, for display."""
    count: int
    """Rollouts in all."""
    failed: int
    """Those whose reward failed; they are in no share."""


@dataclass(frozen=True)
class Evaluator:
    """Runs tasks through an environment and asks the scorer; holds no state."""

    engine: Engine
    environment: Environment
    scorer: Scorer
    encoder: PromptEncoder
    max_tokens: int
    stop_ids: tuple[int, ...]
    success_at: float
    seed: int

    async def sampled_success(self, tasks: Sequence[dict[str, Plain]], *, name: str) -> float:
        """The share solved at temperature 1, and nothing else."""
        return self._success(await self._episodes(tasks, name=name, temperature=1.0))

    async def run(self, tasks: Sequence[dict[str, Plain]], *, name: str) -> Evaluation:
        """Sampled and greedy together, so that one fills the gaps of the other."""
        sampled, greedy = await asyncio.gather(
            self._episodes(tasks, name=f"{name}/sampled", temperature=1.0),
            self._episodes(tasks, name=f"{name}/greedy", temperature=0.0),
        )
        rewards = [episode.reward for episode in sampled if episode.reward is not None]
        return Evaluation(
            success=self._success(sampled),
            greedy=self._success(greedy),
            reward=sum(rewards) / max(len(rewards), 1),
            episodes=tuple(sampled),
            count=len(sampled) + len(greedy),
            failed=sum(isinstance(episode.outcome, InfraAbort) for episode in (*sampled, *greedy)),
        )

    async def _episodes(self, tasks: Sequence[dict[str, Plain]], *, name: str, temperature: float) -> list[Episode]:
        episodes = await asyncio.gather(
            *(self._episode(task, name=f"{name}/{index}", temperature=temperature) for index, task in enumerate(tasks))
        )
        judged = iter(await self.scorer.score([episode for episode in episodes if episode.outcome is None]))
        return [episode if episode.outcome is not None else next(judged) for episode in episodes]

    async def _episode(self, task: dict[str, Plain], *, name: str, temperature: float) -> Episode:
        sampling = Sampling(
            temperature=temperature,
            max_tokens=self.max_tokens,
            stop_ids=self.stop_ids,
        )
        client = EngineClient(self.engine, self.encoder, episode=name, group=name, index=0, sampling=sampling, seed=self.seed)
        try:
            return await self.environment.run(task, client)
        except UnusablePrompt as error:
            return Episode(id=name, group=name, task=task, outcome=Invalid(str(error)))
        except NotFinite as error:  # of the weights, which training may mend: counted as failed, and not as a zero
            return Episode(id=name, group=name, task=task, outcome=InfraAbort(str(error)))

    def _success(self, episodes: Sequence[Episode]) -> float:
        """Of those that could be judged: an error is not a zero."""
        judged = [episode for episode in episodes if not isinstance(episode.outcome, InfraAbort)]
        reached = sum(episode.reward is not None and episode.reward >= self.success_at for episode in judged)
        return reached / max(len(judged), 1)
