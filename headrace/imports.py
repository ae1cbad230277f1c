"""Imports by name: `module:name` or `path/to/file.py:name`. Names travel between processes and files, never code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from headrace.settings import ConfigError


def import_name(reference: str, *, setting: str) -> Any:  # noqa: ANN401  (whatever the user named)
    """The object that `reference` names; modules in the working directory are found too."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{setting} = {reference!r}: write module:name or file.py:name")
    try:
        module = _load(place)
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(f"{setting} = {reference!r}: {error}") from error
    except SystemExit as error:
        fix = "put what is not to run on import under `if __name__ == '__main__':`"
        raise ConfigError(f"{setting} = {reference!r}: {place} calls sys.exit({error.code!r}) on import; {fix}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{setting} = {reference!r}: {place} has no {name!r}")
    return getattr(module, name)


def _load(place: str) -> Any:  # noqa: ANN401  (a module)
    if not place.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (paths are relative to {Path.cwd()})")
    name = f"_headrace_user_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
