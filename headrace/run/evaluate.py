"""Held-out evaluation: the same tasks and random numbers each time, counted apart from training."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.envs import CallLimit, EngineClient, run_episode
from headrace.imports import import_name
from headrace.records import InfraAbort, Invalid, Sampling
from headrace.run.estimates import TaskScore, estimates
from headrace.run.policy_groups import MAX_ATTEMPTS
from headrace.score import RewardError
from headrace.settings import to_dict
from headrace.user_code import UserThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from headrace.config import Recipe
    from headrace.records import Episode, Plain
    from headrace.run.estimates import Estimate
    from headrace.run.state import Roles

    Task = dict[str, Plain]

_SCORED_AT_ONCE = 64
"""Episodes a reward gets in one call, so that those of training do not wait for a whole evaluation."""


@dataclass(frozen=True)
class Evaluation:
    tasks: tuple[TaskScore, ...]
    estimates: dict[str, Estimate]
    """`success`: share of samples with a reward of at least `evaluate.success_at`, which is mean@k for every k; `greedy`: the
    same, decoding greedily; `held_out_reward`: mean reward of the samples; with several samples `pass@k` and `maj@k`. All are
    over the scored episodes, and absent if there are none."""
    sources: dict[str, dict[str, Estimate]]
    """The same for each source, if there are several."""
    versions: tuple[int, int] | None
    """The oldest and newest version that sampled a token; None if nothing was sampled."""
    failed: int
    """Episodes without a score."""
    problem: str
    """Why the first of them has none."""
    episodes: tuple[Episode, ...]
    """The first sample of each task, for display."""
    count: int

    @property
    def metrics(self) -> dict[str, float]:
        """Flat, for a run's metrics: the values, the interval of `success`, and for several sources `success/NAME` …"""
        found = {name: each.value for name, each in self.estimates.items()}
        if success := self.estimates.get("success"):
            found |= {"success_low": success.low, "success_high": success.high}
        for source, inside in self.sources.items():
            found |= {f"{name}/{source}": each.value for name, each in inside.items()}
        if self.versions is not None:
            found |= {"held_out_version_min": self.versions[0], "held_out_version_max": self.versions[1]}
        return {**found, "held_out_failed": self.failed}


class Evaluator:
    """Runs tasks through a run's environment and scorer, with training's stop conditions."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        *,
        limit: CallLimit | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`limit` bounds the calls at the engines; by default they get all. `on_progress` is called after every vote."""
        self._on_progress = on_progress
        self._roles, self._seed, self._settings = roles, recipe.seed, recipe.evaluate
        self._timeout, self._deadline, self._is_inline = recipe.episode.timeout, recipe.deadline, recipe.is_inline
        answer = recipe.evaluate.answer
        self._answer = import_name(answer, setting="evaluate.answer") if answer else str.strip
        if limit is None and self._timeout:  # waiting for a slot must not count as an episode's time
            limit = CallLimit(recipe.engine.slots * roles.num_engines(recipe))
        self._limit, self._leases = limit, recipe.partial.leases
        self._sampling = Sampling(
            max_tokens=recipe.sampling.max_tokens,
            min_tokens=recipe.sampling.min_tokens,
            stop=recipe.sampling.stop,
            stop_ids=roles.stop_ids,
            keep_mask=False,
        )

    async def sampled_success(self, tasks: Sequence[Task], *, name: str) -> float:
        """The share solved at temperature 1."""
        episodes = await self._episodes({f"{name}/{index}": task for index, task in enumerate(tasks)}, self._sampling)
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        if not rewards:
            raise RewardError(f"none of {len(tasks)} tasks could be judged; the first: {_problem(episodes)}")
        return sum(reward >= self._settings.success_at for reward in rewards) / len(rewards)

    async def run(self, sources: Mapping[str, Sequence[Task]]) -> Evaluation:
        """Evaluate sampled and greedy at once, to keep the engines full. Seeds derive from source, row and sample: every
        version and every model gets the same random numbers for the same sample of a task."""
        settings = self._settings
        rows = {f"eval/{source}/{index}": task for source, tasks in sources.items() for index, task in enumerate(tasks)}
        samples = {f"{id}/{sample}": task for id, task in rows.items() for sample in range(settings.samples)}
        given = to_dict(settings.sampling)
        how = dataclasses.replace(self._sampling, **given | {"max_tokens": given["max_tokens"] or self._sampling.max_tokens})
        greedily = dataclasses.replace(self._sampling, temperature=0.0, max_tokens=how.max_tokens)
        sampled, greedy = await asyncio.gather(
            self._episodes(samples, how),
            self._episodes({f"{id}/greedy": task for id, task in rows.items()} if settings.greedy else {}, greedily),
        )
        with contextlib.nullcontext() if self._is_inline else contextlib.closing(UserThread("evaluate.answer")) as thread:
            voted = [await self._vote(episode, thread) for episode in sampled]
        sampled = [episode for episode, _ in voted]
        tasks = tuple(
            TaskScore(
                source=id.removeprefix("eval/").rpartition("/")[0],
                id=task_id(task),
                rewards=tuple(episode.reward for episode, _ in of_task),
                answers=tuple(answer for _, answer in of_task),
                greedy=greedy[index].reward if greedy else None,
            )
            for index, (id, task) in enumerate(rows.items())
            for of_task in [voted[index * settings.samples : (index + 1) * settings.samples]]
        )
        found = functools.partial(estimates, success_at=settings.success_at)
        episodes = [*sampled, *greedy]
        versions = [rollout.versions[rollout.versions >= 0] for episode in episodes for rollout in episode.rollouts]
        sampled_by = np.concatenate([np.zeros(0, dtype=np.int32), *versions])
        return Evaluation(
            tasks=tasks,
            estimates=found(tasks),
            sources={name: found([task for task in tasks if task.source == name]) for name in sources if len(sources) > 1},
            versions=(int(sampled_by.min()), int(sampled_by.max())) if len(sampled_by) else None,
            failed=sum(episode.reward is None for episode in episodes),
            problem=_problem(episodes),
            episodes=tuple(sampled[:: settings.samples]),
            count=len(episodes),
        )

    async def _episodes(self, tasks: Mapping[str, Task], sampling: Sampling) -> list[Episode]:
        """The scored episodes of tasks by episode id."""
        roles = self._roles

        def client(id: str) -> EngineClient:
            names: dict[str, Any] = {"episode": id, "group": id, "index": 0}
            how: dict[str, Any] = {"sampling": sampling, "seed": self._seed, "limit": self._limit}
            leased = set[str]() if self._leases else None
            return EngineClient(engine=roles.engine, encoder=roles.encoder, **names, **how, leased=leased)

        async def run(id: str, task: Task) -> Episode:
            """Again if its environment failed, as in training."""
            attempts, limits = 0, {"timeout": self._timeout, "deadline": self._deadline}
            while True:
                episode, attempts = await run_episode(roles.environment, task, client(id), **limits), attempts + 1
                if not isinstance(episode.outcome, InfraAbort) or attempts == MAX_ATTEMPTS:
                    return episode if attempts == 1 else episode.replace(attempts=attempts)

        episodes = await asyncio.gather(*(run(id, task) for id, task in tasks.items()))
        unscored = [episode for episode in episodes if episode.outcome is None]
        scored: list[Episode] = []
        for start in range(0, len(unscored), _SCORED_AT_ONCE):
            scored += await roles.scorer.score(unscored[start : start + _SCORED_AT_ONCE], is_training=False)
        judged = iter(scored)
        return [episode if episode.outcome is not None else next(judged) for episode in episodes]

    async def _vote(self, episode: Episode, thread: UserThread | None) -> tuple[Episode, str | None]:
        """The episode and the answer it votes for in maj@k, of the text that rewards see. If the user's function raises, the
        episode counts as one that could not be judged. It is called in `thread`, where it blocks nobody."""
        settings = self._settings
        if settings.samples == 1 or episode.reward is None or not episode.rollouts:
            return episode, None
        text, named = self._roles.encoder.decode(episode.rollouts[-1]), f"evaluate.answer = {settings.answer!r}"
        try:
            async with asyncio.timeout(self._deadline) as limit:
                answer = self._answer(text) if thread is None else await thread.call(self._answer, text)
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardError(f"{named} has not returned within deadline = {self._deadline:g} seconds") from error
            return episode.replace(outcome=InfraAbort(f"{named} raised {type(error).__name__}: {error}")), None
        self._on_progress()
        return episode, None if answer is None else str(answer)


def task_id(task: Task) -> str:
    """A hash of the row."""
    return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12]


def _problem(episodes: Sequence[Episode]) -> str:
    return next((e.outcome.reason for e in episodes if isinstance(e.outcome, Invalid | InfraAbort)), "")
