"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.observe.spans import WAITING, bound_by

if TYPE_CHECKING:
    from collections.abc import Mapping

Budget = dict[str, dict[str, float]]
_ROWS = 8


class Screen(Protocol):
    """Shown to the user."""

    def say(self, text: str) -> None: ...

    def row(self, row: Mapping[str, Any], budget: Budget) -> None: ...

    def close(self) -> None: ...


def open_screen(*, steps: int, quiet: bool = False) -> Screen:
    """The screen that fits where the output goes."""
    if quiet:
        return Silent()
    console = Console()
    return LiveTable(console, steps=steps) if console.is_terminal else PlainLines(steps=steps)


class Silent:
    """Nothing at all."""

    def say(self, text: str) -> None:
        pass

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        pass

    def close(self) -> None:
        pass


class PlainLines:
    """One line per version."""

    def __init__(self, *, steps: int) -> None:
        self._steps = steps

    def say(self, text: str) -> None:
        print(text, flush=True)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row)
        role, _ = bound_by(budget)
        text = "  ".join(f"{name} {value}" for name, value in cells.items() if value)
        print(f"{text}  of {self._steps} | {budget_line(budget)} | bound by {role}", flush=True)

    def close(self) -> None:
        pass


class LiveTable:
    """The last versions, and the time budget below them."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console, self._steps = console, steps
        self._rows: deque[dict[str, str]] = deque(maxlen=_ROWS)
        self._live: Live | None = None
        self._held_out = ""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row)
        self._held_out = cells["held-out"] = cells["held-out"] or self._held_out
        self._rows.append(cells)
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        table = Table(title=f"{self._steps} steps", title_justify="left")
        names = [name for name in cells if any(each[name] for each in self._rows)]
        for name in names:
            table.add_column(name, justify="right")
        for each in self._rows:
            table.add_row(*(each[name] for name in names))
        self._live.update(Group(table, Text("\n".join(budget_table(budget, brief=True)))))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    success = row.get("success")
    dropped = {state: row.get(f"rollouts/{state}", 0) for state in ("failed", "filtered")}
    return {
        "step": str(row["version"]),
        "reward": f"{row['reward']:.3f}",
        "held-out": "" if success is None else f"{success:.1%}",
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "lag": f"{row['lag_mean']:.2f} (max {row['lag_max']})",
        "dropped so far": ", ".join(f"{count} {state}" for state, count in dropped.items() if count),
    }


def share(found: Mapping[str, float], name: str) -> str:
    """A share that an evaluation found, or that it could judge nothing."""
    return f"{found[name]:.1%}" if name in found else "not judged"


def budget_line(budget: Budget) -> str:
    """The share of time each role was at work."""
    working = {role: 1 - sum(shares.get(state, 0.0) for state in WAITING) for role, shares in budget.items()}
    return " ".join(f"{role} {share:.0%}" for role, share in working.items())


def budget_table(budget: Budget, *, brief: bool = False) -> list[str]:
    """Every state of every role, and the verdict; briefly, without the states that took less than half a percent."""
    lines = []
    for role, shares in budget.items():
        if brief:
            parts = "  ".join(f"{state} {share:.0%}" for state, share in shares.items() if share >= 0.005)
            lines.append(f"{role:8} {parts}")
            continue
        parts = "  ".join(f"{state} {share:5.1%}" for state, share in shares.items())
        lines.append(f"{role:8} {parts}  = {sum(shares.values()):.0%}")
    role, share = bound_by(budget)
    lines.append(f"bound by {role}: at work {share:.0%} of the time, more than any other role")
    return lines
