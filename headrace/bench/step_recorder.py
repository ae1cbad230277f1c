"""Watches an engine's steps around its updates: how long slots stalled, and what was computed twice."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine import EngineCore, Runner, StepPlan


@dataclass(frozen=True)
class RecordedStep:
    started: float
    ended: float
    decoding: frozenset[str]
    """The ids of the rollouts that decoded in it."""
    has_prompts: bool
    is_admitting: bool
    updates: int
    """Made before this step."""
    ready: float = math.inf
    """When the last update was done and the engine could step; until this step it was admitting work."""


class StepRecorder:
    """Wraps a core's functions to record its steps, in the decode thread."""

    def __init__(self, core: EngineCore) -> None:
        self._scheduler, self.is_on = core.scheduler, False
        self._inner: Any = {"step": core.step, "changed_weights": core.changed_weights, "plan": core.scheduler.plan}
        watched: Any = core
        watched.step, watched.changed_weights, watched.scheduler.plan = self._step, self._changed_weights, self._plan

    def start(self) -> None:
        """Start from nothing; set `is_on` to False to stop."""
        self.steps: list[RecordedStep] = []
        self.recomputed = 0
        """Tokens whose keys and values were computed twice."""
        self._updates, self._ready, self._decoding = 0, math.inf, frozenset[str]()
        self.is_on = True

    def _step(self) -> StepPlan:
        is_admitting, started = self._scheduler.is_admitting, time.perf_counter()
        plan: StepPlan = self._inner["step"]()
        if self.is_on and not plan.is_empty:
            given = (self._decoding, bool(plan.chunks), is_admitting, self._updates, self._ready)
            self.steps.append(RecordedStep(started, time.perf_counter(), *given))
        return plan

    def _changed_weights(self, **names: str) -> None:
        self._inner["changed_weights"](**names)
        if self.is_on:
            self._updates, self._ready = self._updates + 1, time.perf_counter()

    def _plan(self, runner: Runner) -> StepPlan:
        plan: StepPlan = self._inner["plan"](runner)
        if self.is_on:
            running, slots = self._scheduler.running, self._scheduler.slots
            self._decoding = frozenset(running[slot].rollout.id for slot in plan.decoding.tolist())
            for chunk in plan.chunks:
                rollout = running[chunk.slot].rollout
                if rollout.calls or int(slots.length[chunk.slot]) > len(rollout):
                    self.recomputed += chunk.stop - chunk.start
        return plan


def usual_step(steps: Sequence[RecordedStep]) -> float:
    """The median time between the ends of two steps that only decode, with no update in between."""
    between = [
        after.ended - before.ended
        for before, after in itertools.pairwise(steps)
        if after.decoding and not after.has_prompts and after.updates == before.updates
    ]
    return statistics.median(between) if between else math.nan


def exchanges_of(steps: Sequence[RecordedStep]) -> list[float]:
    """Seconds from the last step before each update until the engine could step again."""
    return [after.ready - before.ended for before, after in itertools.pairwise(steps) if after.updates > before.updates]


def stalls_of(steps: Sequence[RecordedStep], *, usual: float) -> list[float]:
    """Seconds lost per update, until the step in which every rollout that decoded before it, and has not ended, decodes again.
    That step is no loss, whatever new prompts it computes."""
    last_seen = {rollout: index for index, step in enumerate(steps) for rollout in step.decoding}
    places = [place for place in range(1, len(steps)) if steps[place].updates > steps[place - 1].updates]
    stalls = []
    for place, next_place in itertools.pairwise([*places, len(steps)]):
        start = place
        while start > 1 and not steps[start - 1].is_admitting and steps[start - 1].updates == steps[place - 1].updates:
            start -= 1  # `drain` stops admission before the update
        full, lost = max(len(steps[start - 1].decoding), 1), 0.0
        before, back = steps[place - 1].decoding, frozenset[str]()
        for index in range(start, next_place):
            step, ended = steps[index], steps[index - 1].ended
            share = min(1.0, len(step.decoding) / full)
            if index >= place:
                back |= step.decoding
                going_on = {rollout for rollout in before if last_seen[rollout] >= index}
                if going_on <= back:
                    lost += step.started - ended
                    break
                share = len(going_on & back) / len(going_on)
            lost += max(0.0, step.ended - ended - usual * share)
        stalls.append(lost)
    return stalls
