"""Samplers choose which task is next: by what earlier groups of it were worth, or by a user's own curriculum."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.imports import import_name
from headrace.settings import ConfigError
from headrace.tasks.settings import SAMPLERS, TaskError
from headrace.tasks.sources import Task, check_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import Array
    from headrace.tasks.settings import SamplerSettings
    from headrace.tasks.sources import TaskStream

_METHODS = ("next", "report", "state", "restore")


class TaskSampler(Protocol):
    """Made as `Class(stream, seed=…, **sampler.options)`. `stream.next()` is the next task of the shuffled mix, and
    `stream.get(source, index)` any task of it."""

    def next(self) -> Task:
        """The task of the next group. A task of one's own is `Task(row, source, index)`."""

    def report(self, task: Task, rewards: Sequence[float]) -> None:
        """A group of `task` has ended: the rewards of its scored rollouts, none if all failed. Called for every group once,
        when the next version is trained, in the order of submission."""

    def state(self) -> Any:  # noqa: ANN401  (what JSON can hold)
        """All it remembers, for a checkpoint, as JSON can hold it."""

    def restore(self, state: Any) -> None:  # noqa: ANN401
        """Continue from `state`, in a new object; the stream is restored already."""


_MAX_SKIPPED = 1000
"""Solved tasks skipped for one draw: a draw must not hold up the event loop when nearly everything is solved."""


class LearnableSampler:
    """Mixes new tasks with those of which it remembers that siblings' rewards differed; its choices follow from the seed.

    A task is worth the variance of its siblings' rewards, p (1 − p) for an all-or-nothing reward: 0 for what is always or never
    solved. The newest group counts half, those before it the other half.
    """

    def __init__(self, stream: TaskStream, *, seed: int, settings: SamplerSettings, success_at: float) -> None:
        self._stream, self._seed, self._settings, self._success_at = stream, seed, settings, success_at
        self._num_drawn = 0
        self._memory: dict[tuple[str, int], tuple[float, int]] = {}
        """Task -> its worth, and how often in a row all siblings solved it; -1 if none did. Longest unseen first."""
        self._in_flight: dict[tuple[str, int], None] = {}
        """Not drawn again before they are reported, but by the stream."""
        self._worths: Array | None = None

    def next(self) -> Task:
        random = np.random.default_rng((self._seed, 1, self._num_drawn))
        self._num_drawn += 1
        task = self._retried(random) or self._learnable(random) or self._unsolved()
        self._in_flight[task.source, task.index] = None
        return task

    def _retried(self, random: np.random.Generator) -> Task | None:
        if random.random() >= self._settings.retry_failed:
            return None
        failed = (key for key, (_, in_a_row) in self._memory.items() if in_a_row < 0 and key not in self._in_flight)
        key = next(failed, None)
        return None if key is None else self._stream.get(*key)

    def _learnable(self, random: np.random.Generator) -> Task | None:
        if not self._settings.is_learnable or random.random() < self._settings.explore:
            return None
        if self._worths is None:
            self._worths = np.array([worth for worth, _ in self._memory.values()])
        is_free = np.array([key not in self._in_flight for key in self._memory], dtype=bool)
        edges = np.cumsum(self._worths * is_free)
        if not len(edges) or edges[-1] <= 0:
            return None
        place = int(np.searchsorted(edges, random.random() * edges[-1], side="right"))
        return self._stream.get(*list(self._memory)[place])

    def _unsolved(self) -> Task:
        """The stream's next task that need not be skipped; if everything is solved, the next."""
        limit, task = self._settings.skip_solved, self._stream.next()
        for _ in range(min(2 * len(self._memory), _MAX_SKIPPED) if limit else 0):  # two epochs: first in one, last in the next
            if self._memory.get((task.source, task.index), (0.0, 0))[1] < limit:
                break
            task = self._stream.next()
        return task

    def report(self, task: Task, rewards: Sequence[float]) -> None:
        key = task.source, task.index
        self._in_flight.pop(key, None)
        if not rewards:
            return
        worth, in_a_row = float(np.var(rewards)), -1
        if key in self._memory:
            before, in_a_row = self._memory.pop(key)
            worth = (worth + before) / 2
        is_solved, is_failed = min(rewards) >= self._success_at, max(rewards) < self._success_at
        self._memory[key] = worth, max(in_a_row, 0) + 1 if is_solved else -1 if is_failed else 0
        if len(self._memory) > self._settings.remember:
            del self._memory[next(iter(self._memory))]
        self._worths = None

    def state(self) -> dict[str, Any]:
        memory = [[*key, *value] for key, value in self._memory.items()]
        return {"num_drawn": self._num_drawn, "memory": memory, "in_flight": [list(key) for key in self._in_flight]}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_drawn, self._worths = state["num_drawn"], None
        memory = {(source, index): (worth, in_a_row) for source, index, worth, in_a_row in state["memory"]}
        self._memory = {key: value for key, value in memory.items() if self._stream.has(*key)}  # the data may have been edited
        self._in_flight = dict.fromkeys((source, index) for source, index in state["in_flight"])


class SampledTasks:
    """A stream of the tasks that a sampler chooses. It keeps reports until the next version is trained, then hands them over in
    the order of submission: in exact mode, no choice depends on which group was complete first."""

    def __init__(self, stream: TaskStream, sampler: TaskSampler, *, name: str) -> None:
        self._stream, self._sampler, self._name = stream, sampler, name
        self._reports: list[tuple[int, Task, list[float]]] = []

    @property
    def position(self) -> int:
        """Tasks taken so far from the stream itself."""
        return self._stream.position

    def next(self) -> Task:
        task = self._sampler.next()
        if not isinstance(task, Task):
            raise TaskError(f"{self._name}: next() returned a {type(task).__name__}, not a headrace.tasks.Task")
        check_row(task.row, f"{self._name}: the row that next() returned")
        return task

    def report(self, number: int, task: Task, rewards: list[float]) -> None:
        self._reports.append((number, task, rewards))

    def hand_over(self) -> None:
        self._reports.sort(key=lambda report: report[0])
        while self._reports:
            _, task, rewards = self._reports[0]
            self._sampler.report(task, rewards)
            del self._reports[0]  # not before: if it raises, the checkpoint still has it

    def state(self) -> dict[str, Any]:
        reports = [[number, dataclasses.astuple(task), rewards] for number, task, rewards in self._reports]
        state = {"stream": self._stream.state(), "sampler": self._sampler.state(), "reports": reports}
        copied: dict[str, Any] = json.loads(json.dumps(state))  # it is written while the run goes on
        return copied

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state["stream"])
        self._sampler.restore(state["sampler"])
        self._reports = [(number, Task(*task), rewards) for number, task, rewards in state["reports"]]


def with_sampler(
    stream: TaskStream,
    settings: SamplerSettings,
    *,
    seed: int,
    success_at: float,
    given: Any = None,  # noqa: ANN401  (whatever a caller passed)
) -> TaskStream | SampledTasks:
    """The stream as `[sampler]` orders it, or `given`, a Python caller's class or function."""
    kind, name = settings.kind, "sampler=" if given is not None else f"sampler.kind = '{settings.kind}'"
    if given is None and kind in SAMPLERS:
        if not settings.remembers:
            return stream
        return SampledTasks(stream, LearnableSampler(stream, seed=seed, settings=settings, success_at=success_at), name=name)
    make = import_name(kind, setting="sampler.kind") if given is None else given
    if not callable(make):
        raise ConfigError(f"{name}: a {type(make).__name__} is not a class or function that makes a sampler")
    try:
        sampler = make(stream, seed=seed, **settings.options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; it is called with the stream, seed= and sampler.options") from error
    missing = [method for method in _METHODS if not callable(getattr(sampler, method, None))]
    if missing:
        raise ConfigError(f"{name}: has no {missing[0]}(); a sampler has {', '.join(_METHODS)}")
    try:
        json.dumps(sampler.state())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: state() is not JSON: {error}; return plain dicts, lists, numbers and strings") from error
    return SampledTasks(stream, sampler, name=name)
