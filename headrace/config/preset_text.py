"""Presets as text: `headrace presets`; docs/presets.md has the same table."""

from __future__ import annotations

import difflib
import textwrap
from typing import TYPE_CHECKING

from headrace.config.presets import PRESETS
from headrace.settings import ConfigError, to_toml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.config.presets import Preset

AXES: dict[str, dict[str, str]] = {
    "buffer": {
        "buffer.kind": "{}",
        "buffer.depth": "{} batches",
        "buffer.order": "by {}",
        "buffer.window": "{:g}",
        "filter.max_tied": "tied ≤ {:g}",
    },
    "weight sync": {"sync.payload": "{}", "sync.transport": "{}"},
    "staleness": {
        "staleness.max_lag": "lag {}",
        "staleness.max_lag_limit": "≤ {}",
        "staleness.gate": "gate {}",
        "staleness.slots": "{:g} batches",
        "staleness.reject": "reject {}",
        "staleness.rejected": "{}",
        "staleness.correct": "{}",
    },
    "in flight": {"partial.interrupt": "{}", "partial.oversample": "oversample {:g}", "partial.cancel": "cancel {}"},
    "LoRA": {"lora.rank": "rank {}"},
    "training": {
        "train.loss": "{}",
        "train.mini_batches": "{} mini-batches",
        "train.stream_parts": "streamed",
        "engine.lend": "lends when idle",
    },
}
"""The axes that are settings; by key, how its value is told in the list. Orchestration comes before them, in words."""
_USUAL = {"staleness.gate": "depth", "staleness.rejected": "refill", "train.stream_parts": 1}
"""Told only where they are something else."""


def axes(preset: Preset) -> list[str]:
    """Each axis in a few words; "–" where the preset leaves it to the recipe."""
    cells = [preset.orchestration]
    for told in AXES.values():
        chosen = {key: preset.settings[key][0] for key in told if key in preset.settings}
        chosen = {key: value for key, value in chosen.items() if value != _USUAL.get(key)}
        words = [told[key].format(" + ".join(it) if isinstance(it, list) else it) for key, it in chosen.items()]
        cells.append(", ".join(words) or "–")
    return cells


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
        f"Orchestration there: {preset.orchestration}; training: {preset.backend}. A preset does not set `orchestrate`: it "
        f"runs here wherever the recipe and the machine place it, with Headrace's own trainer. In one process (`inline`) "
        f"weights travel in memory, and to other hosts (Ray, `cluster.listen`) over HTTP, whatever the preset's sync.transport."
    )
    return "\n".join([*lines, "", *textwrap.wrap(preset.differs, 110), "", *textwrap.wrap(placed, 110)])


def _table(rows: Mapping[str, str], width: int) -> list[str]:
    return [f"  {left.ljust(width)}  {right}" for left, right in rows.items()]
