"""The run's folder: finding it, locking it, and the small files in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.settings import ConfigError, flatten, load_toml, to_dict, to_toml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Recipe

SUMMARY = "summary.json"
_MAX_LOG = 100_000_000
"""Bytes of a launcher.log: a line for each episode that fails can be many in a week."""
_MAY_NOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)


def cache_folder() -> Path:
    """Where warmed-up models and rescued checkpoints are kept."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


class FolderLock:
    """Exclusive for the process that writes a folder, shared for readers. The OS releases it when the process ends."""

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        self._path = folder / ".lock"
        self._kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file: IO[str] | None = None

    def acquire(self, *, create: bool = True) -> bool:
        """False if another process holds it or, without `create`, if there is no such folder. A read-only folder is shared
        through its lock file opened for reading, or without a lock if it has no such file."""
        if create:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = self._path.open("a")
        except OSError as error:
            if create:
                raise
            if self._kind != fcntl.LOCK_SH or error.errno not in _MAY_NOT_WRITE:
                return False
            try:
                file = self._path.open()
            except FileNotFoundError:
                return self._path.parent.is_dir()
        try:
            fcntl.flock(file, self._kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._file = file
                return True
        except OSError:
            pass
        file.close()  # held by another process, or removed since it was opened
        return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_in_use(folder: Path) -> bool:
    """Whether a live process writes to this folder."""
    lock = FolderLock(folder)
    is_free = not (folder / ".lock").exists() or lock.acquire()
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


def find_folder(name: str, recipe: Recipe, *, identity: str, run_dir: Path | None, fresh: bool) -> Path:
    """The folder of this command's unfinished run, or a new one."""
    if run_dir is not None:
        _check_same(run_dir, recipe, identity=identity, fresh=fresh)
        return run_dir
    runs = Path("runs")
    if not fresh:
        for folder in sorted(runs.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime, reverse=True):
            summary = read_summary(folder)
            is_same = summary.get("config_hash") == identity and summary.get("status") != "finished"
            if is_same and not is_in_use(folder):
                return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder, number = runs / f"{name}-{stamp}", 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{stamp}-{number}"
    return folder


def _check_same(folder: Path, recipe: Recipe, *, identity: str, fresh: bool) -> None:
    """Raise if the folder holds another run, or one that must not be resumed."""
    summary = read_summary(folder)
    if not summary:
        return
    if summary.get("config_hash") != identity:
        raise ConfigError(
            f"{folder} holds another run ({_difference(folder, recipe)}); give another --run-dir, or the same settings, "
            f"tasks and reward to resume it"
        )
    if fresh or summary.get("status") == "finished":
        raise ConfigError(f"{folder} holds a run already ({summary.get('status')}); give another --run-dir")


def _difference(folder: Path, recipe: Recipe) -> str:
    try:
        theirs = flatten(load_toml((folder / "resolved.toml").read_text(), name="resolved.toml"))
    except (OSError, ConfigError):
        return "its settings cannot be read"
    ours = flatten(to_dict(recipe))
    keys = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    shown = ", ".join(f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}" for key in keys[:4])
    return shown or "its tasks or its reward differ"


def prepare_folder(folder: Path, recipe: Recipe, *, recipe_text: str) -> None:
    """Make the folder and write the recipe into it."""
    for sub in ("rollouts", "logs", "checkpoints"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    resolved = to_toml(to_dict(recipe))
    (folder / "recipe.toml").write_text(recipe_text or resolved)
    (folder / "resolved.toml").write_text(resolved)


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty if missing or unreadable."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return summary


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Replace summary.json atomically."""
    temporary = folder / f".{SUMMARY}.tmp"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(folder / SUMMARY)
