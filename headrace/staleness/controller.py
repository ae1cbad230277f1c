"""`max_lag = "auto"`: the least depth of the gate that keeps the trainer busy, found while the run goes on.

The controller is told how each version went and moves the depth, in groups, between 0 and its limit. A change is a trial: it is
kept if the next versions show that it paid, and otherwise undone and not tried again before the rates change.

- The trainer waited, and engines stood idle behind the gate: raise. By what was missing when it needed a batch; if it waited
  long, to what Little's law asks for: with B groups a version that each take L seconds, and T seconds of training a version,
  B·L/T groups are in flight on average, and half a batch more just after a batch was taken.
- The trainer waited less than it may: lower, by as many as it can spare. With k groups fewer ahead, k fewer are complete when
  it needs a batch. From how many were left over each time, and when the next ones came, follows how long it would have waited.
- The trainer waited, but engines have more to do than slots: lower as long as their slots stay full.
- The trainer waited, and raising gains nothing (a slow reward, engines that are as fast with fewer): lower as long as versions
  take no longer.
- Engines and trainer share a device: take turns (depth 0) if running side by side gains less than 3 %.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_IDLE = 0.03
"""Share of its time that the trainer may wait for batches."""
_AIM = 0.02
"""What lowering aims at: below what is tolerated, because no two versions are alike."""
_FAR, _MORE_IDLE = 2, 0.025
"""Beyond so many versions ahead lag is dearer: from an eighth more on, the trainer may wait so much more of its time."""
_FEWEST, _MANY, _WINDOW = 4, 8, 16
"""Versions that a decision looks at: at least; at least if it lets the trainer wait more; of an unchanged depth at most."""
_MAX_SETTLING = 4
"""Versions after a change that a decision does not look at, at most: until what was submitted before it is trained."""
_GROSS = 0.1
"""Share of its time beyond which the trainer waits for more than a few late groups."""
_WORTH = 0.03
"""Share by which versions must take less time for a raise to be kept, and may take more time after lowering."""
_HOPELESS = 1.5
"""How many times as long two versions after lowering may take before it is undone at once."""
_FIRST_PAUSE = 16
"""Versions before a raise that gained nothing is tried again; twice as many after each time."""
_FORGOTTEN_AFTER = 128
"""Versions of an unchanged depth after which a lower one is tried again; twice as many after each time."""
_OTHER_RATES = 0.25
"""Share by which the time of a version, or half that of a group, must change for what was learned to be forgotten."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """How one version went. `seconds` since the one before it; of these the trainer `waited` for its batch."""

    seconds: float
    waited: float
    held: float
    """The share of the engines' slots that were empty while the gate was closed, averaged over time."""
    complete: int
    """Untrained groups that were complete when the trainer could begin, those among them that it had already."""
    arrivals: tuple[float, ...]
    """When groups became complete after that, in seconds."""
    queued: int
    """Groups' worth of generate calls that waited for a slot, at the fewest."""
    latency: float
    """Seconds from a group's submission until it was complete, on average."""

    def wait_with(self, fewer: int, *, parts: Sequence[int]) -> float:
        """Seconds that the trainer would have waited with so many groups fewer ahead. It needs each of the batch's `parts`, of
        so many groups, once those before are trained."""
        trained = (self.seconds - self.waited) / len(parts)
        now = waited = 0.0
        for wanted in itertools.accumulate(parts):
            missing = wanted - self.complete + fewer
            known = 0.0 if missing <= 0 else self.arrivals[missing - 1] if missing <= len(self.arrivals) else self.seconds
            waited += max(0.0, known - now)
            now = max(now, known) + trained
        return waited


@dataclass(frozen=True)
class _Window:
    """Several observations in one."""

    idle: float
    held: float
    queued: int
    period: float
    seen: tuple[Observation, ...]
    busy: float
    latency: float
    parts: Sequence[int]

    @classmethod
    def of(cls, seen: Collection[Observation], parts: Sequence[int]) -> _Window:
        seconds, longest = sum(each.seconds for each in seen), 2 * statistics.median(each.seconds for each in seen)
        return cls(
            idle=sum(each.waited for each in seen) / seconds,
            held=sum(each.held * each.seconds for each in seen) / seconds,
            queued=min(each.queued for each in seen),
            period=statistics.fmean(min(each.seconds, longest) for each in seen),  # one may have been held up by a slow disk
            busy=statistics.fmean(min(each.seconds - each.waited, longest) for each in seen),
            latency=statistics.fmean(each.latency for each in seen),
            seen=tuple(seen),
            parts=parts,
        )

    def idle_with(self, fewer: int) -> float:
        """The share of its time that the trainer would have waited with so many groups fewer ahead."""
        waited = sum(each.wait_with(fewer, parts=self.parts) for each in self.seen)
        return waited / sum(each.seconds for each in self.seen)


@dataclass(frozen=True)
class _Trial:
    """A change of depth that must show whether it pays."""

    depth: int
    """Before it."""
    may_idle: float
    """The share of its time that the trainer may wait after it."""
    seen: _Window
    """Before it; of several steps down in a row, before the first."""
    is_raise: bool
    compares_periods: bool
    """Not the time that the trainer waits."""
    keeps_full: bool
    """The engines bound the run: what counts is that their slots stay full."""

    def pays(self, now: _Window) -> bool:
        if self.is_raise:
            is_cured = not self.compares_periods and now.idle <= self.may_idle < self.seen.idle
            return is_cured or self.seen.period / now.period - 1 >= _WORTH
        if self.keeps_full:
            return now.held <= _AIM
        if self.seen.idle <= self.may_idle and not self.compares_periods:
            return now.idle <= self.may_idle
        return now.period / self.seen.period - 1 <= _WORTH


class LagController:
    """Chooses the depth of the gate. It knows only what `observe` is told, so tests can simulate it."""

    def __init__(self, *, groups_per_batch: int, limit: int, start: float, parts: int = 1, shares_device: bool = False) -> None:
        """`limit` and `start` in versions. `parts`: in which the trainer gets a batch."""
        self._batch, self._limit = groups_per_batch, limit * groups_per_batch
        self._parts = [len(range(part, groups_per_batch, parts)) for part in range(parts)]
        self._step = max(1, groups_per_batch // 4)
        self._groups = min(self._limit, round(start * groups_per_batch))
        self._shares_device, self._has_tried_turns = shares_device, not shares_device
        self._seen: deque[Observation] = deque(maxlen=_WINDOW)
        self._unseen = self._settling()
        self._trial: _Trial | None = None
        self._slow = 0
        self._unchanged = self._said = -1
        self.why = "no version has been measured yet"
        """Why the depth is what it is."""
        self._forget()

    def _forget(self) -> None:
        """The rates are others: what did not pay may pay now."""
        self._too_low = -1
        """A depth that is known not to suffice."""
        self._enough = self._limit + 1
        """The least that is known to suffice; above the limit if none is."""
        self._pause, self._wait, self._rest = _FIRST_PAUSE, 0, 0
        """After a change that gained nothing: versions to wait before the next, and those left before the next up or down."""
        self._forgotten_after = _FORGOTTEN_AFTER
        self._has_tried_turns = not self._shares_device or (self._has_tried_turns and self._groups > 0)
        self._is_sure = True
        """That the trainer waits, which a settled depth must show twice."""
        self._settled: _Window | None = None
        self._descent: _Window | None = None

    @property
    def depth(self) -> float:
        """In versions."""
        return self._groups / self._batch

    def observe(self, observation: Observation) -> bool:
        """A version is trained; returns whether the depth has changed."""
        before = self._groups
        self._wait, self._rest = max(0, self._wait - 1), max(0, self._rest - 1)
        if self._is_hopeless(observation):
            assert self._trial is not None
            self._undo(self._trial, _Window.of([observation], self._parts))
            self._trial = None
            return True
        if self._unseen:
            self._unseen -= 1
            return False
        self._seen.append(observation)
        if len(self._seen) < _FEWEST:
            return False
        now, trial = _Window.of(self._seen, self._parts), self._trial
        self._trial = None
        if trial is not None and not self._shares_device and _change(trial.seen.busy, now.busy) > _OTHER_RATES:
            self._forget()  # not of the trial: how long training takes does not depend on the depth
            self._seen.clear()
        elif trial is not None and not trial.pays(now):
            self._undo(trial, now)
        elif self._settled is not None and _differ(self._settled, now):
            self._forget()
            self._seen.clear()  # it may be of both rates
        else:
            self._too_low = max(self._too_low, trial.depth) if trial is not None and trial.is_raise else self._too_low
            self._decide(now)
        self._unchanged = self._unchanged + 1 if before == self._groups else 0
        return before != self._groups

    def _is_hopeless(self, observation: Observation) -> bool:
        """Two versions of a trial in a row took so long that there is no need to measure more."""
        trial, is_slow = self._trial, False
        if trial is not None and not trial.is_raise:
            seconds = min(observation.seconds, trial.seen.busy + observation.waited)  # had training taken as long as before
            is_slow = seconds > _HOPELESS * trial.seen.period
        self._slow = self._slow + 1 if is_slow else 0
        return self._slow == 2

    def news(self) -> str:
        """What to tell the user now: a depth that has held for a while and is not what was said last, by half a batch."""
        is_new = self._said < 0 or abs(self._groups - self._said) * 2 >= self._batch
        if self._trial is not None or self._unchanged < _FEWEST or not is_new:
            return ""
        self._said = self._groups
        return str(self)

    def __str__(self) -> str:
        return f"depth {self.depth:.2f} versions ({self._groups} groups ahead): {self.why}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"groups": self._groups, "too_low": self._too_low, "why": self.why}

    def restore(self, state: dict[str, Any]) -> None:
        """The limit may be lower than it was."""
        self._groups, self._too_low, self.why = min(state["groups"], self._limit), state["too_low"], state["why"]
        self._unseen = self._settling()

    # Decisions

    def _may_idle(self, groups: int, least: float = MAX_IDLE) -> float:
        """The share of its time that the trainer may wait with so many groups ahead."""
        return least + _MORE_IDLE * min(1.0, max(0.0, 8 * (groups / self._batch - _FAR)))

    def _to_spare(self, now: _Window) -> int:
        """The most groups fewer with which the trainer would wait as little as is aimed at; of few versions, no longer."""
        share = 1.0 if len(now.seen) >= _MANY else 0.0
        fewer = range(1, self._groups)
        return max((by for by in fewer if now.idle_with(by) <= share * self._may_idle(self._groups - by, _AIM)), default=0)

    def _decide(self, now: _Window) -> None:
        if self._unchanged == self._forgotten_after:
            self._too_low, self._unchanged, self._forgotten_after = -1, 0, 2 * self._forgotten_after
        if not self._has_tried_turns:
            self._has_tried_turns = True
            self._move(0 if self._groups else self._batch, now, compares_periods=True)
            self.why = "trying whether side by side gains anything on a shared device"
        elif self._shares_device and not self._groups:
            self.why = f"side by side gains less than {_WORTH:.0%} on a shared device, so engines and trainer take turns"
        elif now.idle <= self._may_idle(self._groups):
            self.why = f"the trainer waits {now.idle:.1%} of the time, and less ahead might keep it waiting"
            self._is_sure = False
            self._enough = min(self._enough, self._groups)
            self._lower(now, by=self._to_spare(now))
        elif not self._is_sure:
            self._is_sure = True
            self._seen.clear()
        elif now.held <= MAX_IDLE:
            self.why = f"the engines bound the run: their slots are full, and the trainer waits {now.idle:.0%} of the time"
            if self._groups - self._too_low > self._step and not self._rest:
                self._lower(now, by=max(now.queued, self._step), keeps_full=True)
        elif self._groups < self._limit and not self._wait:
            self.why = f"the trainer waited {now.idle:.0%} of the time, and engines were idle behind the gate"
            is_known = self._groups < self._enough <= self._limit
            self._move((self._groups + self._enough + 1) // 2 if is_known else self._raised(now), now)
        else:
            at_limit = "staleness.max_lag_limit is reached" if self._groups == self._limit else "more ahead gains nothing"
            self.why = f"the trainer waits {now.idle:.0%} of the time; {at_limit}, and less ahead would make versions slower"
            self._descend(now)
        if self._trial is None and self._settled is None:
            self._settled = now

    def _raised(self, now: _Window) -> int:
        """A depth, in groups, with which the trainer should wait as little as is aimed at. If it waits long, it follows from
        Little's law, in whole batches, in which rollouts of one length come; else from what was missing each time."""
        least = self._groups + self._step
        if now.idle > _GROSS:
            little = round(self._batch * (now.latency / max(now.busy, 1e-9) + 0.5))
            return -(-max(least, min(little, 2 * self._groups + self._batch)) // self._batch) * self._batch
        aim = self._may_idle(self._groups + 1, _AIM)
        more = next(more for more in itertools.count(1) if now.idle_with(-more) <= aim)
        saved = now.idle - now.idle_with(-more)  # versions end sooner then, and groups take as long as before
        return max(least, self._groups + math.ceil(more + saved * (self._groups + self._batch / 2)))

    def _descend(self, now: _Window) -> None:
        """The trainer waits and raising does not help: something else bounds the run, which may be as fast with less lag."""
        self._descent = self._descent or now
        if self._groups - self._too_low > self._step and not self._rest:
            far = self._groups // 2 if now.idle > _GROSS else 0
            self._lower(self._descent, by=max(self._step, far))

    def _lower(self, seen: _Window, *, by: int, keeps_full: bool = False) -> None:
        """By so many groups, but at most half-way to what is known not to suffice."""
        target = max(self._groups - by, (self._groups + self._too_low + 1) // 2)
        if self._groups - target >= max(1, self._batch // 16):
            self._move(target, seen, keeps_full=keeps_full)

    def _move(self, groups: int, seen: _Window, *, compares_periods: bool = False, keeps_full: bool = False) -> None:
        groups = min(max(groups, 0), self._limit)
        if groups != self._groups:
            is_raise = groups > self._groups
            self._trial = _Trial(self._groups, self._may_idle(groups), seen, is_raise, compares_periods, keeps_full)
            self._set(groups)

    def _undo(self, trial: _Trial, now: _Window) -> None:
        if trial.is_raise:
            self._wait, self._pause = self._pause, 2 * self._pause
            gain = max(0.0, trial.seen.period / now.period - 1)
            self.why = f"{self._groups / self._batch:.2f} versions ahead would gain {gain:.0%}"
        else:
            self._too_low = self._groups
            self._rest = self._pause
            self.why = f"with {self._groups / self._batch:.2f} the trainer waited {now.idle:.0%} of the time"
        self._set(trial.depth)

    def _set(self, groups: int) -> None:
        before, self._groups = self._groups, groups
        self._settled = None
        self._seen.clear()
        self._unseen = self._settling(before)

    def _settling(self, before: int = 0) -> int:
        return min(_MAX_SETTLING, 1 + math.ceil(max(before, self._groups) / self._batch))


def _differ(before: _Window, now: _Window) -> bool:
    """Whether engines or trainer have become faster or slower."""
    shares = [_change(before.period, now.period), _change(before.busy, now.busy), _change(before.latency, now.latency) / 2]
    return max(shares) > _OTHER_RATES


def _change(before: float, now: float) -> float:
    return max(before, now) / max(min(before, now), 1e-9) - 1
