"""The files of a model or a checkpoint between hosts that share no filesystem: they are listed, read and written in pieces."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from headrace.launch.model_cache import cache_folder, use_model
from headrace.leftovers import FOLDER_LOCK
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.records import Array

PIECE_BYTES = 8 << 20
_MOST_KEPT = 3


def list_files(model: str, *, has_trainer: bool = False) -> dict[str, list[int]]:
    """Size and time of each file in a model's folder, by its path there, but for rollouts and, unless `has_trainer`, the state
    of a trainer, which only a resumed run needs; empty for a name of the hub, which hosts look up."""
    folder = Path(model)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FOLDER_LOCK) if folder.is_dir() else []
    names = {path.relative_to(folder): path.stat() for path in paths}
    left_out = {name for name in names if name.suffix == ".wire" or (name.parts[0] == "trainer" and not has_trainer)}
    return {str(name): [seen.st_size, seen.st_mtime_ns] for name, seen in names.items() if name not in left_out}


def read_piece(path: Path, start: int) -> Array:
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(PIECE_BYTES), np.uint8)


def fetch_model(model: str, files: Mapping[str, list[int]], *, read: Callable[[str, int], Array]) -> tuple[str, IO[str] | None]:
    """The model's folder in this host's cache, fetched unless it is there from before, and what keeps it there until it is
    closed; a name of the hub is returned as it is. `read(name, start)` returns the next piece of a file."""
    if not files:
        return model, None
    digest = hashlib.sha256(json.dumps([model, files], sort_keys=True).encode()).hexdigest()[:16]
    target = cache_folder() / "joined" / digest
    return str(target), use_model(target, lambda folder: fetch_files(files, folder, read=read), keep=_MOST_KEPT)


def fetch_files(
    files: Mapping[str, list[int]], folder: Path, *, read: Callable[[str, int], Array], copy: Path | None = None
) -> None:
    """Write files of these sizes into a folder, or link to those of a `copy`, if this host has it."""
    for name, (size, _) in files.items():
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ConfigError(f"there is a file outside its folder: {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # it is of another host, or on another disk
            if copy is not None and (copy / name).stat().st_size == size:
                os.link(copy / name, path)
                continue
        with path.open("wb") as file:
            while (start := file.tell()) < size:
                if not file.write(read(name, start).data):
                    raise ConfigError(f"{name} has become shorter while it was fetched")
