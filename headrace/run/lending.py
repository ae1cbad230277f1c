"""`engine.lend`: while the trainer waits for a batch, an engine on its device generates, if measured rates say that it pays.

A spare engine lives on the trainer's device and sleeps. When the trainer runs out of work, `LendingRule` predicts how long it
will wait and what another engine would save of that; if it saves anything, the engine catches up with the weights and joins the
others. It is recalled before the trainer gets its next batch: its rollouts go on elsewhere. Trials with and without lending
tell whether more is sampled with it; if not, nothing is lent until the next trial.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.config import Recipe

_BLOCK = 4
"""Versions of which a trial measures the rate, after one in which the rates settle."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
"""Versions between two trials: each pause is twice the one before."""
_WORTH = 0.01
"""The least gain for which lending goes on."""
_SMOOTHING = 0.3
"""Weight of the newest measurement of what joining and recalling take."""


class Lender(Protocol):
    """The spare engine, as the loops see it."""

    async def lend(self) -> bool:
        """Bring it up to date and have it join the others; False if it cannot now. Called when the trainer has nothing to do
        for long enough."""

    async def recall(self) -> None:
        """Have it hand its rollouts to the others and free its memory; no effect if it is not lent. Called when a batch is
        ready, before the trainer gets it."""

    def num_sampled(self) -> tuple[int, int]:
        """(tokens sampled by it, by all engines)."""


class LendingRule:
    """Decides from rates alone. The loops tell it what they measure."""

    def __init__(self, *, groups_per_batch: int, slots: int) -> None:
        """`slots` of each engine."""
        self._batch, self._slots = groups_per_batch, slots
        self.is_on = False
        """Lending is tried, or pays."""
        self.gain: float | None = None
        """By how much more is sampled with lending than without, in the last trial."""
        self.joining = self.recalling = 0.0
        """Seconds that these take."""
        self._period = 0.0
        """Seconds of a version, smoothed."""
        self._hold, self._pause = _BLOCK + 1, _FIRST_PAUSE
        self._seen: list[tuple[float, int]] = []
        self._before: float | None = None
        """In a trial: the rate with the other choice."""

    def took(self, *, joining: float | None = None, recalling: float | None = None) -> None:
        """What an engine took to join or to be recalled."""
        if joining is not None:
            self.joining = _smoothed(self.joining, joining)
        if recalling is not None:
            self.recalling = _smoothed(self.recalling, recalling)

    def saves(self, *, missing: int, calls: int, num_engines: int) -> float:
        """Seconds by which the trainer would wait less for `missing` groups with another engine beside `num_engines`. `calls`
        run or wait for a slot: those past the slots are what the other engine would get."""
        wait = missing / self._batch * self._period
        helpers = min(1.0, max(0, calls - num_engines * self._slots) / self._slots)
        return (wait - self.joining) * helpers / (num_engines + helpers) - self.recalling

    def observe(self, *, seconds: float, tokens: int) -> bool:
        """A version took `seconds`, in which engines sampled so many tokens; returns whether a trial has ended."""
        self._period = _smoothed(self._period, seconds)
        self._seen.append((seconds, tokens))
        if len(self._seen) < (self._hold if self._before is None else _BLOCK + 1):
            return False
        block, self._seen = self._seen[-_BLOCK:], []
        rate = sum(tokens for _, tokens in block) / max(sum(seconds for seconds, _ in block), 1e-9)
        if self._before is None:
            self._before, self.is_on = rate, not self.is_on
            return False
        lent, alone = (rate, self._before) if self.is_on else (self._before, rate)
        self.gain = lent / max(alone, 1e-9) - 1
        self.is_on, self._before = self.gain >= _WORTH, None
        self._hold, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return True

    @property
    def why(self) -> str:
        """What the last trial has shown."""
        if self.gain is None:
            return "no trial has ended"
        told = f"{self.gain:+.1%} tokens a second with lending in the last trial"
        return told if self.gain >= _WORTH else f"{told}, so nothing is lent until the next"


class Lending:
    """Lends and recalls the spare engine of a run with one policy."""

    def __init__(self, recipe: Recipe, lender: Lender, *, on_change: Callable[[], None]) -> None:
        """`on_change`: there is an engine more, or one less."""
        self.rule = LendingRule(groups_per_batch=recipe.train.groups_per_batch, slots=recipe.engine.slots)
        self._lender, self._on_change = lender, on_change
        self._lock = asyncio.Lock()
        self.is_possible = False
        """The trainer is idle, and nothing is lent or about to be."""
        self._is_wanted_back = True
        self._since: float | None = None
        """When it was lent."""
        self._seconds, self._times = 0.0, 0
        self._at_start = lender.num_sampled()
        self._at_version: tuple[float, float, tuple[int, int]] | None = None
        """When the last version was trained, and what was counted by then."""

    def trainer_is_idle(self) -> None:
        """The trainer has run out of work."""
        self.is_possible, self._is_wanted_back = self.rule.is_on, False
        self._at_version = self._at_version or self._now()  # the first version begins here, not before the first evaluation

    def _now(self) -> tuple[float, float, tuple[int, int]]:
        """(seconds on a clock, seconds lent so far, tokens sampled so far)."""
        now = time.perf_counter()
        return now, self._seconds + (0.0 if self._since is None else now - self._since), self._lender.num_sampled()

    def is_worth(self, *, missing: int, calls: int, num_engines: int) -> bool:
        """Whether to `lend` now."""
        return self.rule.saves(missing=missing, calls=calls, num_engines=num_engines) > 0

    async def lend(self) -> None:
        async with self._lock:
            began = time.perf_counter()
            if self._is_wanted_back or not await self._lender.lend():
                return
            self._since = time.perf_counter()
            self.rule.took(joining=self._since - began)
            self._times += 1
        self._on_change()

    async def recall(self) -> None:
        """Waits until the engine has handed its rollouts back, so that the trainer has its device to itself."""
        self.is_possible, self._is_wanted_back = False, True
        async with self._lock:
            began = time.perf_counter()
            await self._lender.recall()
            if self._since is None:
                return
            self._seconds += began - self._since
            self._since = None
            self.rule.took(recalling=time.perf_counter() - began)
        self._on_change()

    def trained(self) -> dict[str, float]:
        """A version is trained; returns its metrics: the share of its time in which the device was lent, and of the sampled
        tokens that the lent engine sampled."""
        now = self._now()
        before, self._at_version = self._at_version or now, now
        seconds, lent = now[0] - before[0], now[1] - before[1]
        own, every = (new - old for new, old in zip(now[2], before[2], strict=True))
        self.rule.observe(seconds=seconds, tokens=every)
        return {"lend/time": lent / max(seconds, 1e-9), "lend/tokens": own / max(every, 1)}

    def summary(self) -> dict[str, Any]:
        """Since the session started."""
        own, every = (now - before for now, before in zip(self._lender.num_sampled(), self._at_start, strict=True))
        return {
            "times": self._times,
            "seconds": self._now()[1],
            "tokens": own,
            "share": own / max(every, 1),
            "gain": self.rule.gain,
            "why": self.rule.why,
        }


def _smoothed(before: float, new: float) -> float:
    return new if not before else before + _SMOOTHING * (new - before)
