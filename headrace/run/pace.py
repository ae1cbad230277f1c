"""Measures how a run goes, for the controller of `staleness.max_lag = "auto"`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from headrace.staleness import START_DEPTH, LagController, Observation

if TYPE_CHECKING:
    from headrace.config import Recipe


class Pace:
    """What one version after the other took, of one policy. The loops tell it what happens; `trained` closes a version."""

    def __init__(self, recipe: Recipe, *, shares_device: bool) -> None:
        self.controller = LagController(
            groups_per_batch=recipe.train.groups_per_batch,
            limit=recipe.staleness.max_lag_limit,
            start=START_DEPTH,
            parts=recipe.stream_parts,
            shares_device=shares_device,
        )
        self._complete = 0
        """Groups of the version that is trained now, or a later one, that were complete when it began."""
        self._group_size, self.slots = recipe.train.group_size, recipe.engine.slots * recipe.engine.num_engines
        self._free_since: float | None = None
        """When the trainer ran out of work."""
        self._wanted_since: float | None = None
        """When the train loop began to wait for a batch, or a part of one."""
        self._last: float | None = None
        """When the last version was trained; None before the first."""
        self._noted_at, self._empty = time.perf_counter(), 0.0
        """When the load was last noted, and the share of slots that was empty behind a closed gate since."""
        self._begin_version()

    def _begin_version(self) -> None:
        self._waited = self._held = 0.0
        self._latencies: list[float] = []
        self._arrivals: list[float] = []
        self._queued: int | None = None

    def note_load(self, *, calls: int, is_closed: bool) -> None:
        """Generate calls that run or wait for a slot from now on, and whether nothing more may be submitted."""
        now = time.perf_counter()
        self._held += (now - self._noted_at) * self._empty
        self._noted_at, self._empty = now, max(0.0, 1 - calls / self.slots) if is_closed else 0.0
        queued = max(0, calls - self.slots) // self._group_size
        self._queued = queued if self._queued is None else min(self._queued, queued)

    def completed(self, *, submitted_at: float, num_arrived: int) -> None:
        """A group, or an episode if these are buffered one by one, is complete. `num_arrived`: groups that the trainer can
        therefore take; none if a filter drops it or an earlier one is waited for."""
        now = time.perf_counter()
        self._latencies.append(now - submitted_at)
        self._arrivals += [now - (self._last or now)] * num_arrived

    def trainer_is_idle(self) -> None:
        """The trainer is done with what it has."""
        self._free_since = self._free_since or time.perf_counter()

    def batch_wanted(self) -> None:
        """The train loop waits for a batch, or a part of one."""
        self._wanted_since = self._wanted_since or time.perf_counter()

    def batch_sent(self) -> None:
        """The trainer gets something to do."""
        if self._free_since is not None and self._wanted_since is not None:
            self._waited += time.perf_counter() - max(self._free_since, self._wanted_since)
        self._free_since = self._wanted_since = None

    def trained(self, *, num_complete: int, is_busy: bool) -> bool:
        """A version is trained, and so many groups that are not are complete. `is_busy`: the trainer has the next batch, or a
        part of it. Returns whether the depth has changed."""
        now, last = time.perf_counter(), self._last
        self._last = now
        if not is_busy:
            self.trainer_is_idle()
        self._held += (now - self._noted_at) * self._empty
        self._noted_at = now
        observation = Observation(
            seconds=max(now - (last or now), 1e-9),
            waited=self._waited,
            held=self._held / max(now - (last or now), 1e-9),
            complete=self._complete,
            arrivals=tuple(self._arrivals),
            queued=self._queued or 0,
            latency=sum(self._latencies) / max(len(self._latencies), 1),
        )
        self._complete = num_complete
        self._begin_version()
        return last is not None and self.controller.observe(observation)
