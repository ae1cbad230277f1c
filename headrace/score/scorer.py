"""Gives finished episodes their outcomes."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.records import UNSHAPED, InfraAbort, Invalid, Rollout, Scored, Source
from headrace.score.metric_log import MetricLog
from headrace.score.rewards import Failure, RewardFunction
from headrace.score.shaping import overlong
from headrace.score.signature import RewardError, Sample, TrainerState, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.records import Episode, Outcome
    from headrace.score.metric_log import Sums
    from headrace.score.rewards import Result
    from headrace.score.settings import RewardSettings
    from headrace.score.workers import RewardWorkers


OVERLONG = "overlong"
"""The name of the punishment for length among a rollout's rewards."""


class Scorer(Protocol):
    """Scores whole episodes."""

    @property
    def num_calls(self) -> int:
        """Reward calls that have ended in worker threads or were awaited: shows progress while `score` runs."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each of `Rollout.rewards`, by name."""

    async def score(self, episodes: Sequence[Episode], *, is_training: bool = True) -> list[Episode]:
        """The same episodes, in order, each with an outcome. The score loop calls it with all that have finished; evaluations
        are not shaped, and log nothing."""

    def take_logged(self) -> Sums:
        """[sum, count] of each metric that rewards logged since the last call, for the metrics of a version."""


class RewardScorer:
    """The weighted sum of reward functions."""

    def __init__(
        self,
        rewards: Sequence[tuple[RewardFunction, float]],
        *,
        decode: Callable[[Rollout], str],
        settings: RewardSettings,
        workers: RewardWorkers | None = None,
        state: TrainerState = TrainerState(),  # noqa: B008  (frozen)
        max_tokens: int = 0,
    ) -> None:
        """`workers` call plain rewards in their threads, and completions are decoded in another; without them, all of it
        happens in the event loop's thread. `state` is what rewards may know of the run. `max_tokens`: of a completion."""
        self._rewards = list(rewards)
        self._decode, self._settings, self._workers = decode, settings, workers
        self._state, self._max_tokens, self._log = state, max_tokens, MetricLog()
        self._decoding = None if workers is None else ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._takes_turns = any("turns" in function.signature.given for function, _ in self._rewards)
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._failures_in_a_row = 0

    @property
    def num_calls(self) -> int:
        pools = [] if self._workers is None else [self._workers, self._workers.processes]
        called = sum(pool.num_calls for pool in pools if pool is not None)
        return called + sum(function.num_awaited for function, _ in self._rewards)

    @property
    def weights(self) -> dict[str, float]:
        own = {OVERLONG: self._settings.overlong_penalty, UNSHAPED: 0.0} if self._settings.overlong_buffer else {}
        return {function.name: weight for function, weight in self._rewards} | own

    def take_logged(self) -> Sums:
        return self._log.take()

    async def score(self, episodes: Sequence[Episode], *, is_training: bool = True) -> list[Episode]:
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
                log=self._log if is_training else None,
            )
            for function, _ in self._rewards
        )
        is_elsewhere = self._workers is not None or any(function.is_async for function, _ in self._rewards)
        # What is computed right here is awaited here: as tasks, other roles would run within the scorer's time.
        columns = await asyncio.gather(*calls) if is_elsewhere else [await call for call in calls]
        scored = []
        for episode, *results in zip(episodes, *columns, strict=True):
            outcome, parts = self._outcome(results, episode, is_training=is_training)
            rollouts = tuple(rollout.replace(outcome=outcome, rewards=parts) for rollout in episode.rollouts)
            scored.append(episode.replace(outcome=outcome, rollouts=rollouts))
        return scored

    def _samples(self, episodes: Sequence[Episode]) -> list[Sample]:
        return [self._sample(episode, episode.rollouts[-1]) for episode in episodes]

    def _sample(self, episode: Episode, rollout: Rollout) -> Sample:
        completion_ids = rollout.completion_ids
        return Sample(
            episode.task,
            completion=self._decode(rollout),
            completion_ids=completion_ids,
            prompt_ids=rollout.token_ids[: len(rollout) - len(completion_ids)].tolist(),
            finish_reason=str(rollout.finish_reason or ""),
            state=dataclasses.replace(self._state, global_step=max(0, int(rollout.versions.max(initial=0)))),
            turns=self._turns(episode) if self._takes_turns else [],
            episode=episode,
        )

    def _turns(self, episode: Episode) -> list[Turn]:
        turns = []
        for number, rollout in enumerate(episode.rollouts):
            reasons = {call.start: call.finish_reason.value for call in rollout.calls}
            changes = np.flatnonzero(np.diff(rollout.source)) + 1
            shared = 0 if rollout.parent is None else rollout.parent[1]
            starts = sorted(at for at in {shared, *changes.tolist(), *reasons} if shared <= at < len(rollout))
            for start, stop in zip(starts, [*starts[1:], len(rollout)], strict=True):
                part = Rollout.from_prompt([], id=rollout.id).append(rollout.token_ids[start:stop])
                turns.append(
                    Turn(
                        Source(int(rollout.source[start])).name.lower(),
                        self._decode(part),
                        rollout=number,
                        finish_reason=reasons.get(start, ""),
                        reward=float(sum(value for token, value in rollout.step_rewards if start <= token < stop)),
                    )
                )
        return turns

    def _outcome(self, results: list[Result], episode: Episode, *, is_training: bool) -> tuple[Outcome, dict[str, float]]:
        """The weighted sum, and its parts by reward; a failure of any part fails the whole. Rewards of the environment count as
        they are."""
        own = episode.rollouts[-1].rewards
        parts, total = dict(own), sum(own.values())
        if twice := own.keys() & {function.name for function, _ in self._rewards}:
            raise RewardError(
                f"reward: the environment and a reward function both name theirs {min(twice)!r}; rename the function"
            )
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
        settings = self._settings
        if parts and is_training and settings.overlong_buffer:
            length = max(map(_longest_answer, episode.rollouts))
            parts[UNSHAPED] = total
            parts[OVERLONG] = overlong(length, max_length=self._max_tokens, buffer=settings.overlong_buffer)
            total += settings.overlong_penalty * parts[OVERLONG]
        return (Scored(total), parts) if parts else (Invalid("no reward applies"), {})


def _longest_answer(rollout: Rollout) -> int:
    """Tokens sampled in a row, which is what `sampling.max_tokens` bounds; an interrupted answer is of several calls."""
    edges = np.flatnonzero(np.diff(rollout.is_sampled, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))
