"""What the user sees during a run: a live table on a terminal, elsewhere one line per version."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.observe.timeline import at_work, bound_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.observe.timeline import Budget

_ROWS = 8


class Screen:
    """Shows nothing; subclasses do."""

    def say(self, text: str) -> None:
        """Show a message."""

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        """Show a trained version: its metrics, and where the time went."""

    def close(self) -> None:
        """Nothing more will be shown."""


def open_screen(*, steps: int, quiet: bool = False) -> Screen:
    """A live table if stdout is a terminal, else plain lines; nothing if `quiet`."""
    if quiet:
        return Screen()
    console = Console()
    return LiveTable(console, steps=steps) if console.is_terminal else PlainLines(steps=steps)


class PlainLines(Screen):
    def __init__(self, *, steps: int) -> None:
        self._steps = steps

    def say(self, text: str) -> None:
        print(text, flush=True)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row)
        role, _ = bound_by(budget)
        text = "  ".join(f"{name} {value}" for name, value in cells.items() if value)
        working = " ".join(f"{name} {share:.0%}" for name, share in at_work(budget).items())
        print(f"{text}  of {self._steps} | {working} | bound by {role}", flush=True)


class LiveTable(Screen):
    """A table of the last versions, with the time budget below it."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console, self._steps = console, steps
        self._rows: deque[dict[str, str]] = deque(maxlen=_ROWS)
        self._live = Live(console=console, refresh_per_second=4)
        self._held_out = ""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row)
        self._held_out = cells["held-out"] = cells["held-out"] or self._held_out
        self._rows.append(cells)
        self._live.start()  # does nothing from the second row on
        table = Table(title=f"{self._steps} steps", title_justify="left")
        names = [name for name in cells if any(each[name] for each in self._rows)]
        for name in names:
            table.add_column(name, justify="right")
        for each in self._rows:
            table.add_row(*(each[name] for name in names))
        self._live.update(Group(table, Text("\n".join(budget_table(budget, brief=True)))))

    def close(self) -> None:
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
    """A share that an evaluation measured, or "not judged" if it scored nothing."""
    return f"{found[name]:.1%}" if name in found else "not judged"


def budget_table(budget: Budget, *, brief: bool = False) -> list[str]:
    """Every state of every role, and which role bounds the run. `brief` leaves out states below half a percent."""
    lines = []
    for role, shares in budget.items():
        shown = {state: share for state, share in shares.items() if share >= 0.005 or not brief}
        parts = "  ".join(f"{state} {share:.0%}" if brief else f"{state} {share:5.1%}" for state, share in shown.items())
        lines.append(f"{role:8} {parts}" + ("" if brief else f"  = {sum(shares.values()):.0%}"))
    role, share = bound_by(budget)
    lines.append(f"bound by {role}: at work {share:.0%} of the time, more than any other role")
    return lines
