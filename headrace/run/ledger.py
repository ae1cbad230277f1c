"""Every rollout is accounted for:

    submitted = trained + rejected + failed + filtered + unused + buffered + in flight

The ledger tracks every open rollout by its episode's id and raises on an impossible move, so no rollout vanishes or is
counted twice. Evaluation is counted apart.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTLED = ("trained", "rejected", "failed", "filtered", "unused")
_TERMS = (*SETTLED, "buffered", "in_flight")
_MAX_KINDS = 20
"""Kinds of reasons counted separately; any further kind counts as `_OTHER`."""
_OTHER = "other reasons, in logs/launcher.log"
_MAX_REASON, _MAX_KIND = 400, 160
"""Characters."""


class AccountingError(AssertionError):
    """A rollout vanished or was counted twice: a bug in Headrace, never in user code."""


class Ledger:
    """One entry per training rollout."""

    def __init__(self) -> None:
        self.submitted = 0
        self.evaluation = 0
        self._in_flight: set[str] = set()
        self._buffered: set[str] = set()
        self._settled: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        """Kind -> the first reason of that kind, shown for all of them."""

    def submit(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id in self._in_flight or id in self._buffered:
                raise AccountingError(f"rollout {id} was submitted twice")
            self._in_flight.add(id)
            self.submitted += 1

    def buffer(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id not in self._in_flight:
                place = "buffered" if id in self._buffered else "settled"
                raise AccountingError(f"rollout {id} entered the buffer but was {place}")
            self._in_flight.remove(id)
            self._buffered.add(id)

    def settle(self, ids: Iterable[str], state: str, reason: str = "") -> None:
        assert state in SETTLED
        for id in ids:
            if id in self._buffered:
                self._buffered.remove(id)
            elif id not in self._in_flight:
                raise AccountingError(f"rollout {id} became {state} but was already settled")
            elif state == "trained":
                raise AccountingError(f"rollout {id} was trained without leaving the buffer")
            else:
                self._in_flight.remove(id)
            self._settled[state] += 1
            if reason:
                self._count(f"{state}: {_without(id, reason)}", 1)

    def _count(self, reason: str, times: int) -> None:
        kind = re.sub(r"\b\d[\d.,]*\b", "…", reason)[:_MAX_KIND]  # numbers differ from rollout to rollout
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            kind = reason = f"{reason.partition(': ')[0]}: {_OTHER}"
        self._reasons[self._kinds.setdefault(kind, reason)] += times

    def close(self) -> None:
        """The run is over: settle all open entries as unused."""
        self.settle([*self._in_flight, *self._buffered], "unused")

    def counts(self) -> dict[str, int]:
        """The terms of the equation, plus evaluation."""
        settled = {state: self._settled[state] for state in SETTLED}
        open_entries = {"buffered": len(self._buffered), "in_flight": len(self._in_flight)}
        return {"submitted": self.submitted, **settled, **open_entries, "evaluation": self.evaluation}

    @property
    def reasons(self) -> dict[str, int]:
        """Why rollouts were not trained."""
        return dict(self._reasons)

    def check(self, *, buffered: int) -> None:
        """Raise unless the equation closes and the buffer holds as many rollouts as the ledger says."""
        counts = self.counts()
        if counts["submitted"] != sum(counts[name] for name in _TERMS) or counts["buffered"] != buffered:
            raise AccountingError(f"the books do not close: {self.equation()}; the buffer holds {buffered}")

    def equation(self) -> str:
        counts = self.counts()
        terms = " + ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in _TERMS)
        return f"{counts['submitted']} submitted = {terms}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `restore` takes the open entries from the buffer and the groups in flight."""
        settled, reasons = dict(self._settled), dict(self._reasons)
        return {"submitted": self.submitted, "evaluation": self.evaluation, "settled": settled, "reasons": reasons}

    def restore(self, state: dict[str, Any], *, buffered: Iterable[str], in_flight: Iterable[str]) -> None:
        self.submitted, self.evaluation = int(state["submitted"]), int(state["evaluation"])
        self._settled, self._reasons, self._kinds = Counter(state["settled"]), Counter(), {}
        for reason, times in state["reasons"].items():
            self._count(reason, times)
        self._in_flight = set(in_flight)
        self._buffered = set(buffered) - self._in_flight


def _without(id: str, reason: str) -> str:
    """The first line of a reason, without the rollout's id."""
    return re.sub(rf"'?{re.escape(id)}\b[^\s';:,]*'?", "…", reason.partition("\n")[0])[:_MAX_REASON]
