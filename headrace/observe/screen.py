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
_TRAINED = {"loss": "loss", "entropy": "entropy", "kl": "reference_kl"}
"""What is shown of the trainer's metrics, by its name on the screen; the KL where there is a reference."""


class Screen:
    """Shows nothing; subclasses do."""

    steps: int = 0
    """Of the run, which a callback may change."""

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
        self.steps = steps

    def say(self, text: str) -> None:
        print(text, flush=True)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row, steps=self.steps)
        role, _ = bound_by(budget)
        text = "  ".join(f"{name} {value}" for name, value in cells.items() if value)
        working = " ".join(f"{name} {share:.0%}" for name, share in at_work(budget).items())
        print(f"{text} | {working} | bound by {role}", flush=True)


class LiveTable(Screen):
    """A table of the last versions, with the time budget below it."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console, self.steps = console, steps
        self._rows: deque[dict[str, str]] = deque(maxlen=_ROWS)
        self._live = Live(console=console, refresh_per_second=4)

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def row(self, row: Mapping[str, Any], budget: Budget) -> None:
        cells = _cells(row, steps=self.steps)
        self._rows.append(cells)
        self._live.start()  # does nothing from the second row on
        table = Table()
        names = [name for name in cells if any(each[name] for each in self._rows)]
        for name in names:
            table.add_column(name, justify="right")
        for each in self._rows:
            table.add_row(*(each[name] for name in names))
        self._live.update(Group(table, Text("\n".join(budget_table(budget, brief=True)))))

    def close(self) -> None:
        self._live.stop()


def _cells(row: Mapping[str, Any], *, steps: int) -> dict[str, str]:
    trained = {name: row.get(f"train/{key}") for name, key in _TRAINED.items()}
    dropped = {state: row.get(f"rollouts/{state}", 0) for state in ("failed", "filtered")}
    return {
        "step": f"{row['version']}/{steps}",
        "reward": f"{row['reward']:.3f}",
        **{name: "" if value is None else f"{value:.3g}" for name, value in trained.items()},
        "tokens/s": f"{row['tokens_per_second']:,.0f}",
        "lag": f"{row['lag_mean']:.2f} (max {row['lag_max']})",
        "dropped so far": ", ".join(f"{count} {state}" for state, count in dropped.items() if count),
    }


def held_out_line(found: Mapping[str, float], *, temperature: float) -> str:
    """What an evaluation found, in brief; "not judged" if it scored nothing."""
    if "success" not in found:
        return "not judged"
    interval = f"{found['success_low']:.1%} to {found['success_high']:.1%}"
    parts = [f"{found['success']:.1%} ({interval}) solved at temperature {temperature:g}"]
    parts += [f"greedy {found['greedy']:.1%}"] if "greedy" in found else []
    largest = max((int(name[5:]) for name in found if name.startswith("pass@") and "/" not in name), default=0)
    parts += [f"{name} {found[name]:.1%}" for name in (f"pass@{largest}", f"maj@{largest}") if name in found]
    return ", ".join(parts)


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
