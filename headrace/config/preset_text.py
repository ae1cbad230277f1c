"""Presets as text: `headrace presets`, and the table of docs/presets.md."""

from __future__ import annotations

import difflib
import textwrap
from typing import TYPE_CHECKING, Any

from headrace.config.presets import PRESETS
from headrace.settings import ConfigError, to_toml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.config.presets import Preset

AXES: dict[str, dict[str, str | dict[Any, str]]] = {
    "buffer": {
        "buffer.kind": "{}",
        "buffer.depth": "{} batches",
        "buffer.order": {"submission": "in order"},
        "buffer.window": "window {:g}",
        "filter.max_tied": {0.0: "no ties"},
    },
    "weight sync": {"sync.payload": "{}", "sync.transport": "{}"},
    "staleness": {
        "staleness.max_lag": "lag {}",
        "staleness.max_lag_limit": "≤ {}",
        "staleness.gate": {"none": "no gate"},
        "staleness.slots": "{:g} batches of slots",
        "staleness.reject": {"never": "no drops", "first": "drop by first token", "oldest": "drop by oldest token"},
        "staleness.rejected": {"retry": "retry"},
        "staleness.correct": "{}",
    },
    "in flight": {"partial.interrupt": "{}", "partial.oversample": "oversample {:g}", "partial.cancel": "cancel {}"},
    "LoRA": {"lora.rank": "rank {}"},
    "training": {"train.loss": "{}", "train.mini_batches": "{} mini-batches", "reward.processes": "reward process"},
}
"""The axes that are settings; by key, how its value is told in the list. Orchestration comes before them, in words."""


def axes(preset: Preset) -> list[str]:
    """Each axis in a few words; "–" where the preset leaves it to the recipe."""
    cells = [preset.orchestration]
    for told in AXES.values():
        words = [_word(told[key], preset.settings[key][0]) for key in told if key in preset.settings]
        cells.append(", ".join(filter(None, words)) or "–")
    return cells


def _word(told: str | dict[Any, str], value: Any) -> str:  # noqa: ANN401  (a setting's)
    if isinstance(told, dict):
        return told.get(value, "")
    return told.format(" + ".join(value) if isinstance(value, list) else value)


def list_presets() -> str:
    """One line for each preset, in columns."""
    rows = [["preset", "orchestration", *AXES], *([name, *axes(preset)] for name, preset in PRESETS.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", "`headrace presets show NAME` prints the settings and what differs from the library."])


def show_preset(name: str) -> str:
    """Every setting of a preset with its reason, and what the library does otherwise."""
    preset = PRESETS.get(name)
    if preset is None:
        guess = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        raise ConfigError(f"preset {name!r}: {f'did you mean {guess[0]!r}?' if guess else 'there are: ' + ', '.join(PRESETS)}")
    written = {to_toml({"": value}).strip().replace('""', key, 1): why for key, (value, why) in preset.settings.items()}
    width = max(map(len, (*written, *preset.advice)))
    lines = [f'preset = "{name}"', "", *_table(written, width)]
    if preset.advice:
        lines += ["", "To set besides, where it applies:", *_table(preset.advice, width)]
    placed = (
        f"Orchestration: {preset.orchestration} there. A preset does not set `orchestrate`: here it runs wherever the recipe "
        f"and the machine place it, in one process (`inline`) with weights in memory whatever sync.transport. Trainer: "
        f"{preset.backend} there, Headrace's own here."
    )
    return "\n".join([*lines, "", *textwrap.wrap(preset.differs, 110), "", *textwrap.wrap(placed, 110)])


def _table(rows: Mapping[str, str], width: int) -> list[str]:
    return [f"  {left.ljust(width)}  {right}" for left, right in rows.items()]


def page_row(name: str) -> str:
    """The preset's row of the table in docs/presets.md."""
    return f"| `{name}` | {' | '.join(axes(PRESETS[name]))} |"
