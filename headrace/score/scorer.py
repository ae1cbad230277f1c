"""Gives finished episodes their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.records import InfraAbort, Invalid, Scored
from headrace.score.rewards import Failure, RewardFunction, Sample, together
from headrace.score.workers import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Episode, Outcome, Rollout
    from headrace.score.settings import RewardSettings
    from headrace.score.workers import RewardWorkers


class Scorer(Protocol):
    """Scores whole episodes."""

    @property
    def num_calls(self) -> int:
        """Reward calls that have ended in worker threads: shows progress while `score` runs."""

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The same episodes, in order, each with an outcome. The score loop calls it with all that have finished."""


class RewardScorer:
    """The weighted sum of reward functions."""

    def __init__(
        self,
        rewards: Sequence[tuple[RewardFunction, float]],
        *,
        decode: Callable[[Rollout], str],
        settings: RewardSettings,
        workers: RewardWorkers | None = None,
    ) -> None:
        """`workers` call plain rewards in their threads; without them, rewards are called in the event loop's thread."""
        self._rewards = list(rewards)
        self._decode = decode
        self._settings = settings
        self._workers = workers
        self._failures_in_a_row = 0

    @property
    def num_calls(self) -> int:
        return 0 if self._workers is None else self._workers.num_calls

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        samples = [self._sample(episode) for episode in episodes]
        settings, workers = self._settings, self._workers
        calls = (
            function.score(samples, attempts=settings.attempts, deadline=settings.timeout, workers=workers)
            for function, _ in self._rewards
        )
        is_async = workers is not None or any(function.is_async for function, _ in self._rewards)
        columns = await together(calls, is_async=is_async)
        return [self._judged(episode, list(results)) for episode, *results in zip(episodes, *columns, strict=True)]

    def _sample(self, episode: Episode) -> Sample:
        rollout = episode.rollouts[-1]
        return Sample(row=episode.task, completion=self._decode(rollout), completion_ids=rollout.completion_ids)

    def _judged(self, episode: Episode, results: list[float | Failure | None]) -> Episode:
        outcome, parts = self._outcome(results)
        rollouts = tuple(rollout.replace(outcome=outcome, rewards=parts) for rollout in episode.rollouts)
        return episode.replace(outcome=outcome, rollouts=rollouts)

    def _outcome(self, results: list[float | Failure | None]) -> tuple[Outcome, dict[str, float]]:
        parts: dict[str, float] = {}
        total = 0.0
        for (function, weight), result in zip(self._rewards, results, strict=True):
            if isinstance(result, Failure):
                self._count_failure(result)
                return InfraAbort(result.reason), {}
            if result is not None:
                parts[function.name] = result
                total += weight * result
        self._failures_in_a_row = 0
        return (Scored(total), parts) if parts else (Invalid("no reward applies"), {})

    def _count_failure(self, failure: Failure) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._settings.max_failures:
            problem = f"{self._failures_in_a_row} rewards failed in a row; the last: {failure.reason}"
            raise RewardError(problem) from failure.cause
