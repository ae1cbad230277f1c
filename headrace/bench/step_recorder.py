"""Watches an engine's steps around its updates: how long slots stalled, and what was computed twice."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.engine import EngineCore, Request, Runner, StepPlan


@dataclass(frozen=True)
class StepEnd:
    started: float
    at: float
    """When it ended."""
    decode_rows: int
    prompt_rows: int
    is_admitting: bool
    updates: int
    """Made before this step."""
    back: float = 1.0
    """Of the rollouts that decoded before the last update and have not ended, the share that decode in this step."""
    ready: float = math.inf
    """When the last update was done and the engine could step; until this step it was admitting work."""


class EngineWatch:
    """Wraps a core's functions to watch its steps, in the decode thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._scheduler = core, core.scheduler
        self._is_on = self._is_finishing = False
        self._clear()
        self._inner: Any = {name: getattr(core, name) for name in ("step", "changed_weights", "_finish", "cancel")} | {
            "plan": core.scheduler.plan
        }
        watched: Any = core
        watched.step, watched.changed_weights = self._step, self._changed_weights
        watched._finish, watched.cancel, watched.scheduler.plan = self._finish, self._cancel, self._plan

    def _clear(self) -> None:
        self._steps: list[StepEnd] = []
        self._updates = self._recomputed = 0
        self._ready = math.inf
        self._decoding: set[str] = set()
        self._away: set[str] = set()
        """Rollouts that decoded before the last update and not since."""

    def start(self) -> None:
        """Start counting from zero."""
        self._clear()
        self._is_on = True

    def stop(self) -> None:
        """Stop counting."""
        self._is_on = False

    def result(self) -> tuple[list[float], list[float], float, int]:
        """The stall of each update, its part before the engine could step, the usual step time, and the tokens recomputed."""
        steps = [step for step in self._steps if step.decode_rows + step.prompt_rows]
        usual = usual_step(steps)
        return stalls_of(steps, usual=usual), exchanges_of(steps), usual, self._recomputed

    def _step(self) -> StepPlan:
        is_admitting, updates, away = self._scheduler.is_admitting, self._updates, len(self._away)
        started = time.perf_counter()
        step: StepPlan = self._inner["step"]()
        if self._is_on:
            back = 1.0 - len(self._away) / away if away else 1.0
            rows = (step.decode_rows, step.prompt_rows)
            self._steps.append(StepEnd(started, time.perf_counter(), *rows, is_admitting, updates, back, self._ready))
        return step

    def _changed_weights(self, **names: str) -> None:
        self._updates += 1
        self._away = set(self._decoding)
        self._inner["changed_weights"](**names)
        self._ready = time.perf_counter()

    def _plan(self, runner: Runner) -> StepPlan:
        work: StepPlan = self._inner["plan"](runner)
        if work.is_empty or not self._is_on:
            return work
        running, slots = self._scheduler.running, self._scheduler.slots
        self._decoding = {running[slot].rollout.id for slot in work.decoding.tolist()}
        self._away -= self._decoding
        for chunk in work.chunks:
            request = running[chunk.slot]
            if request.rollout.calls or int(slots.length[chunk.slot]) > len(request.rollout):
                self._recomputed += chunk.stop - chunk.start
        return work

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._is_finishing = True
        self._inner["_finish"](request, reason)
        self._is_finishing = False
        if reason is not FinishReason.ABORT:
            self._forget(request)

    def _cancel(self, request: Request) -> None:
        if not self._is_finishing:
            self._forget(request)
        self._inner["cancel"](request)

    def _forget(self, request: Request) -> None:
        self._away.discard(request.rollout.id)
        self._decoding.discard(request.rollout.id)


def usual_step(steps: Sequence[StepEnd]) -> float:
    """The median time between the ends of two steps that only decode, with no update in between."""
    between = [
        after.at - before.at
        for before, after in itertools.pairwise(steps)
        if after.decode_rows and not after.prompt_rows and after.updates == before.updates
    ]
    return statistics.median(between) if between else float("nan")


def exchanges_of(steps: Sequence[StepEnd]) -> list[float]:
    """Seconds from the last step before each update until the engine could step again."""
    return [
        after.ready - before.at
        for before, after in itertools.pairwise(steps)
        if after.updates > before.updates and after.ready < math.inf
    ]


def stalls_of(steps: Sequence[StepEnd], *, usual: float) -> list[float]:
    """Seconds lost per update, until the step in which every rollout that decoded before it, and has not ended, decodes again.
    That step is no loss, whatever new prompts it computes."""
    places = [place for place in range(1, len(steps)) if steps[place].updates > steps[place - 1].updates]
    stalls = []
    for place, last in itertools.pairwise([*places, len(steps)]):
        start = place
        while start > 1 and not steps[start - 1].is_admitting and steps[start - 1].updates == steps[place - 1].updates:
            start -= 1  # `drain` stops admission before the update
        before = max(steps[start - 1].decode_rows, 1)
        lost = 0.0
        for index in range(start, last):
            step, ended = steps[index], steps[index - 1].at
            if index >= place and step.back == 1.0:
                lost += step.started - ended
                break
            share = min(1.0, step.decode_rows / before) if index < place else step.back
            lost += max(0.0, step.at - ended - usual * share)
        stalls.append(lost)
    return stalls
