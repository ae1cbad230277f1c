"""The run's folder: where it is, whether it is unfinished, and the small files in it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.settings import ConfigError, to_dict, to_toml

if TYPE_CHECKING:
    from headrace.config import Recipe

SUMMARY = "summary.json"


def cache_folder() -> Path:
    """Where warmed-up models and rescued checkpoints are kept, outside any repository."""
    base = os.environ.get("HEADRACE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if os.environ.get("HEADRACE_CACHE"):
        return Path(str(base))
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def find_folder(name: str, recipe: Recipe, *, run_dir: Path | None, fresh: bool) -> Path:
    """The folder of this command's unfinished run, or a new one."""
    if run_dir is not None:
        _check_same(run_dir, recipe, fresh=fresh)
        return run_dir
    runs = Path("runs")
    if not fresh:
        for folder in sorted(runs.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True):
            summary = read_summary(folder)
            if summary.get("config_hash") == recipe.hash and summary.get("status") != "finished":
                return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder, number = runs / f"{name}-{stamp}", 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{stamp}-{number}"
    return folder


def _check_same(folder: Path, recipe: Recipe, *, fresh: bool) -> None:
    summary = read_summary(folder)
    if not summary:
        return
    if summary.get("config_hash") != recipe.hash:
        raise ConfigError(
            f"{folder} holds a run of other settings (compare {folder / 'resolved.toml'}); give another --run-dir, or the "
            f"same settings to resume it"
        )
    if fresh or summary.get("status") == "finished":
        raise ConfigError(f"{folder} holds a run already ({summary.get('status')}); give another --run-dir")


def prepare_folder(folder: Path, recipe: Recipe, *, recipe_text: str) -> None:
    """Make the folder and write what the run is made of."""
    for sub in ("rollouts", "logs", "checkpoints"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    resolved = to_toml(to_dict(recipe))
    (folder / "recipe.toml").write_text(recipe_text or resolved)
    (folder / "resolved.toml").write_text(resolved)


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json, or nothing where there is none that can be read."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return summary


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Replace summary.json in one step."""
    temporary = folder / f".{SUMMARY}.tmp"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(folder / SUMMARY)
