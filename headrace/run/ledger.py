"""Every rollout is accounted for:

    submitted = trained + rejected + failed + filtered + unused + buffered + in flight

The ledger counts those submitted and settled. Those still open are counted where they are, in the buffer and the in-flight
table, so a rollout that vanished or was counted twice breaks the equation. Evaluation is counted apart.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SETTLED = ("trained", "rejected", "failed", "filtered", "unused")
_OPEN = ("buffered", "in_flight")
_MAX_KINDS = 20
"""Kinds of reasons counted separately; any further kind counts as `_OTHER`."""
_OTHER = "other reasons, in logs/launcher.log"
_MAX_REASON, _MAX_KIND = 400, 160
"""Characters."""


class AccountingError(AssertionError):
    """A rollout vanished or was counted twice: a bug in Headrace, never in user code."""


class Ledger:
    """Counts the training rollouts of one policy."""

    def __init__(self, count_open: Callable[[], tuple[int, int]]) -> None:
        """`count_open`: the rollouts buffered (including those in training) and in flight."""
        self._count_open = count_open
        self.submitted = 0
        self.evaluation = 0
        self._settled: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        """Why rollouts were not trained."""
        self._kinds: dict[str, str] = {}
        """Kind -> the first reason of that kind, shown for all of them."""

    def settle(self, state: str, count: int = 1, *, reason: str = "", id: str = "") -> None:
        """`count` rollouts ended as `state`; `id` is left out of the reason, so that the same reason counts as one."""
        assert state in SETTLED
        self._settled[state] += count
        if reason:
            line = reason.partition("\n")[0]
            line = re.sub(rf"'?{re.escape(id)}\b[^\s';:,]*'?", "…", line) if id else line
            self._count_reason(f"{state}: {line[:_MAX_REASON]}", count)

    def _count_reason(self, reason: str, count: int) -> None:
        kind = re.sub(r"\b\d[\d.,]*\b", "…", reason)[:_MAX_KIND]  # numbers differ from rollout to rollout
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            kind = reason = f"{reason.partition(': ')[0]}: {_OTHER}"
        self.reasons[self._kinds.setdefault(kind, reason)] += count

    def close(self) -> None:
        """The run is over: all open rollouts are unused."""
        self.settle("unused", sum(self._count_open()))
        self._count_open = lambda: (0, 0)

    def counts(self) -> dict[str, int]:
        """The terms of the equation, plus evaluation."""
        settled = {state: self._settled[state] for state in SETTLED}
        still_open = dict(zip(_OPEN, self._count_open(), strict=True))
        return {"submitted": self.submitted, **settled, **still_open, "evaluation": self.evaluation}

    def check(self) -> None:
        """Raise unless the equation closes."""
        counts = self.counts()
        if counts["submitted"] != sum(counts[name] for name in (*SETTLED, *_OPEN)):
            raise AccountingError(f"the books do not close: {self.equation()}")

    def equation(self) -> str:
        counts = self.counts()
        terms = " + ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in (*SETTLED, *_OPEN))
        return f"{counts['submitted']} submitted = {terms}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        settled, reasons = dict(self._settled), dict(self.reasons)
        return {"submitted": self.submitted, "evaluation": self.evaluation, "settled": settled, "reasons": reasons}

    def restore(self, state: dict[str, Any]) -> None:
        self.submitted, self.evaluation = int(state["submitted"]), int(state["evaluation"])
        self._settled, self.reasons, self._kinds = Counter(state["settled"]), Counter(), {}
        for reason, count in state["reasons"].items():
            self._count_reason(reason, count)
