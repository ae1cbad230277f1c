"""Evaluation goes on past what the policy cannot be blamed for, and counts it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headrace.engine.protocol import NotFinite
from headrace.orchestrate.evaluate import Evaluator
from headrace.types import Episode, Scored

if TYPE_CHECKING:
    from collections.abc import Sequence


class Environment:
    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        if task["is_lost"]:
            raise NotFinite("the model's logits are not finite")
        return Episode(id=client.episode, group=client.episode, task=task)


class Scorer:
    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode.replace(outcome=Scored(reward=1.0)) for episode in episodes]


def test_a_rollout_that_is_not_finite_is_neither_a_zero_nor_the_end_of_the_run() -> None:
    engine: Any = None
    encoder: Any = None
    evaluator = Evaluator(engine, Environment(), Scorer(), encoder, max_tokens=4, stop_ids=(), success_at=1.0, seed=0)
    tasks = [{"is_lost": is_lost} for is_lost in (False, True, False)]
    evaluation = asyncio.run(evaluator.run(tasks, name="held-out"))
    assert evaluation.failed == 2 and evaluation.count == 6
    assert evaluation.success == evaluation.greedy == evaluation.reward == 1.0
