"""The files of a model or a checkpoint between hosts that share no filesystem: they are listed, read and written in pieces."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.records import Array

PIECE_BYTES = 8 << 20
_MOST_KEPT = 3
_MOMENT_SECONDS = 60.0


def list_files(model: str, *, has_trainer: bool = False) -> dict[str, list[int]]:
    """Size and time of each file in a model's folder, by its path there, but for rollouts and, unless `has_trainer`, the state
    of a trainer, which only a resumed run needs; empty for a name of the hub, which hosts look up."""
    folder = Path(model)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock") if folder.is_dir() else []
    names = {path.relative_to(folder): path.stat() for path in paths}
    left_out = {name for name in names if name.suffix == ".wire" or (name.parts[0] == "trainer" and not has_trainer)}
    return {str(name): [seen.st_size, seen.st_mtime_ns] for name, seen in names.items() if name not in left_out}


def read_piece(path: Path, start: int) -> Array:
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(PIECE_BYTES), np.uint8)


@dataclass(frozen=True)
class HostModel:
    """A model as this host has it; not removed from the cache while `lock` is open."""

    path: str
    lock: IO[str] | None = None


def fetch_model(model: str, files: Mapping[str, list[int]], *, cache: Path, read: Callable[[str, int], Array]) -> HostModel:
    """The model's folder in a cache, fetched unless it is there from before; a name of the hub is returned as it is.
    `read(name, start)` returns the next piece of a file. Of those that nobody uses, the cache keeps the newest few."""
    if not files:
        return HostModel(model)
    digest = hashlib.sha256(json.dumps([model, files], sort_keys=True).encode()).hexdigest()[:16]
    target = cache / "joined" / digest
    target.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(FileNotFoundError):  # it is not there, or another process removes it just now
            os.utime(target)  # it is among the newest from now on
            lock = _lock(target)
            if os.fstat(lock.fileno()).st_nlink:
                break
            lock.close()
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as temporary, _lock(Path(temporary)):
            fetch_files(files, Path(temporary), read=read)
            try:
                Path(temporary).rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process of this host was faster
                    raise
    with contextlib.suppress(FileNotFoundError):  # another process of this host does the same
        _remove_old(target.parent)
    return HostModel(str(target), lock)


def fetch_files(files: Mapping[str, list[int]], folder: Path, *, read: Callable[[str, int], Array]) -> None:
    """Write files of these sizes into a folder."""
    for name, (size, _) in files.items():
        path = folder / name
        if ".." in path.parts or Path(name).is_absolute():
            raise ConfigError(f"there is a file outside its folder: {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            while (start := file.tell()) < size:
                if not file.write(read(name, start).data):
                    raise ConfigError(f"{name} has become shorter while it was fetched")


def _lock(folder: Path) -> IO[str]:
    """Others leave the folder alone while this is open."""
    lock = (folder / ".lock").open("a")
    with contextlib.suppress(OSError):  # a file system without locks: there nothing is removed
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _remove_old(cache: Path) -> None:
    """Remove all folders but the newest few, those in use, and those made or taken a moment ago, which may yet be locked."""
    used_at = {folder: folder.stat().st_mtime for folder in cache.iterdir() if folder.is_dir()}
    for folder in sorted(used_at, key=lambda each: used_at[each], reverse=True)[_MOST_KEPT:]:
        if time.time() - used_at[folder] > _MOMENT_SECONDS:
            with contextlib.suppress(OSError), (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                gone = folder.rename(folder.with_name(f".{secrets.token_hex(4)}"))  # whoever takes it now fetches another
                shutil.rmtree(gone, ignore_errors=True)
