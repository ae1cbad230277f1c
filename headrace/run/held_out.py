"""When a run evaluates its held-out tasks, and where the results go.

Before the first version and after the last the run waits; in between it evaluates beside training, if it may. One evaluation
runs at a time. What is lost when a run stops or fails is made again when it resumes (`Progress.evaluating`).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.envs import CallLimit
from headrace.observe import held_out_line
from headrace.partial import engines_take_turns
from headrace.run.evaluate import Evaluator

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.run.session import Session

_SHARE = 4
"""An evaluation beside training has at most one of so many slots."""


class HeldOutEvaluations:
    """Those of one session."""

    def __init__(self, session: Session) -> None:
        self._session, recipe = session, session.recipe
        # In exact mode nothing may depend on timing, and engines that take turns with the trainer stop while it trains.
        self._is_beside = recipe.evaluate.beside and not (recipe.is_inline or recipe.exact or engines_take_turns(recipe))
        self._beside: asyncio.Task[None] | None = None
        """The evaluation beside training, running or ended."""
        self._limit = CallLimit(0)
        """Its share of the slots."""
        self._has_skipped = False

    @property
    def _num_slots(self) -> int:
        return self._recipe.engine.slots * self._session.roles.num_engines(self._recipe)

    @property
    def _recipe(self) -> Recipe:
        """As it stands: callbacks may change it."""
        return self._session.recipe

    def is_waited_for(self, version: int) -> bool:
        """Whether the trainer waits while this version is evaluated."""
        return self._is_due(version) and not self._is_beside

    def _is_due(self, version: int) -> bool:
        every, is_last = self._recipe.evaluate.every, version == self._recipe.steps
        return bool(self._session.held_out) and (is_last or (every > 0 and version % every == 0))

    @property
    def _is_running(self) -> bool:
        return self._beside is not None and not self._beside.done()

    async def before_loops(self) -> None:
        """In every leg, once the engines hold the weights: evaluate before RL, or again what was lost when the run ended."""
        progress, version = self._session.progress, self._session.policy.version
        if version == 0 and progress.held_out_before is None and self._session.held_out:
            progress.evaluating = 0
            await self._evaluate_outside(0)
        elif progress.evaluating is not None and version < self._recipe.steps:
            await self._start(version)

    async def after_version(self, version: int) -> None:
        """The `train` loop calls it after each version; it waits unless the evaluation runs beside training."""
        if not self._is_due(version):
            return
        if version == self._recipe.steps:
            self._session.progress.evaluating = version  # `after_loops` makes it
        elif not self._is_running:
            await self._start(version)
        elif not self._has_skipped:
            self._has_skipped = True
            self._session.observer.screen.say(
                f"version {version} is not evaluated: that of version {self._session.progress.evaluating} is not done yet, and "
                f"one runs at a time; raise evaluate.every, lower evaluate.limit, or set evaluate.beside = false to wait"
            )

    async def after_loops(self) -> None:
        """Evaluate the last version."""
        if self._session.policy.version == self._recipe.steps and self._session.progress.evaluating is not None:
            await self._evaluate_outside(self._recipe.steps)

    async def _start(self, version: int) -> None:
        session = self._session
        session.progress.evaluating = version
        if self._is_beside:
            self._limit = CallLimit(max(1, self._num_slots // _SHARE))
            self._beside = session.run.spawn(self._evaluate, version, limit=self._limit)
        else:
            with session.observer.timeline("trainer").during("evaluate"):
                await self._evaluate(version)

    async def _evaluate_outside(self, version: int) -> None:
        """Before or after RL: it takes no part of RL's time. One that still runs ends first, now with all slots."""
        session, began = self._session, time.perf_counter()
        await session.roles.refresh()
        with session.observer.left_out():
            if self._is_running:
                assert self._beside is not None
                for _ in range(self._num_slots):
                    self._limit.release()
                await asyncio.wait({self._beside})
            await self._evaluate(version)
            await session.roles.refresh()
        seconds = time.perf_counter() - began
        session.progress.seconds_evaluating += seconds
        session.last_moment += seconds

    async def _evaluate(self, version: int, *, limit: CallLimit | None = None) -> None:
        """Evaluate once the engines hold `version`; beside training they may go on to newer ones."""
        session, progress, say = self._session, self._session.progress, self._session.observer.screen.say
        if session.policy.publication is not None:
            await asyncio.wait({session.policy.publication})
        evaluator = Evaluator(self._recipe, session.roles, limit=limit, on_progress=session.run.note_progress)
        evaluation = await evaluator.run(session.held_out)
        session.policy.ledger.evaluation += evaluation.count
        session.samples = evaluation.episodes[:3]
        found = evaluation.metrics
        if progress.evaluating == version:  # otherwise the last one is due meanwhile
            progress.evaluating = None
        if version == 0:
            progress.held_out_before = found
        else:
            progress.held_out_after, progress.held_out_version = found, version
            session.observer.held_out(version, found)
        when = f"version {version}" if version else "before RL"
        say(f"held-out   {held_out_line(found, temperature=self._recipe.evaluate.sampling.temperature)}, {when}")
        if evaluation.failed:
            failed = f"{evaluation.failed} of {evaluation.count} rollouts could not be judged"
            say(f"held-out   {failed}; the first: {evaluation.problem}")
        await session.call("on_evaluate", evaluation, version=version)
