"""The run's folder: finding it, locking it, and the small files in it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import time
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.config import parse_recipe
from headrace.launch.inputs import ROWS
from headrace.launch.model_cache import cache_folder
from headrace.leftovers import FOLDER_LOCK
from headrace.run import checkpoints_in
from headrace.settings import ConfigError, flatten, identity, to_dict, to_toml
from headrace.trainer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Recipe

SUMMARY = "summary.json"
INPUTS = "inputs.json"
_MAX_LOG = 100_000_000
"""Bytes of a launcher.log: a line for each episode that fails can be many in a week."""


class FolderLock:
    """Of the process that writes a folder. The OS releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER_LOCK
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """False if another process holds it, or moves the folder just now."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._file = file
                return True
        file.close()
        return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_in_use(folder: Path) -> bool:
    """Whether a live process writes to this folder."""
    lock = FolderLock(folder)
    is_free = not (folder / FOLDER_LOCK).exists() or lock.acquire()
    lock.release()
    return not is_free


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise if another process does."""
    lock = FolderLock(folder)
    if not lock.acquire():
        raise ConfigError(f"{folder} is in use by another process; give another --run-dir")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Also write this process's warnings and log records to logs/launcher.log; a full one becomes launcher.log.1."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(folder / "logs" / "launcher.log", maxBytes=_MAX_LOG, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException:
        logging.getLogger("headrace").exception("the run stopped (process %d)", os.getpid())
        raise
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.close()


@dataclass
class Comparison:
    """What a command changes about the run in a folder. Each change reads like `engine.slots was 8, is 4`."""

    folder: Path
    summary: dict[str, Any]
    other: list[str] = field(default_factory=list)
    """Changes that make it another run."""
    changed: list[str] = field(default_factory=list)
    """Changes that a resumed run may have."""
    edited: dict[str, str] = field(default_factory=dict)
    """Inputs whose content has changed, by setting or argument, with their names."""
    steps: int = 0
    """`steps` before."""

    @property
    def is_finished(self) -> bool:
        return self.summary.get("status") == "finished"

    def is_meant(self, recipe: Recipe) -> bool:
        """Whether a command that names no folder means this run. Rows that a Python caller passes have no name, so other ones
        may be another experiment's. A finished run is only resumed to train it further, with the caller's code as it was."""
        if self.other or ROWS in self.edited.values():
            return False
        is_own_code = any(key.startswith(("reward[", "environment")) for key in self.edited)
        steps = recipe.steps
        for change in self.summary.get("changes", ()):  # by a callback, which resuming would make again
            steps = change["value"] if change["key"] == "steps" and change["was"] == steps else steps
        return not self.is_finished or (steps > self.summary["version"] and not is_own_code)

    def check(self, recipe: Recipe, *, version: int, resume_anyway: bool) -> list[str]:
        """What to tell the user before the run is resumed from `version`. Raises if it must not be."""
        if self.other:
            checkpoint = self.folder / "checkpoints" / f"step-{version}"
            raise ConfigError(
                f"{self.folder} holds another run ({', '.join(self.other[:4])}); resume it with the settings it had, or give "
                f"another --run-dir" + (f" (--model.path={checkpoint} starts from its weights)" if version else "")
            )
        if recipe.steps < version or (recipe.steps == version and self.is_finished):
            raise ConfigError(
                f"steps = {recipe.steps}: {self.folder} holds a run that has trained {version} versions already, and is left "
                f"as it is; --steps above {version} trains it further, --fresh or another --run-dir starts a new one"
            )
        code = {key: name for key, name in self.edited.items() if key.startswith(("reward", "environment"))}
        data = [f"{key} = {name!r}" for key, name in self.edited.items() if key not in code]
        if data and not resume_anyway:
            raise ConfigError(
                f"{', '.join(data)}: its content has changed since version {version} of the run in {self.folder}; "
                f"--resume-anyway goes on with the new one, --fresh or another --run-dir starts a new run"
            )
        since = f"has changed since version {version}"
        notes = [", ".join(self.changed)] if self.changed else []
        notes += [f"{'reward' if key.startswith('reward') else key} {name!r} {since}" for key, name in code.items()]
        notes += [f"the content of {each} {since}" for each in data]
        # A schedule of the user's is never asked for a version beyond its steps, so the version before is compared.
        plans = (max(self.steps, version), recipe.steps) if 0 < version < recipe.steps else ()
        rates = [learning_rate(recipe.train, version=version - 1, steps=steps) for steps in plans]
        if len(set(rates)) > 1:
            last, now = rates[0], learning_rate(recipe.train, version=version, steps=recipe.steps)
            notes.append(
                f"the {recipe.train.schedule} schedule now ends at version {recipe.steps}: the learning rate was {last:.3g} at "
                f"version {version}, and is {now:.3g} at version {version + 1}"
            )
        return [f"changed    {note}" for note in notes]


def find_folder(
    name: str, recipe: Recipe, *, inputs: dict[str, list[str]], run_dir: Path | None, fresh: bool
) -> tuple[Path, Comparison | None, list[str]]:
    """The folder of the run that this command means, compared with it, or a new one; and what to tell the user."""
    if run_dir is not None:
        return run_dir, None if fresh or not read_summary(run_dir) else compare(run_dir, recipe, inputs=inputs), []
    runs, notes = Path("runs"), list[str]()
    if not fresh:
        for folder in sorted(runs.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True):
            if ".old-" not in folder.name and read_summary(folder) and not is_in_use(folder):  # not one set aside
                found = compare(folder, recipe, inputs=inputs)
                if found.is_meant(recipe):
                    return folder, found, []
                if found.other and not found.is_finished and not notes:
                    notes.append(f"new run    the unfinished one in {folder} has other settings: {', '.join(found.other[:4])}")
    return _unused(runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"), None, notes


def _unused(folder: Path) -> Path:
    """The folder, with a number after its name if it exists."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([folder], numbered) if not each.exists())


def compare(folder: Path, recipe: Recipe, *, inputs: dict[str, list[str]]) -> Comparison:
    """Key by key, with the settings and inputs that the folder's last command had. Folders of earlier versions of Headrace
    have no record of their inputs."""
    found = Comparison(folder, read_summary(folder))
    try:
        before = parse_recipe((folder / "resolved.toml").read_text(), name=str(folder / "resolved.toml"))
        known = json.loads((folder / INPUTS).read_text()) if (folder / INPUTS).exists() else {}
    except (OSError, ValueError) as error:
        found.other.append(f"its settings cannot be read: {error}")
        return found
    fixed = before.fixed_settings.keys() | recipe.fixed_settings.keys()
    is_exact = before.exact or recipe.exact
    by_exact = fixed - flatten(identity(recipe, is_exact=False)).keys() if is_exact else set()
    theirs, ours = flatten(to_dict(before)), flatten(to_dict(recipe))
    by_content = {re.sub(r"\.\d+$", "", key) for key in known.keys() | inputs.keys()} if known else set()
    for key in sorted((theirs.keys() | ours.keys()) - by_content):
        if theirs.get(key) != ours.get(key):
            change = f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}"
            (found.other if key in fixed else found.changed).append(change + ", which exact = true fixes" * (key in by_exact))
    for key in sorted(known.keys() | inputs.keys()) if known else ():
        (old_name, old_content), (name, content) = known.get(key, ("", "")), inputs.get(key, ("", ""))
        if name == old_name and content != old_content:
            found.edited[key] = name
        elif name != old_name:
            (found.changed if content == old_content else found.other).append(f"{key} was {old_name!r}, is {name!r}")
    found.steps = before.steps
    return found


def set_aside(folder: Path) -> Path:
    """Move a run's folder away, with what the cache folder holds of it, and return its new place."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(f"--fresh: {folder} holds the working directory and cannot be moved; give another --run-dir")
    target = _unused(folder.with_name(f"{folder.absolute().name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
    rescued = rescue_folder(folder)
    with locked(folder):
        try:
            folder.rename(target)
        except OSError as error:
            raise ConfigError(f"--fresh: {folder} cannot be moved: {error}; give another --run-dir") from error
    if rescued.exists():
        rescued.rename(rescue_folder(target))
    return target


def rescue_folder(folder: Path) -> Path:
    """Where a run's checkpoints go if its own folder cannot take them."""
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return cache_folder() / "rescue" / f"{folder.name}-{place}"


def saved_in(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return checkpoints_in(folder / "checkpoints", rescue_folder(folder))


def prepare_folder(folder: Path, recipe: Recipe, *, recipe_text: str, inputs: dict[str, list[str]]) -> None:
    """Make the folder, and write the recipe and what it reads into it."""
    for sub in ("rollouts", "logs", "checkpoints"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    resolved = to_toml(to_dict(recipe))
    _replace(folder / "recipe.toml", recipe_text or resolved)
    _replace(folder / "resolved.toml", resolved)
    _replace(folder / INPUTS, json.dumps(inputs, indent=1) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty if missing or unreadable."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return summary


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Replace summary.json."""
    _replace(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _replace(file: Path, text: str) -> None:
    """Atomically: a kill or a full disk leaves the file as it was."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)
