"""Gives finished episodes their outcomes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from headrace.records import InfraAbort, Invalid, Scored
from headrace.score.rewards import Failure, RewardFunction, Sample
from headrace.score.workers import RewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Episode, Outcome, Rollout
    from headrace.score.rewards import Result
    from headrace.score.settings import RewardSettings
    from headrace.score.workers import RewardWorkers


class Scorer(Protocol):
    """Scores whole episodes."""

    @property
    def num_calls(self) -> int:
        """Reward calls that have ended in worker threads or were awaited: shows progress while `score` runs."""

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
        """`workers` call plain rewards in their threads, and completions are decoded in another; without them, all of it
        happens in the event loop's thread."""
        self._rewards = list(rewards)
        self._decode, self._settings, self._workers = decode, settings, workers
        self._decoding = None if workers is None else ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._failures_in_a_row = 0

    @property
    def num_calls(self) -> int:
        awaited = sum(function.num_awaited for function, _ in self._rewards)
        return awaited + (0 if self._workers is None else self._workers.num_calls)

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        if self._decoding is None:
            samples = self._samples(episodes)
        else:  # one thread, so that rewards are called in the order of episodes
            samples = await asyncio.get_running_loop().run_in_executor(self._decoding, self._samples, episodes)
        settings = self._settings
        calls = (
            function.score(
                samples,
                attempts=settings.attempts,
                deadline=settings.timeout,
                workers=self._workers,
                places=self._places,
            )
            for function, _ in self._rewards
        )
        is_elsewhere = self._workers is not None or any(function.is_async for function, _ in self._rewards)
        # What is computed right here is awaited here: as tasks, other roles would run within the scorer's time.
        columns = await asyncio.gather(*calls) if is_elsewhere else [await call for call in calls]
        scored = []
        for episode, *results in zip(episodes, *columns, strict=True):
            outcome, parts = self._outcome(results)
            rollouts = tuple(rollout.replace(outcome=outcome, rewards=parts) for rollout in episode.rollouts)
            scored.append(episode.replace(outcome=outcome, rollouts=rollouts))
        return scored

    def _samples(self, episodes: Sequence[Episode]) -> list[Sample]:
        last = [(episode.task, episode.rollouts[-1]) for episode in episodes]
        return [Sample(task, completion=self._decode(rollout), completion_ids=rollout.completion_ids) for task, rollout in last]

    def _outcome(self, results: list[Result]) -> tuple[Outcome, dict[str, float]]:
        """The weighted sum, and its parts by reward; a failure of any part fails the whole."""
        parts: dict[str, float] = {}
        total = 0.0
        for (function, weight), result in zip(self._rewards, results, strict=True):
            if isinstance(result, Failure):
                self._failures_in_a_row += 1
                if self._failures_in_a_row >= self._settings.max_failures:
                    problem = f"{self._failures_in_a_row} rewards failed in a row; the last: {result.reason}"
                    raise RewardError(problem) from result.cause
                return InfraAbort(result.reason), {}
            if result is not None:
                parts[function.name] = result
                total += weight * result
        self._failures_in_a_row = 0
        return (Scored(total), parts) if parts else (Invalid("no reward applies"), {})
